"""Seeded choices that stay the same on every machine and Python version.

Only `random.Random.random()` is promised by Python to repeat for a seed, so every choice here is
made from it, and each sample draws from its own stream: adding a sample never changes another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Draws"]

T = TypeVar("T")


class Draws:
    """One stream of choices, named by its key.

    >>> Draws("0/train/7").integer(1, 6) == Draws("0/train/7").integer(1, 6)
    True
    """

    def __init__(self, key: str) -> None:
        self._uniform = random.Random(key).random

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._uniform() < probability

    def integer(self, low: int, high: int) -> int:
        """An integer in low..high, both included."""
        return low + int(self._uniform() * (high - low + 1))

    def choice(self, items: Sequence[T]) -> T:
        return items[int(self._uniform() * len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """A shuffled copy (Fisher-Yates)."""
        out = list(items)
        for last in range(len(out) - 1, 0, -1):
            other = self.integer(0, last)
            out[last], out[other] = out[other], out[last]
        return out

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in drawn order."""
        return self.shuffled(items)[:count]
