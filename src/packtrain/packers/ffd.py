"""ffd: first fit decreasing. Largest samples first, each into the pack opened first that still takes it.

The classic. As many packs as `bfd` on nearly all inputs, at a cost that grows with the number of samples
(n log n), so it serves as a yardstick more than as a choice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..extend import PackProblem
from ._first_fit import first_fit

__all__ = ["VERSION", "pack"]

VERSION = 1


def pack(problem: PackProblem) -> NDArray[np.int64]:
    """Bin of each sample."""
    order = np.argsort(-np.asarray(problem.costs).astype(np.int64), kind="stable")
    bins = np.empty(len(order), dtype=np.int64)
    bins[order] = first_fit(problem.sizes[::-1].copy(), problem.counts[::-1].copy(), problem.capacity)
    return bins
