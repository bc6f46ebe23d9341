"""TIFF headers: size, orientation and extent of the first directory. BigTIFF is left to Pillow."""

from __future__ import annotations

import struct

from ._head import Parsed
from .location import Head

__all__ = ["MAGICS", "parse"]

MAGICS = (b"II*\0", b"MM\0*")

_WIDTH, _HEIGHT, _ORIENTATION = 256, 257, 274
_EXTENTS = ((273, 279), (324, 325))  # (offsets, byte counts) of strips and of tiles
_INTEGERS = {1: "B", 3: "H", 4: "L"}
_SIZES = {1: 1, 3: 2, 4: 4}


def parse(head: Head) -> Parsed:
    """Header facts of a TIFF; the size is the stored one, as for every format.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    endian = "<" if head.bytes[:2] == b"II" else ">"
    if len(head.bytes) < 8:
        raise head.fail("truncated_media", "is cut short inside its TIFF header")
    start = struct.unpack_from(endian + "L", head.bytes, 4)[0]
    field = head.at(start, 2)
    if len(field) < 2:
        raise head.fail("truncated_media", "is cut short before its TIFF directory")
    count = struct.unpack(endian + "H", field)[0]
    table = head.at(start + 2, 12 * count)
    if len(table) < 12 * count:
        raise head.fail("truncated_media", "is cut short inside its TIFF directory")
    tags: dict[int, tuple[int, ...]] = {}
    for position in range(0, len(table), 12):
        tag, kind, number = struct.unpack_from(endian + "HHL", table, position)
        code = _INTEGERS.get(kind)
        wanted = tag in (_WIDTH, _HEIGHT, _ORIENTATION) or any(tag in pair for pair in _EXTENTS)
        if code is None or not number or not wanted or tag in tags:
            continue
        size = number * _SIZES[kind]
        where = struct.unpack_from(endian + "L", table, position + 8)[0]
        value = table[position + 8 : position + 8 + size] if size <= 4 else head.at(where, size)
        if len(value) < size:
            continue  # without a strip table the file counts as suspicious, and Pillow is asked
        tags[tag] = struct.unpack(f"{endian}{number}{code}", value)
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise head.fail("unreadable_media", "is a broken TIFF: no width or height")
    turned = tags.get(_ORIENTATION, (1,))[0]
    complete = any(
        offsets in tags
        and counts in tags
        and all(o + c <= head.size for o, c in zip(tags[offsets], tags[counts], strict=False))
        for offsets, counts in _EXTENTS
    )
    return Parsed(tags[_WIDTH][0], tags[_HEIGHT][0], turned if 1 <= turned <= 8 else 1, complete)
