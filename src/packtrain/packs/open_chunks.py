"""Chunks that stay open, at most so many: the one cache of whoever reads packs out of chunks.

An open chunk holds a file descriptor and a map, no packs. The one that was not read for longest is let go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ..store.chunks import ChunkReader

__all__ = ["OpenChunks"]

#: Far below the descriptors that a process may have.
OPEN = 64


class OpenChunks:
    """Chunks by number. Picklable: another process opens its own.

    Args:
        opened: opens the chunk of a number.
        limit: chunks that stay open.
    """

    def __init__(self, opened: Callable[[int], ChunkReader], limit: int = OPEN) -> None:
        self._opened, self.limit = opened, limit
        self._open: OrderedDict[int, ChunkReader] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._open

    def __getitem__(self, chunk: int) -> ChunkReader:
        reader = self._open.pop(chunk, None)
        while len(self._open) >= self.limit:
            self._open.popitem(last=False)
        self._open[chunk] = self._opened(chunk) if reader is None else reader
        return self._open[chunk]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": OrderedDict()}
