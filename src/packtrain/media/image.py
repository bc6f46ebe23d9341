"""Sizes of images from their headers, and the images themselves, agreeing with each other.

`read_header` answers in microseconds what `ImageOps.exif_transpose(Image.open(...)).size` answers after a
decode: the format is told by its magic bytes (never by the suffix), the size is turned as EXIF asks, and
the end marker is looked for, so that a file that was cut short is found without decoding it. Pillow gets
by without some end markers (a JPEG whose last two bytes are missing, a PNG without IEND). Only for such a
*suspicious* file the header reader asks Pillow once, by decoding, so it never refuses what Pillow accepts.

`open_image` decodes. It takes the orientation from the same header and checks that the decoder agrees on
the size, so the length measured from the header is the length trained on. Both raise the same
`SampleError` reasons:

    missing_media      the file is not there
    truncated_media    it ends before its picture does
    unreadable_media   a folder, no permission, empty, 0 pixels wide, broken inside, too large for Pillow
    unsupported_media  no image format that is read here

Formats without an own reader (AVIF, JPEG 2000, ICO, PPM, QOI, BigTIFF) are decoded to get their size:
exact, but as slow as training is. Pillow's limit against decompression bombs applies (`_pixel_limit`):
a warning is never an error, and an image over the hard limit is refused by both functions alike.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..errors import SampleError
from . import _picture_headers as headers
from .location import Head, Parsed, Ref, open_head, open_whole

if TYPE_CHECKING:
    from PIL import Image


log = logging.getLogger(__name__)

#: Formats read through Pillow alone. Those that run other programs (EPS, WMF) are left out on purpose.
BY_PILLOW = ("AVIF", "JPEG2000", "ICO", "PPM", "QOI", "TIFF")

#: First bytes, name and header reader of a format.
_READERS: tuple[tuple[bytes | tuple[bytes, ...], str, Callable[[Head], Parsed]], ...] = (
    (headers.JPEG_MAGIC, "JPEG", headers.parse_jpeg),
    (headers.PNG_MAGIC, "PNG", headers.parse_png),
    (headers.GIF_MAGICS, "GIF", headers.parse_gif),
    (headers.BMP_MAGIC, "BMP", headers.parse_bmp),
    (headers.TIFF_MAGICS, "TIFF", headers.parse_tiff),
)
_MAGICS = (headers.JPEG_MAGIC, headers.PNG_MAGIC, *headers.GIF_MAGICS, b"RIFF", *headers.TIFF_MAGICS, b"BM")
_PLAIN, _COMMENT = (b"P1", b"P2", b"P3"), 64  # PPM of digits as text; steps of a comment in one
_SCANS, _SCANNED = 100, 1 << 33  # scans of a JPEG that pass over that many pixels together
_STRIPS = 1 << 18
_EXIF_KEYS = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
_TURNS = (  # of the orientations 2 to 8
    *("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM"),
    *("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)
_PILLOW_LIMIT = 2 * (1024 * 1024 * 1024 // 4 // 3)  # Pillow's own default: an error above this


class ImageHeader(NamedTuple):
    """What the header of an image says.

    Attributes:
        width: pixels, after EXIF orientation.
        height: pixels, after EXIF orientation.
        orientation: EXIF orientation 1..8 as stored (1 = upright).
        format: "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", or Pillow's name of another format.
        complete: the picture is whole. Only with `read_header(..., check_end=False)` it may be False.
    """

    width: int
    height: int
    orientation: int
    format: str
    complete: bool


def read_header(ref: Ref, *, check_end: bool = True) -> ImageHeader:
    """Size and orientation of an image without decoding it.

    Args:
        ref: path, data URL or bytes (`packtrain.media.location`).
        check_end: raise for a file that was cut short. False: report it in `complete` instead, and never
            decode to find out.

    Raises:
        SampleError: missing_media, truncated_media, unreadable_media, unsupported_media.
    """
    with open_head(ref) as head:
        found = _parse(head)
        if found is not None:
            name, parsed = found
            header = _checked(head, name, parsed)
            if header.complete or not check_end:
                return header
            if _decodes(head):
                return header._replace(complete=True)
            raise head.fail("truncated_media", f"is cut short: its {name} data end before the picture does")
        data = head.whole()
    picture, name = _decode_other(data, head)
    return ImageHeader(picture.width, picture.height, 1, name, True)


def open_image(ref: Ref) -> Image.Image:
    """The decoded image, turned as EXIF asks, in the mode it is stored in (RGB, RGBA, P, L, …).

    The result carries no orientation any more: turning it again is harmless.

    Raises:
        SampleError: the reasons of `read_header`, for the same files.
    """
    with open_whole(ref) as head:
        found = _parse(head)
        if found is None:
            return _decode_other(head.bytes, head)[0]
        name, parsed = found
        header = _checked(head, name, parsed)
        picture = _decode(head.bytes, head, whole=parsed.complete)
        turned = name == "TIFF"  # by Pillow
        wide, high = header[:2] if turned else parsed[:2]
        decoded = f"{picture.width}x{picture.height}"
        head.refuse(
            picture.size != (wide, high), f"says {wide}x{high} in its header but decodes to {decoded}"
        )
        return _upright(picture if turned else _turn(picture, parsed.orientation))


# --------------------------------------------------------------------------------------------
# headers
# --------------------------------------------------------------------------------------------
def _parse(head: Head) -> tuple[str, Parsed] | None:
    """(format, facts) by magic bytes; None for a format without an own reader."""
    data = head.bytes
    for magics, name, reader in _READERS:
        if data.startswith(magics):
            return name, reader(head)
    if headers.is_webp(data):
        return "WEBP", headers.parse_webp(head)
    head.refuse(not data, "is empty (0 bytes)")
    short = len(data) < 12 and any(magic.startswith(data) or data.startswith(magic) for magic in _MAGICS)
    head.refuse(short, f"is cut short: {len(data)} bytes are no image", "truncated_media")
    return None


def _checked(head: Head, name: str, parsed: Parsed) -> ImageHeader:
    width, height, orientation, complete = parsed
    if width < 1 or height < 1:
        raise head.fail("unreadable_media", f"is {width}x{height} pixels")
    if width * height > _pixel_limit():
        raise head.fail(
            "unreadable_media",
            f"has {width}x{height} pixels, over the limit of {_pixel_limit()} against decompression bombs",
            hint="raise PIL.Image.MAX_IMAGE_PIXELS (half the limit) if the file is to be trusted",
        )
    if orientation in headers.SIDEWAYS:
        width, height = height, width
    return ImageHeader(width, height, orientation, name, complete)


def _pixel_limit() -> int:
    """Twice Pillow's MAX_IMAGE_PIXELS, above which Pillow refuses; its default while Pillow is not loaded."""
    module = sys.modules.get("PIL.Image")
    if module is None:
        return _PILLOW_LIMIT
    limit = getattr(module, "MAX_IMAGE_PIXELS", None)
    return sys.maxsize if limit is None else 2 * int(limit)


