"""A shuffle buffer whose state is a list of places and a counter.

Once `size` items are held, each new item takes the place of a random one, which goes out; at the end the rest
goes out in random order. The draws are a function of (key, number of the draw): no generator has to be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..planning._materialise import mix64, seed64

__all__ = ["Shuffle"]

Item = tuple[int, int, Any]  # place, sample id, sample


class Shuffle:
    """Args:
    size: items held; 0 = the order stays.
    key: whole numbers that decide the draws.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self.held: list[Item] = []
        self.draws = 0
        self._key = 0
        for part in key:
            self._key = mix64(self._key ^ seed64(part))

    def push(self, item: Item) -> Iterator[Item]:
        """The item that goes out, if one does."""
        if not self.size:
            yield item
        elif len(self.held) < self.size:
            self.held.append(item)
        else:
            chosen = self._draw(len(self.held))
            out, self.held[chosen] = self.held[chosen], item
            yield out

    def drain(self) -> Iterator[Item]:
        """Everything that is held, in random order."""
        while self.held:
            chosen = self._draw(len(self.held))
            self.held[chosen], self.held[-1] = self.held[-1], self.held[chosen]
            yield self.held.pop()

    def _draw(self, below: int) -> int:
        self.draws += 1
        return mix64(self._key ^ self.draws) % below
