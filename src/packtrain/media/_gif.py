"""GIF headers: the screen, grown to the first frame where that is larger; end of the first frame.

Only the first frame is used by anyone who trains on a GIF, so a file cut in a later frame is complete.
"""

from __future__ import annotations

from ._head import Parsed
from .location import Head

__all__ = ["MAGICS", "parse"]

MAGICS = (b"GIF87a", b"GIF89a")


def parse(head: Head) -> Parsed:
    """Header facts of a GIF.

    Raises:
        SampleError: truncated_media, unreadable_media.
    """
    data = head.bytes
    if len(data) < 13:
        raise _cut(head)
    width = int.from_bytes(data[6:8], "little")
    height = int.from_bytes(data[8:10], "little")
    position = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
    while True:  # each block is a step of the budget
        block = head.at(position, 1)
        if block == b"!":
            position = _skip(head, position + 2)
            if position < 0:
                raise _cut(head)
        elif block == b",":
            break
        elif not block:
            raise _cut(head)
        elif block == b";":
            raise head.fail("unreadable_media", "is a GIF without a picture")
        else:
            position += 1  # readers pass over stray bytes between blocks
    frame = head.at(position, 10)
    if len(frame) < 10:
        raise _cut(head)
    left, top, wide, high = (int.from_bytes(frame[i : i + 2], "little") for i in (1, 3, 5, 7))
    pixels = position + 10 + (3 << (frame[9] & 7) + 1 if frame[9] & 0x80 else 0) + 1
    if pixels > head.size:
        raise _cut(head)
    complete = head.at(head.size - 2, 2) == b"\0;" or _skip(head, pixels) >= 0
    return Parsed(max(width, left + wide), max(height, top + high), 1, complete)


def _skip(head: Head, position: int) -> int:
    """Where the chain of sub-blocks at `position` ends, or -1 when the file ends first."""
    data, base = head.bytes, 0
    while True:  # each sub-block is a step; writers fill them with 255 bytes
        head.spend()
        at = position - base
        if at >= len(data):
            if position >= head.size:
                return -1
            data, base, at = head.at(position, 1 << 16), position, 0
        if not data[at]:
            return position + 1
        position += 1 + data[at]


def _cut(head: Head) -> Exception:
    return head.fail("truncated_media", "is cut short inside its GIF header")