# --------------------------------------------------------------------------------------------
# pixels
# --------------------------------------------------------------------------------------------
def _decodes(head: Head) -> bool:
    """Whether Pillow decodes a file whose end marker is missing."""
    try:
        _decode(head.whole(), head, whole=False)
    except SampleError:
        return False
    log.debug("%s has no end marker but decodes", head.name)
    return True


def _decode(data: bytes, head: Head, *, whole: bool, formats: tuple[str, ...] | None = None) -> Image.Image:
    """Pillow's image, loaded. `whole`: the end marker was seen, so a failure is not a cut."""
    from PIL import Image

    with _QUIET:
        try:
            stream = _Whole(data)
            picture = Image.open(stream, formats=formats)
            _check_work(picture, data, head)
            # Decoders of formats without an own reader (JPEG 2000) read on to the end themselves.
            stream.load(picture) if formats is None and hasattr(picture, "load_end") else picture.load()
        except SampleError:
            raise
        except Image.DecompressionBombError as error:
            raise head.fail("unreadable_media", f"is refused by Pillow: {error}") from None
        except Exception as error:  # OSError, SyntaxError, ValueError, EOFError, struct.error …
            cut = not whole or "truncated" in str(error).lower()
            text = f"{type(error).__name__}: {error}".split("\n")[0][:200]
            raise head.fail(
                "truncated_media" if cut else "unreadable_media",
                f"{'is cut short' if cut else 'cannot be decoded'} ({text})",
            ) from None
    return picture


