"""ffd: first fit decreasing. Largest samples first, each into the pack opened first that still takes it.

The classic. As many packs as `bfd` on nearly all inputs, at a cost that grows with the number of samples
(n log n), so it serves as a yardstick more than as a choice. Under further limits the sample with the largest
need relative to a cap comes first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..extend import PackProblem
from ._first_fit import first_fit, first_fit_needs
from ._multi import largest_need, needs

VERSION = 1
LIMITS = True


def pack(problem: PackProblem) -> NDArray[np.int64]:
    """Bin of each sample."""
    if problem.limits or problem.max_samples is not None:
        need, caps = needs(problem)
        order = np.argsort(-largest_need(need, caps), kind="stable")
        placed = first_fit_needs(need[order], caps)
    else:
        order = np.argsort(-np.asarray(problem.costs).astype(np.int64), kind="stable")
        placed = first_fit(problem.sizes[::-1].copy(), problem.counts[::-1].copy(), problem.capacity)
    bins = np.empty(len(order), dtype=np.int64)
    bins[order] = placed
    return bins
