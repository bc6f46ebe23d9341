"""Permutation: a seeded bijection of 0..n-1, computed entry by entry in O(1) memory."""

from __future__ import annotations

import math
import operator

import numpy as np

from ..checks import whole
from ..extend import I64
from ..packers.random_fit import GOLDEN, mix

_ROUNDS = 8


class Permutation:
    """A bijection of 0..n-1 that depends on (n, seed, epoch) only. O(1) memory, integers only.

    An alternating Feistel network over a grid of a x b >= n cells, both about sqrt(n): each round adds a
    hash of one coordinate to the other, which is invertible. Values outside 0..n-1 are sent through again
    (cycle walking); at most about 2 sqrt(n) cells are outside.

    >>> sorted(int(Permutation(5, seed=1)[i]) for i in range(5))
    [0, 1, 2, 3, 4]
    """

    __slots__ = ("_a", "_b", "_keys", "n")

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        whole("entries of a permutation", n, 1, 1 << 62)
        whole("seed", seed, 0)
        whole("epoch", epoch, 0)
        self.n = n
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        # Three words for (seed, epoch): two 64-bit halves of the seed, then the epoch.
        words = np.array(
            [seed & (1 << 64) - 1, seed >> 64 & (1 << 64) - 1, epoch & (1 << 64) - 1], dtype=np.uint64
        )
        key = np.zeros(1, dtype=np.uint64)
        for word in words:
            key = mix(key ^ word)
        self._keys = mix(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * GOLDEN)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        """Entry of the permutation at `index` (0 <= index < n)."""
        return int(self.map(np.array([operator.index(index)], dtype=np.int64))[0])

    def map(self, indices: I64) -> I64:
        """Entries at int64[k] indices, each in 0..n-1."""
        values = np.array(indices, dtype=np.int64)
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < self.n):
            raise IndexError(f"index outside 0..{self.n - 1}")
        values = self._once(values)
        outside = np.flatnonzero(values >= self.n)
        while len(outside):
            values[outside] = self._once(values[outside])
            outside = outside[values[outside] >= self.n]
        return values

    def _once(self, values: I64) -> I64:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = np.divmod(values.astype(np.uint64), b)  # left < a, right < b
        for round_, key in enumerate(self._keys):
            if round_ % 2 == 0:
                left = (left + mix(right ^ key) % a) % a
            else:
                right = (right + mix(left ^ key) % b) % b
        return (left * b + right).astype(np.int64)
