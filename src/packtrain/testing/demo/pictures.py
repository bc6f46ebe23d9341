"""The ways pictures lie on disk in real data sets: rotated by EXIF, transparent, palette, mislabelled.

Whatever the variant, a reader that honours the file's bytes and its EXIF orientation sees the
picture that was drawn (JPEG up to compression).
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["SCHEDULE", "encode_picture", "variant_of"]

#: Variants in the order in which pictures get them; `variant_of` walks it.
SCHEDULE = (
    "png",
    "jpeg",
    "jpeg_exif",
    "png",
    "rgba",
    "png",
    "png_named_jpg",
    "jpeg",
    "palette",
    "png_exif",
    "png",
    "jpeg_exif",
    "webp",
    "grey",
    "png",
    "jpeg_named_png",
)
_SUFFIX = {
    "jpeg": ".jpg",
    "jpeg_exif": ".jpg",
    "png_named_jpg": ".jpg",
    "webp": ".webp",
}  # every other variant: .png
_ORIENTATION = 0x0112


def variant_of(sample: int, picture: int, colour_matters: bool) -> str:
    """The variant of a sample's picture; a picture whose colours are asked for is never grey."""
    variant = SCHEDULE[(sample * 5 + picture) % len(SCHEDULE)]
    return "palette" if variant == "grey" and colour_matters else variant


def encode_picture(picture: Image, variant: str, sample: int) -> tuple[str, bytes]:
    """Suffix and bytes of an RGB picture in one variant. Bytes repeat on one Pillow version."""
    from PIL import Image

    options: dict[str, object] = {}
    form = "JPEG" if variant.startswith("jpeg") else "WEBP" if variant == "webp" else "PNG"
    if form == "JPEG":
        options["quality"] = 92
    elif form == "WEBP":
        options["lossless"] = True
    if variant in ("jpeg_exif", "png_exif"):
        orientation = (6, 3, 8, 5, 2, 7, 4)[sample % 7]
        picture = picture.transpose(_undo(orientation))
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        options["exif"] = exif.tobytes()
    elif variant == "rgba":
        picture = _with_round_corners(picture)
    elif variant == "palette":
        picture = picture.quantize(32)
    elif variant == "grey":
        picture = picture.convert("L")
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return _SUFFIX.get(variant, ".png"), buffer.getvalue()


def _undo(orientation: int) -> Any:
    """The transposition whose undoing a reader performs for this EXIF orientation."""
    from PIL.Image import Transpose

    return {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_90,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_270,
    }[orientation]


def _with_round_corners(picture: Image) -> Image:
    from PIL import Image, ImageDraw

    alpha = Image.new("L", picture.size, 0)
    ImageDraw.Draw(alpha).rounded_rectangle((0, 0, picture.width - 1, picture.height - 1), 10, fill=255)
    out = picture.convert("RGBA")
    out.putalpha(alpha)
    return out
