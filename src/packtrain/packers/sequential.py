"""sequential: next fit in id order. Neighbours stay neighbours; the price is fill.

A pack is closed as soon as the next sample does not fit, so packs hold consecutive samples and reading
is sequential. Wastes up to half of a pack in the worst case; `bfd` and `refine` waste next to nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..extend import PackProblem
from ._jit import use_jit

__all__ = ["VERSION", "pack"]

VERSION = 1


def pack(problem: PackProblem) -> NDArray[np.int64]:
    """Bin of each sample, in order of first use."""
    if use_jit(len(problem.costs)):
        from ._kernels import next_fit

        bins: NDArray[np.int64] = next_fit(problem.costs, problem.capacity)
        return bins
    return plain(problem.costs, problem.capacity)


def plain(costs: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The plain path: jump from pack to pack by bisection in the running sum."""
    n = len(costs)
    ends = np.cumsum(costs, dtype=np.int64)
    first = np.zeros(n, dtype=np.int64)  # 1 where a pack begins
    start, used = 0, 0
    while start < n:
        first[start] = 1
        stop = int(np.searchsorted(ends, used + capacity, side="right"))
        used = int(ends[stop - 1])
        start = stop
    return np.cumsum(first) - 1
