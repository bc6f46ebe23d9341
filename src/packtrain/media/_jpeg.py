"""JPEG headers: frame size, EXIF orientation and the end marker, without decoding.

Walks the marker segments up to the first scan as Pillow does (junk between segments is skipped, the
last frame header wins). The end is normally the last two bytes (zero padding is passed over); a file
with other data behind it (second pictures, motion photos) is searched for its own end marker.
"""

from __future__ import annotations

import re

from ._exif import orientation
from ._head import Parsed
from .location import Head

__all__ = ["MAGIC", "parse"]

MAGIC = b"\xff\xd8\xff"

_FRAMES = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0), 0xDE))
_BARE = frozenset((0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)))  # markers without a segment
_WINDOW = 2048
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


def parse(head: Head) -> Parsed:
    """Header facts of a JPEG.

    Raises:
        SampleError: truncated_media, unreadable_media, unsupported_media.
    """
    data, base = head.bytes, 0  # the window looked at, and where it starts
    position = 2
    frame: tuple[int, int] | None = None
    exif: list[bytes] = []
    xmp: bytes | None = None
    while True:
        head.spend()
        at = position - base
        if at + 4 > len(data):
            data, base, at = head.at(position, _WINDOW), position, 0
            if len(data) < 4:
                raise head.fail("truncated_media", "is cut short inside its JPEG header")
        if data[at] != 0xFF:  # junk between segments
            found = data.find(b"\xff", at)
            position = base + (found if found >= 0 else len(data))
            continue
        marker = data[at + 1]
        if marker == 0xFF:
            position += 1
            continue
        if marker == 0 or marker in _BARE:
            position += 2
            continue
        if marker < 0xC0:
            raise head.fail("unreadable_media", f"is a broken JPEG: no marker at byte {position}")
        length = max(2, data[at + 2] << 8 | data[at + 3])
        stop = position + 2 + length
        if stop > head.size:
            raise head.fail("truncated_media", "is cut short inside its JPEG header")
        if marker in _FRAMES:
            frame = _frame(head, head.at(position + 4, length - 2))
        elif marker == 0xE1:
            segment = head.at(position + 4, length - 2)
            if segment.startswith(_EXIF):
                exif.append(segment[6:] if exif else segment)
            elif segment.startswith(_XMP):
                xmp = segment[len(_XMP) :]
        elif marker == 0xDA:
            break
        position = stop
    if frame is None:
        raise head.fail("unreadable_media", "is a broken JPEG: a scan before its frame header")
    return Parsed(*frame, orientation(b"".join(exif) or None, xmp), _ends(head, stop))


def _frame(head: Head, segment: bytes) -> tuple[int, int]:
    """(width, height) of a frame header."""
    if len(segment) < 6:
        raise head.fail("unreadable_media", "is a broken JPEG: short frame header")
    if segment[0] != 8:
        raise head.fail("unsupported_media", f"is a JPEG of {segment[0]} bits per sample (not 8)")
    if segment[5] not in (1, 3, 4):
        raise head.fail("unsupported_media", f"is a JPEG of {segment[5]} components (not 1, 3 or 4)")
    return segment[3] << 8 | segment[4], segment[1] << 8 | segment[2]


def _ends(head: Head, scan: int) -> bool:
    """Whether the picture whose first scan starts at byte `scan` has its end marker."""
    if head.at(max(scan, head.size - 64), 64).rstrip(b"\0").endswith(b"\xff\xd9"):
        return True
    data = head.at(scan, head.size - scan)
    position = 0
    while found := _MARKER.search(data, position):
        head.spend()
        position = found.end()
        code = data[position - 1]
        if code == 0xD9:
            return True
        if code >= 0xC0 and code not in _BARE:
            if position + 2 > len(data):
                return False
            position += data[position] << 8 | data[position + 1]
    return False
