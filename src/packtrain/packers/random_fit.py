"""random_fit: samples in a seeded random order, each into the pack opened first that still takes it.

What a pack holds does not depend on length or position in the source: the mixing baseline against which
the side effects of a tighter packer can be measured. Wastes about as much as the typical sample is long.
Without a seed it uses seed 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..extend import Bins, PackProblem
from ._first_fit import first_fit, first_fit_needs
from ._multi import needs

VERSION = 1
SEEDED = True
LIMITS = True

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def pack(problem: PackProblem) -> Bins:
    """Bin of each sample."""
    n = len(problem.costs)
    seed = problem.seed or 0
    keys = np.arange(n, dtype=np.uint64)
    while True:
        keys = mix(keys + mix(np.full(1, seed & (1 << 64) - 1, dtype=np.uint64)))
        seed >>= 64
        if seed == 0:
            break
    order = np.argsort(keys, kind="stable")
    bins = np.empty(n, dtype=np.int64)
    if problem.limits or problem.max_samples is not None:
        need, caps = needs(problem)
        bins[order] = first_fit_needs(need[order], caps)
    else:
        costs = np.asarray(problem.costs).astype(np.int64)[order]
        bins[order] = first_fit(costs, np.ones(n, dtype=np.int64), problem.capacity)
    return Bins(bin_of=bins, notes={"seed": problem.seed or 0})


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64-bit integer hash, wrapping (arrays only: numpy scalars would warn); it makes epoch orders too."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
