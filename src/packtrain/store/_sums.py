"""CRC-32 of members: from zlib, or the same from ISA-L (`packtrain[export]`) at ten times its speed."""

from __future__ import annotations

import zlib
from typing import Protocol

from ..execute.local import available_cpus

__all__ = ["BESIDE", "crc32"]


class _Sum(Protocol):
    def __call__(self, data: bytes, value: int = 0, /) -> int: ...


crc32: _Sum
try:
    from isal.isal_zlib import crc32
except ImportError:
    crc32 = zlib.crc32
    #: Sums of large media are worth a thread of their own: zlib is slow, and there is a core for it.
    BESIDE = available_cpus() > 2
else:
    BESIDE = False
