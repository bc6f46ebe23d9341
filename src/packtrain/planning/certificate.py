"""Certificate: the best lower bound on the number of packs that is proven, and the gap to it.

Bounds are those of `packers/_bounds.py` (volume, l2, uk). Samples longer than a pack each take a pack of
their own and are added to every bound.
"optimal" is claimed only when the number of packs equals a bound.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..packers._bounds import best_bound

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Certificate:
    """`bound` packs are needed at least; `name` says why; `gap` = packs / bound - 1.

    `optimal` is True only when proven (packs == bound).
    """

    bound: int
    name: str
    gap: float
    optimal: bool

    @classmethod
    def of(cls, packs: int, bound: int, name: str) -> Certificate:
        gap = packs / bound - 1.0 if bound else 0.0
        return cls(bound=bound, name=name, gap=gap, optimal=packs == bound)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def certify(packs: int, sizes: I64, counts: I64, capacity: int, singles: int) -> Certificate:
    """The best bound for `packs` packs of the classes (sizes, counts), of which `singles` hold a long sample.

    Bounds are tried from the cheapest on and the search ends at the first one that is met.
    """
    bound, name = best_bound(sizes, counts, capacity, packs - singles)
    return Certificate.of(packs, bound + singles, name)
