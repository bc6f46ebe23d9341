"""Lower bounds on the number of packs of given size classes. Integers only; every bound is proven.

- volume: ceil(total cost / capacity).
- l2 (Martello and Toth): pairs samples above half a pack with what may still join them.
- uk (dual feasible functions u^(k)): rounds every size to a multiple of 1/k of a pack in a way that no
  packing can exceed, so the rounded total is a bound again. Strong where few large sizes leave waste
  that volume does not see.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..extend import I64

_EXACT = 1 << 62
_K = range(2, 101)


def best_bound(
    sizes: I64, counts: I64, capacity: int, target: int, *, cheap: bool = False
) -> tuple[int, str]:
    """The best bound and its name. Cheapest first; stops at the first that reaches `target`.

    `cheap` leaves out uk, which takes longer than packing does.
    """
    best, name = volume(sizes, counts, capacity), "volume"
    for bound, other in ((martello_toth, "l2"), (dual_feasible, "uk"))[: 1 if cheap else 2]:
        if best >= target:
            break
        value = bound(sizes, counts, capacity)
        if value > best:
            best, name = value, other
    return best, name


def volume(sizes: I64, counts: I64, capacity: int) -> int:
    """ceil(total cost / capacity), exact."""
    if len(sizes) == 0:
        return 0
    if _fits(sizes, counts):
        total = int((sizes * counts).sum())
    else:
        total = sum(a * b for a, b in zip(sizes.tolist(), counts.tolist(), strict=True))
    return -(-total // capacity)


def martello_toth(sizes: I64, counts: I64, capacity: int) -> int:
    """The L2 bound over size classes (ascending, 1 <= size <= capacity).

    For a threshold k <= capacity/2: samples above capacity - k share with none that is >= k; those in
    (capacity/2, capacity - k] take a pack each; what [k, capacity/2] holds beyond their room needs more.
    """
    if len(sizes) == 0:
        return 0
    kind: Any = np.int64 if _fits(sizes, counts) else object
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


def dual_feasible(sizes: I64, counts: I64, capacity: int) -> int:
    """The best of u^(k), k = 2..100.

    u^(k)(x) = x where (k+1)x is whole, else floor((k+1)x)/k, for x = size/capacity. Sums are taken in
    units of 1/(k*capacity).
    """
    if len(sizes) == 0:
        return 0
    largest_unit = 101 * capacity * int(counts.sum())
    kind: Any = np.int64 if largest_unit < _EXACT and 101 * int(sizes[-1]) < _EXACT else object
    size, count = sizes.astype(kind), counts.astype(kind)
    best = 0
    for k in _K:
        scaled = size * (k + 1)
        whole = scaled % capacity == 0
        units = np.where(whole, size * k, scaled // capacity * capacity)
        best = max(best, -(-int((units * count).sum()) // (k * capacity)))
    return best


def _fits(sizes: I64, counts: I64) -> bool:
    return int(sizes[-1]) * int(counts.sum()) < _EXACT
