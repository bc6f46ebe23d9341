"""Tags behind the sound of a file: ID3v1, APE, appended ID3v2 and Lyrics3, in any order."""

from __future__ import annotations

import struct

from ._head import Head

__all__ = ["tags_begin"]

_MOST = 8  # tags one behind the other; writers leave two


def tags_begin(head: Head, start: int) -> int:
    """Where the sound ends: in front of the tags at the end of the medium; never before byte `start`."""
    end = head.size
    for _ in range(_MOST):
        size = _tag_size(head.at(max(start, end - 128), min(128, max(0, end - start))))
        if not size or size > end - start:
            break
        end -= size
    return max(start, end)


def _tag_size(tail: bytes) -> int:
    """Size of the tag that ends where `tail` (the last 128 bytes) ends; 0: none."""
    foot = tail[-32:]
    if len(tail) == 128 and tail.startswith(b"TAG"):
        return 128
    if len(foot) == 32 and foot.startswith(b"APETAGEX"):
        size, flags = struct.unpack_from("<L", foot, 12)[0], struct.unpack_from("<L", foot, 20)[0]
        return int(size) + (32 if flags & 1 << 31 else 0)
    if foot[-10:-7] == b"3DI" and not any(byte & 0x80 for byte in foot[-4:]):
        size = 0
        for byte in foot[-4:]:
            size = size << 7 | byte
        return size + 20
    if foot[-9:] == b"LYRICS200" and foot[-15:-9].isdigit():
        return int(foot[-15:-9]) + 15
    return 0
