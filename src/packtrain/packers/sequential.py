"""sequential: next fit in id order. Neighbours stay neighbours; the price is fill.

A pack is closed as soon as the next sample does not fit, so packs hold consecutive samples and reading
is sequential. Wastes up to half of a pack in the worst case; `bfd` and `refine` waste next to nothing.
"""

from __future__ import annotations

import numpy as np

from ..extend import I64, PackProblem
from ._jit import use_jit
from ._kernels import next_fit
from ._multi import needs

VERSION = 1
LIMITS = True


def pack(problem: PackProblem) -> I64:
    """Bin of each sample, in order of first use."""
    need, caps = needs(problem)
    return next_fit(need, caps) if use_jit(len(need)) else plain(need, caps)


def plain(need: I64, caps: I64) -> I64:
    """The plain path: jump from pack to pack by bisection in the running sums."""
    n = len(need)
    first = np.zeros(n, dtype=np.int64)  # 1 where a pack begins
    ends = [np.cumsum(column) for column in need.T]
    start = 0
    while start < n:
        first[start] = 1
        used = [int(end[start - 1]) if start else 0 for end in ends]
        start = min(
            int(np.searchsorted(end, base + cap, side="right"))
            for end, base, cap in zip(ends, used, caps.tolist(), strict=True)
        )
    return np.cumsum(first) - 1
