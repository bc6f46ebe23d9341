"""Bounds are lower bounds, exact where they can be; compared with exhaustive packing."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import packtrain as pt
from packtrain.packers._bounds import dual_feasible, martello_toth, volume
from packtrain.planning.raw_plan import Certificate


def classes(costs: list[int]) -> tuple[np.ndarray, np.ndarray]:
    sizes, counts = np.unique(costs, return_counts=True)
    return sizes.astype(np.int64), counts.astype(np.int64)


def fewest(costs: list[int], capacity: int) -> int:
    """Exact number of packs, by search over sets of open rooms."""

    @cache
    def go(rest: tuple[int, ...], rooms: tuple[int, ...]) -> int:
        if not rest:
            return len(rooms)
        first, others = rest[0], rest[1:]
        best = go(others, tuple(sorted((*rooms, capacity - first))))
        for k in range(len(rooms)):
            if rooms[k] >= first and (k == 0 or rooms[k] != rooms[k - 1]):
                best = min(best, go(others, tuple(sorted((*rooms[:k], rooms[k] - first, *rooms[k + 1 :])))))
        return best

    return go(tuple(sorted(costs, reverse=True)), ())


def l2_by_definition(costs: list[int], capacity: int) -> int:
    best = 0
    for k in range(capacity // 2 + 1):
        one = sum(1 for c in costs if c > capacity - k)
        two = [c for c in costs if capacity // 2 < c <= capacity - k]
        three = sum(c for c in costs if k <= c <= capacity // 2)
        best = max(best, one + len(two) + max(0, -(-(three - (len(two) * capacity - sum(two))) // capacity)))
    return best


def test_l2_equals_its_definition_and_bounds_hold() -> None:
    rng = np.random.default_rng(1)
    for _ in range(150):
        capacity = int(rng.integers(2, 30))
        costs = rng.integers(1, capacity + 1, int(rng.integers(1, 9))).tolist()
        exact = fewest(costs, capacity)
        sizes, counts = classes(costs)
        assert martello_toth(sizes, counts, capacity) == l2_by_definition(costs, capacity) <= exact
        assert volume(sizes, counts, capacity) <= exact
        assert dual_feasible(sizes, counts, capacity) <= exact
        certificate = pt.plan(costs, capacity).certificate
        assert certificate.bound <= exact <= len(pt.plan(costs, capacity))
        assert not certificate.optimal or exact == len(pt.plan(costs, capacity))


def test_large_sums_are_exact() -> None:
    sizes, counts = np.array([1 << 30, 1 << 31]), np.array([1 << 40, 1 << 41])
    total = (1 << 70) + (1 << 72)
    assert volume(sizes, counts, 1 << 31) == total >> 31
    assert martello_toth(sizes, counts, 1 << 31) >= total >> 31


def test_certificate_of_plans() -> None:
    assert pt.plan([], 5).certificate == Certificate(0, "volume", 0.0, True)
    big = pt.plan([6] * 5, 10).certificate
    assert big == Certificate(5, "l2", 0.0, True)
    long = pt.plan([6] * 5 + [50], 10).certificate
    assert long == Certificate(6, "l2", 0.0, True), "a long sample takes a pack of its own"
    loose = pt.plan([4, 4, 4, 4, 4, 4, 4, 4], 10, packer="sequential").certificate
    assert loose.gap == pytest.approx(len(pt.plan([4] * 8, 10)) / loose.bound - 1)
