"""Consumption order: which aligned position each rank takes at each micro step.

Micro step m of an epoch gives aligned position m*W + r (in epoch order) to rank r. The epoch order is a
seeded permutation of the raw packs (of the kept packs under drop), computed entry by entry in O(1)
memory, so no rank ever holds or shuffles the whole order and it does not depend on the world size.
Repeated packs follow at the end of the epoch.
"""

from __future__ import annotations

import math
import operator

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .align import AlignedPlan

__all__ = ["Permutation", "consumption", "epoch_positions"]

I64 = NDArray[np.int64]
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


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
        if n < 1:
            raise InputError(f"a permutation of {n} entries", hint="n must be >= 1")
        if n > 1 << 62:
            raise InputError(f"a permutation of {n} entries, limit is 2**62")
        if seed < 0 or epoch < 0:
            raise InputError(f"seed {seed} and epoch {epoch} must be >= 0")
        self.n = n
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        # Three words for (seed, epoch): two 64-bit halves of the seed, then the epoch.
        words = np.array(
            [seed & (1 << 64) - 1, seed >> 64 & (1 << 64) - 1, epoch & (1 << 64) - 1], dtype=np.uint64
        )
        key = np.zeros(1, dtype=np.uint64)
        for word in words:
            key = _mix(key ^ word)
        self._keys = _mix(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)

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
                left = (left + _mix(right ^ key) % a) % a
            else:
                right = (right + _mix(left ^ key) % b) % b
        out: I64 = (left * b + right).astype(np.int64)
        return out


def epoch_positions(aligned: AlignedPlan, places: I64, seed: int, epoch: int, *, shuffle: bool = True) -> I64:
    """Aligned positions at int64[k] places 0..len(aligned)-1 of the epoch order.

    Distinct packs are permuted, or steps where the plan was made by steps of samples; the repeats (or the
    partial step) behind them stay where they are.
    """
    places = np.asarray(places, dtype=np.int64)
    out = places.copy()
    block, blocks = aligned.block, aligned.shuffled
    if not shuffle or blocks == 0:
        return out
    inside = places < blocks * block
    order = Permutation(blocks, seed, epoch)
    if block == 1:
        out[inside] = order.map(places[inside])
    else:
        out[inside] = order.map(places[inside] // block) * block + places[inside] % block
    return out


def consumption(
    aligned: AlignedPlan,
    rank: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    start: int = 0,
    count: int | None = None,
) -> I64:
    """Aligned positions that `rank` takes at micro steps start..start+count-1 of an epoch.

    Args:
        aligned: the view that training consumes.
        rank: 0 <= rank < aligned.world_size.
        seed, epoch: choose the permutation; not used with shuffle=False.
        start: first micro step.
        count: number of micro steps; None = to the end of the epoch.
    """
    if not 0 <= rank < aligned.world_size:
        raise InputError(f"rank {rank} of world size {aligned.world_size} is not a position")
    if start < 0 or (count is not None and count < 0):
        raise InputError(f"micro steps {start} + {count} of {aligned.steps}")
    stop = aligned.steps if count is None else min(aligned.steps, start + count)
    micro = np.arange(start, max(start, stop), dtype=np.int64)
    return epoch_positions(aligned, micro * aligned.world_size + rank, seed, epoch, shuffle=shuffle)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64-bit integer hash, wrapping (arrays only: numpy scalars would warn)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
