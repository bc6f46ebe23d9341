"""The epoch order: a seeded bijection in O(1) memory, dealt to ranks micro step by micro step."""

from __future__ import annotations

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import InputError
from packtrain.planning.steps import Permutation, consumption, epoch_positions


def test_bijection_for_every_small_n() -> None:
    for n in (*range(1, 1500), *range(1500, 10_000, 61), 9_999, 10_000):
        every = ((0, 0), (1, 0), (0, 1), (1 << 70, 3))
        for seed, epoch in every if n < 260 or n >= 9_999 else every[:1]:
            entries = Permutation(n, seed, epoch).map(np.arange(n))
            assert np.array_equal(np.bincount(entries, minlength=n), np.ones(n)), (n, seed, epoch)


@pytest.mark.parametrize("n", [1_000_003, 10**9, (1 << 62) - 5])
def test_large_domains_are_injective_on_a_sample(n: int) -> None:
    asked = np.unique(np.random.default_rng(0).integers(0, n, 200_000))
    entries = Permutation(n, 7).map(asked)
    assert len(np.unique(entries)) == len(asked) and entries.min() >= 0 and entries.max() < n
    assert abs(float(entries.astype(np.float64).mean()) / n - 0.5) < 0.01


def test_orders_differ_by_seed_and_epoch_and_look_random() -> None:
    n = 10_000
    orders = [Permutation(n, s, e).map(np.arange(n)) for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for i, a in enumerate(orders):
        assert abs(np.corrcoef(a, np.arange(n))[0, 1]) < 0.05
        assert float((np.abs(np.diff(a)) < n // 10).mean()) < 0.25
        for b in orders[:i]:
            assert int((a == b).sum()) < 20
    assert Permutation(5, 1)[3] == int(Permutation(5, 1).map(np.array([3]))[0])


def test_small_orders_are_spread_over_all_permutations() -> None:
    seen = {tuple(Permutation(4, seed).map(np.arange(4)).tolist()) for seed in range(600)}
    assert len(seen) == 24


def test_golden_order() -> None:
    assert Permutation(10, 42, 1).map(np.arange(10)).tolist() == [7, 0, 2, 4, 9, 5, 3, 1, 8, 6]


def test_bad_arguments() -> None:
    for args in ((0, 0), (5, -1), (5, 0, -1)):
        with pytest.raises(InputError):
            Permutation(*args)
    with pytest.raises(IndexError):
        Permutation(5, 0).map(np.array([5]))
    a = pt.plan([5] * 4, 5).align(2)
    with pytest.raises(InputError, match="rank 2"):
        consumption(a, 2)


@pytest.mark.parametrize(("n", "w", "drop"), [(10, 4, False), (10, 4, True), (3, 8, False), (7, 1, False)])
def test_consumption_follows_law_14(n: int, w: int, drop: bool) -> None:
    a = pt.plan([5] * n, 5).align(w, drop_last=drop)
    by_rank = [consumption(a, rank, seed=3, epoch=2) for rank in range(w)]
    assert {len(order) for order in by_rank} == {a.steps}
    epoch = np.stack(by_rank, axis=1).reshape(-1)  # place m*W + r
    assert sorted(epoch.tolist()) == list(range(len(a))), "every aligned position once"
    assert epoch[a.kept :].tolist() == a.repeated.tolist(), "repeats follow at the end"
    assert np.array_equal(epoch, epoch_positions(a, np.arange(len(a)), 3, 2))
    tail = consumption(a, 0, seed=3, epoch=2, start=1, count=2)
    assert np.array_equal(tail, by_rank[0][1:3]), "any part without the rest"
    plain = np.stack([consumption(a, rank, shuffle=False) for rank in range(w)], axis=1).reshape(-1)
    assert plain.tolist() == list(range(len(a)))


def test_the_order_does_not_depend_on_the_world_size() -> None:
    plan = pt.plan([5] * 24, 5)
    orders = []
    for w in (1, 2, 3, 8):
        a = plan.align(w)
        orders.append(np.stack([consumption(a, r, seed=5) for r in range(w)], axis=1).reshape(-1).tolist())
    assert all(order == orders[0] for order in orders)