def _check_work(picture: Image.Image, data: bytes, head: Head) -> None:
    """Refuse a picture whose parts, each of a few bytes, are decoded over and over: JPEG scans, TIFF strips.

    A scan passes over all pixels, in 0.15 ns each (libjpeg-turbo advises a limit of 500 scans); a strip takes
    4 us.
    """
    scans = data.count(b"\xff\xda") if picture.format in ("JPEG", "MPO") else 0
    many = scans > _SCANS and scans * picture.width * picture.height > _SCANNED
    head.refuse(many, f"has {scans:,} scans of {picture.width}x{picture.height} pixels")
    if len(getattr(picture, "tile", ())) > _STRIPS:
        raise head.fail("unreadable_media", f"has {len(picture.tile):,} strips, more than {_STRIPS:,}")


def _decode_other(data: bytes, head: Head) -> tuple[Image.Image, str]:
    """(image, format) of a file that has no own header reader."""
    from PIL import Image, ImageOps

    if data[:2] in _PLAIN:  # of each comment Pillow copies a megabyte
        head.spend(_COMMENT * data.count(b"#"))
    with _QUIET:
        try:
            with Image.open(_Parsed(data, head), formats=BY_PILLOW) as probe:
                name = probe.format or "?"
        except SampleError:
            raise
        except Image.DecompressionBombError as error:
            raise head.fail("unreadable_media", f"is refused by Pillow: {error}") from None
        except Exception:
            raise head.fail(
                "unsupported_media",
                f"is no image format that is read here (it starts with {data[:8]!r})",
                hint="JPEG, PNG, WebP, GIF, BMP and TIFF are read from their headers",
            ) from None
        picture = _decode(data, head, whole=True, formats=BY_PILLOW)
        try:
            turned = ImageOps.exif_transpose(picture)
        except Exception:  # an EXIF block that is none: upright
            turned = picture
    return _upright(turned), name


def _upright(picture: Image.Image) -> Image.Image:
    """A picture that was turned says of no turn any more."""
    for key in _EXIF_KEYS:
        picture.info.pop(key, None)
    return picture


def _turn(picture: Image.Image, orientation: int) -> Image.Image:
    if orientation == 1:
        return picture
    from PIL import Image

    return picture.transpose(Image.Transpose[_TURNS[orientation - 2]])


class _Parsed(io.BytesIO):
    """Bytes that Pillow parses, in the budget of the medium: up to its pixels a PPM is read by bytes."""

    def __init__(self, data: bytes, head: Head) -> None:
        super().__init__(data)
        self._head = head

    def read(self, size: int | None = -1, /) -> bytes:
        self._head.spend()
        return super().read(size)


class _Whole(io.BytesIO):
    """Bytes whose end is an error while a picture is decoded: Pillow reads there only where the file is cut.

    With `ImageFile.LOAD_TRUNCATED_IMAGES` set, Pillow would fill a cut picture up with grey. The switch is
    the user's, and global: other threads decode by it, so it is never changed.
    """

    loading = False

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        if self.loading and not found and size:
            raise OSError("image file is truncated")
        return found

    def load(self, picture: Image.Image) -> None:
        """Decode `picture`, which was opened from here. OSError: the file ends before its last pixel."""
        finish = picture.load_end

        def load_end() -> None:
            self.loading = False
            finish()

        picture.load_end = load_end
        self.loading = True
        try:
            picture.load()
        finally:
            self.loading = False
            del picture.load_end


class _QuietPillow:
    """Pillow without warnings, in all threads: filters of warnings are global before Python 3.14.

    They are changed by the first thread that decodes and put back by the last one: each thread on its own
    would put back what another one had changed.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = contextlib.ExitStack()
                self._before.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._before is not None:
                self._before.close()


_QUIET = _QuietPillow()
