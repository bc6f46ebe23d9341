"""Certificate: the best lower bound on the number of packs that is proven, and the gap to it.

Bounds (integers throughout): `volume` = ceil(total cost / capacity); `l2` of Martello and Toth, which
pairs samples above half a pack with what may still join them; one bound for each further limit. Samples
longer than a pack each take a pack of their own and are added to every bound.
"optimal" is claimed only when the number of packs equals a bound.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Certificate", "certify", "martello_toth", "volume"]

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
    best, name = volume(sizes, counts, capacity), "volume"
    if best + singles < packs:
        other = martello_toth(sizes, counts, capacity)
        if other > best:
            best, name = other, "l2"
    return Certificate.of(packs, best + singles, name)


def volume(sizes: I64, counts: I64, capacity: int) -> int:
    """ceil(total cost / capacity)."""
    return -(-_dot(sizes, counts) // capacity)


def martello_toth(sizes: I64, counts: I64, capacity: int) -> int:
    """The L2 bound over size classes (ascending, 1 <= size <= capacity).

    For a threshold k <= capacity/2: samples above capacity - k share with none that is >= k; those in
    (capacity/2, capacity - k] take a pack each; what [k, capacity/2] holds beyond their room needs more.
    """
    if len(sizes) == 0:
        return 0
    exact = int(sizes[-1]) * int(counts.sum()) < 1 << 62
    kind: Any = np.int64 if exact else object
    count = np.concatenate([[0], np.cumsum(counts)])
    total = np.concatenate([np.zeros(1, dtype=kind), np.cumsum(sizes.astype(kind) * counts.astype(kind))])
    half = int(np.searchsorted(sizes, capacity // 2, side="right"))  # first class above half a pack
    thresholds = sizes[:half]
    low = np.arange(half)  # first class >= k
    high = np.searchsorted(sizes, capacity - thresholds, side="right")  # first class > capacity - k
    best = int(count[-1] - count[half])  # no threshold: each sample above half needs its own pack
    if half:
        large = count[-1] - count[high]
        middle = count[high] - count[half]
        room = middle.astype(kind) * capacity - (total[high] - total[half])
        over = np.maximum(total[half] - total[low] - room, 0)
        best = max(best, int((large + middle + -(-over // capacity)).max()))
    return best


def _dot(sizes: I64, counts: I64) -> int:
    """Sum of products as a Python integer, exact."""
    if len(sizes) == 0:
        return 0
    if int(sizes.max()) * int(counts.sum()) < 1 << 62:
        return int((sizes * counts).sum())
    return sum(a * b for a, b in zip(sizes.tolist(), counts.tolist(), strict=True))
