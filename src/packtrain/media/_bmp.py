"""BMP headers (OS/2 core header and the Windows headers up to version 5) and their pixel bytes."""

from __future__ import annotations

import struct

from ._head import Parsed
from .location import Head

__all__ = ["MAGIC", "parse"]

MAGIC = b"BM"

_HEADERS = (40, 52, 56, 64, 108, 124)
_DEPTHS = (1, 4, 8, 16, 24, 32)
_RAW, _RLE8, _RLE4, _BITFIELDS = range(4)


def parse(head: Head) -> Parsed:
    """Header facts of a BMP.

    Raises:
        SampleError: truncated_media, unreadable_media, unsupported_media.
    """
    data = head.bytes
    if len(data) < 26:
        raise head.fail("truncated_media", "is cut short inside its BMP header")
    length = struct.unpack_from("<L", data, 14)[0]
    if length == 12:
        width, height, _, bits = struct.unpack_from("<4H", data, 18)
        compression = _RAW
    elif length in _HEADERS:
        if len(data) < 14 + length:
            raise head.fail("truncated_media", "is cut short inside its BMP header")
        width, height, _, bits, compression = struct.unpack_from("<LLHHL", data, 18)
        if data[25] == 0xFF:  # rows from top to bottom: the height is negative
            height = 2**32 - height
    else:
        raise head.fail("unreadable_media", f"is no BMP this reader knows (header of {length} bytes)")
    if bits not in _DEPTHS:
        raise head.fail("unsupported_media", f"is a BMP of {bits} bits per pixel")
    if compression not in (_RAW, _RLE8, _RLE4, _BITFIELDS):
        raise head.fail("unsupported_media", f"is a BMP of compression {compression}")
    start = struct.unpack_from("<L", data, 10)[0]
    if compression in (_RLE8, _RLE4):
        complete = head.at(head.size - 2, 2) == b"\0\1"  # the end-of-bitmap code
    else:
        complete = start + ((width * bits + 31) >> 3 & ~3) * height <= head.size
    return Parsed(width, height, 1, complete)
