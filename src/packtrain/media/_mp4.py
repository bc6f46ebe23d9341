"""What of an MP4 or MOV file is needed beside the demuxer: how the picture is turned, and whether it is cut.

The boxes are walked by their sizes; sample data are never read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ._head import Head

__all__ = ["accepts", "is_cut", "rotation"]

_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
_LIMIT = 1 << 26  # a moov box larger than this is not looked into
_TURNS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): 90, (-1, 0, 0, -1): 180, (0, -1, 1, 0): 270}


def accepts(data: bytes) -> bool:
    return data[4:8] in _FIRST


def is_cut(head: Head) -> bool:
    """Whether a box at the top runs over the end of the file, or there is no `moov` box."""
    found = False
    for kind, _, stop in _boxes(head):
        if stop > head.size:
            return True
        found = found or kind == b"moov"
    return not found


def rotation(head: Head, track: int) -> int:
    """Degrees clockwise (0, 90, 180, 270) that the picture of a track is to be turned by.

    A matrix that is no turn by a right angle (mirrored, sheared) counts as 0.
    """
    for kind, start, stop in _boxes(head):
        if kind == b"moov" and stop - start <= _LIMIT:
            return _of_track(head.at(start, stop - start), track)
    return 0


def _boxes(head: Head) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start of content, end) of the boxes at the top."""
    position = 0
    while position + 8 <= head.size:
        kind, start, stop = _box(head.at(position, 16), position, head.size)
        yield kind, start, stop
        if stop <= position:
            return
        position = stop


def _box(field: bytes, position: int, end: int) -> tuple[bytes, int, int]:
    size, kind = struct.unpack_from(">L4s", field)
    start = position + 8
    if size == 1 and len(field) >= 16:
        size, start = struct.unpack_from(">Q", field, 8)[0], position + 16
    elif size == 0:
        size = end - position
    return kind, start, position + size if size >= 8 else position


def _inner(data: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    while start + 8 <= stop:
        kind, begin, end = _box(data[start : start + 16], start, stop)
        if end < begin or end > stop:
            return
        yield kind, begin, end
        start = end


def _of_track(moov: bytes, track: int) -> int:
    for kind, start, stop in _inner(moov, 0, len(moov)):
        if kind != b"trak":
            continue
        for name, begin, end in _inner(moov, start, stop):
            if name != b"tkhd":
                continue
            wide = moov[begin] == 1
            place = begin + (20 if wide else 12)
            matrix = begin + (52 if wide else 40)
            if matrix + 36 > end or struct.unpack_from(">L", moov, place)[0] != track:
                continue
            a, b, _, c, d = struct.unpack_from(">5l", moov, matrix)
            return _TURNS.get(tuple(round(value / 65536) for value in (a, b, c, d)), 0)
    return 0
