"""Small made images of every format that has an own header reader."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageFile, ImageOps


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture with some texture, so that every format has a few hundred bytes to cut."""
    rng = np.random.default_rng(width * 1000 + height)
    coarse = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 4), dtype=np.uint8)
    pixels = coarse.repeat(4, 0).repeat(4, 1)[:height, :width]
    return Image.fromarray(np.ascontiguousarray(pixels), "RGBA").convert(mode)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def exif_block(orientation: int, endian: str = "<", kind: int = 3) -> bytes:
    """A TIFF structure with one directory that holds Make and Orientation."""
    head = (b"II*\0" if endian == "<" else b"MM\0*") + struct.pack(endian + "L", 8)
    code = {3: "H2x", 4: "L", 1: "B3x"}[kind]
    make = struct.pack(endian + "HHLL", 271, 2, 8, 38) + b""
    turn = struct.pack(endian + "HHL", 274, kind, 1) + struct.pack(endian + code, orientation)
    return head + struct.pack(endian + "H", 2) + make + turn + struct.pack(endian + "L", 0) + b"packers\0"


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">L", len(body)) + kind + body + struct.pack(">L", zlib.crc32(kind + body))


def with_png_chunk(data: bytes, kind: bytes, body: bytes, *, after_pixels: bool) -> bytes:
    """A PNG with one more chunk, before the first IDAT or before IEND."""
    at = len(data) - 12 if after_pixels else data.index(b"IDAT") - 4
    return data[:at] + png_chunk(kind, body) + data[at:]


def pillow_size(data: bytes) -> tuple[int, int] | None:
    """Size after `exif_transpose` of a full decode, or None where Pillow fails."""
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                return ImageOps.exif_transpose(image).size
        except Exception:
            return None


MADE: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: encoded(picture(61, 40), "JPEG", quality=90),
    "jpeg-progressive": lambda: encoded(picture(61, 40), "JPEG", progressive=True),
    "jpeg-grey": lambda: encoded(picture(33, 20, "L"), "JPEG"),
    "jpeg-cmyk": lambda: encoded(picture(33, 20, "CMYK"), "JPEG"),
    "jpeg-exif6": lambda: encoded(picture(61, 40), "JPEG", exif=b"Exif\0\0" + exif_block(6)),
    "png": lambda: encoded(picture(61, 40), "PNG"),
    "png-rgba": lambda: encoded(picture(50, 31, "RGBA"), "PNG"),
    "png-palette": lambda: encoded(picture(50, 31).quantize(16), "PNG"),
    "png-grey": lambda: encoded(picture(50, 31, "L"), "PNG"),
    "png-bit": lambda: encoded(picture(50, 31, "1"), "PNG"),
    "png-exif8": lambda: encoded(picture(61, 40), "PNG", exif=b"Exif\0\0" + exif_block(8, ">")),
    "webp": lambda: encoded(picture(61, 40), "WEBP", quality=60),
    "webp-lossless": lambda: encoded(picture(61, 40), "WEBP", lossless=True),
    "webp-alpha": lambda: encoded(picture(61, 40, "RGBA"), "WEBP", quality=60),
    "webp-exif5": lambda: encoded(picture(61, 40), "WEBP", exif=exif_block(5)),
    "gif": lambda: encoded(picture(61, 40).quantize(32), "GIF"),
    "gif-animated": lambda: encoded(
        picture(40, 30).quantize(16),
        "GIF",
        save_all=True,
        append_images=[picture(40, 31).crop((0, 0, 40, 30)).quantize(16)],
    ),
    "bmp": lambda: encoded(picture(61, 40), "BMP"),
    "bmp-palette": lambda: encoded(picture(61, 40).quantize(16), "BMP"),
    "bmp-bit": lambda: encoded(picture(61, 40, "1"), "BMP"),
    "tiff": lambda: encoded(picture(61, 40), "TIFF"),
    "tiff-lzw": lambda: encoded(picture(61, 40), "TIFF", compression="tiff_lzw"),
}
