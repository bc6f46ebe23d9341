"""WebP headers: VP8 (lossy), VP8L (lossless) and VP8X (extended) sizes, EXIF/XMP chunks, RIFF length."""

from __future__ import annotations

from ._exif import orientation
from ._head import Parsed
from .location import Head

__all__ = ["accepts", "parse"]

_EXIF, _XMP = 0x08, 0x04  # flags of the extended header


def accepts(data: bytes) -> bool:
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def parse(head: Head) -> Parsed:
    """Header facts of a WebP.

    Raises:
        SampleError: truncated_media, unreadable_media, unsupported_media.
    """
    data = head.bytes
    kind = data[12:16]
    if len(data) < (25 if kind == b"VP8L" else 30):
        raise head.fail("truncated_media", "is cut short inside its WebP header")
    complete = 8 + int.from_bytes(data[4:8], "little") <= head.size
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        return Parsed(width, height, _turned(head, data[20]) if data[20] & (_EXIF | _XMP) else 1, complete)
    if kind == b"VP8L":
        if data[20] != 0x2F:
            raise head.fail("unreadable_media", "is a broken WebP: no lossless signature")
        bits = int.from_bytes(data[21:25], "little")
        return Parsed(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), 1, complete)
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a" or data[20] & 1:
            raise head.fail("unreadable_media", "is a broken WebP: no key frame at its start")
        width = int.from_bytes(data[26:28], "little") & 0x3FFF
        height = int.from_bytes(data[28:30], "little") & 0x3FFF
        return Parsed(width, height, 1, complete)
    raise head.fail("unsupported_media", f"is a WebP with an unknown first chunk {kind!r}")


def _turned(head: Head, flags: int) -> int:
    """Orientation from the EXIF or XMP chunk that the flags announce; the first of a kind counts."""
    exif: bytes | None = None
    xmp: bytes | None = None
    position = 12
    stop = min(head.size, 8 + int.from_bytes(head.bytes[4:8], "little"))
    while position + 8 <= stop:
        field = head.at(position, 8)
        length = int.from_bytes(field[4:], "little")
        kind = field[:4]
        if kind == b"EXIF" and exif is None and flags & _EXIF:
            exif = head.at(position + 8, length)
        elif kind == b"XMP " and xmp is None and flags & _XMP:
            xmp = head.at(position + 8, length)
        position += 8 + length + (length & 1)
    return orientation(exif, xmp)
