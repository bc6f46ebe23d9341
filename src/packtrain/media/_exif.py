"""The EXIF orientation, read from the few bytes that hold it.

Answers as Pillow's `ImageOps.exif_transpose` acts: the first usable Orientation tag (274) of the first
directory, else the Orientation of an XMP packet. A block that is no TIFF structure counts as upright.
"""

from __future__ import annotations

import re
import struct

__all__ = ["SIDEWAYS", "exif_orientation", "orientation", "xmp_orientation"]

SIDEWAYS = frozenset((5, 6, 7, 8))  # orientations that swap width and height

_ORIENTATION = 274
_PREFIX = re.compile(b"^(Exif\x00\x00){1,2}")
_TIFF = {b"II*\0": "<", b"MM\0*": ">", b"MM*\0": ">", b"II\0*": "<", b"MM\0+": ">"}
_UNIT = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_FORMAT = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l", 11: "f", 12: "d", 13: "L", 16: "Q"}
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(exif: bytes | None, xmp: bytes | None) -> int:
    """1..8 from an EXIF block and an XMP packet, either of which may be absent."""
    value = exif_orientation(exif) if exif else None
    if value is None and xmp:
        value = xmp_orientation(xmp)
    return value if value is not None and 1 <= value <= 8 else 1


def xmp_orientation(packet: bytes) -> int | None:
    found = _XMP.search(packet)
    return int(found[1]) if found else None


def exif_orientation(block: bytes) -> int | None:
    """The Orientation of an EXIF block: None when the tag is absent, 1 when it means nothing."""
    data = _PREFIX.sub(b"", block)
    if not data:
        return None
    endian = _TIFF.get(data[:4])
    if endian is None or len(data) < 8:
        return 1
    start = struct.unpack_from(endian + "L", data, 4)[0]
    if start + 2 > len(data):
        return None
    count = struct.unpack_from(endian + "H", data, start)[0]
    entry = struct.Struct(endian + "HHL")
    far = 0  # bytes of values that stand outside their entry, as far as they were read
    for position in range(start + 2, min(start + 2 + 12 * count, len(data) - 11), 12):
        tag, kind, number = entry.unpack_from(data, position)
        unit = _UNIT.get(kind)
        if unit is None or number == 0:
            continue
        size = unit * number
        where = position + 8
        if size > 4:
            far += size
            if far > len(data):
                continue
            where = struct.unpack_from(endian + "L", data, position + 8)[0]
            if where + size > len(data):
                return None  # readers stop here: what follows in the directory is not seen
        if tag == _ORIENTATION:
            return _number(endian, kind, data[where : where + size])
    return None


def _number(endian: str, kind: int, value: bytes) -> int:
    """The first number of a tag as an orientation; 1 where it is none."""
    if kind in _FORMAT:
        found: float = struct.unpack_from(endian + _FORMAT[kind], value)[0]
    elif kind in (5, 10):
        top, bottom = struct.unpack_from(endian + ("LL" if kind == 5 else "ll"), value)
        if bottom == 0 or top % bottom:
            return 1
        found = top // bottom
    else:
        return 1
    return int(found) if found in (1, 2, 3, 4, 5, 6, 7, 8) else 1
