"""Is a sound container that only a decoder can count shorter than its own header says?

    AIFF   "FORM", bytes that follow (big-endian u32)
    AU     ".snd", offset and size of the data (big-endian u32; all ones = not known)
    W64    16-byte id, whole size (little-endian u64)
    CAF    "caff" and a chain of chunks, type and size (big-endian i64; -1 = to the end)

libsndfile decodes what is left of such a file and says nothing; a sample that lost half its sound is not
the sample. Layouts: Apple's AIFF and CAF specifications, the NeXT/Sun .au header, Sony's Wave64.
"""

from __future__ import annotations

import struct

from ._head import Head

__all__ = ["is_cut"]

_W64 = b"riff\x2e\x91\xcf\x11"


def is_cut(head: Head) -> bool:
    """True when the header promises more bytes than the file holds; False where it does not say."""
    data = head.bytes
    if data[:4] == b"FORM" and len(data) >= 8:
        return int.from_bytes(data[4:8], "big") + 8 > head.size + 1  # an odd last chunk may lack its pad byte
    if data[:4] == b".snd" and len(data) >= 12:
        offset, size = struct.unpack_from(">LL", data, 4)
        return bool(size != 0xFFFFFFFF and offset + size > head.size)
    if data.startswith(_W64) and len(data) >= 24:
        return int.from_bytes(data[16:24], "little") > head.size
    return data[:4] == b"caff" and _caf_is_cut(head)


def _caf_is_cut(head: Head) -> bool:
    position = 8
    while position < head.size:
        field = head.at(position, 12)
        if len(field) < 12:
            return True
        kind, size = struct.unpack(">4sq", field)
        if size < 0:
            return False  # runs to the end of the file
        position += 12 + size
        if kind == b"data":
            return bool(position > head.size)
    return True  # no sound before the end
