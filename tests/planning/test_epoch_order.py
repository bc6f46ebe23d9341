"""The epoch order: a seeded bijection in O(1) memory, dealt to ranks micro step by micro step."""

from __future__ import annotations

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import InputError
from packtrain.planning.epoch_order import EpochOrder
from packtrain.planning.permutation import Permutation


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
        EpochOrder(a).of_rank(2, 0)


@pytest.mark.parametrize(("n", "w", "drop"), [(10, 4, False), (10, 4, True), (3, 8, False), (7, 1, False)])
def test_consumption_follows_law_14(n: int, w: int, drop: bool) -> None:
    a = pt.plan([5] * n, 5).align(w, drop_last=drop)
    order = EpochOrder(a, seed=3)
    by_rank = [order.of_rank(rank, 2) for rank in range(w)]
    assert {len(order) for order in by_rank} == {a.steps}
    epoch = np.stack(by_rank, axis=1).reshape(-1)  # place m*W + r
    assert sorted(epoch.tolist()) == list(range(len(a))), "every aligned position once"
    assert epoch[a.kept :].tolist() == a.repeated.tolist(), "repeats follow at the end"
    assert np.array_equal(epoch, order.at(np.arange(len(a)), 2))
    tail = order.of_rank(0, 2, 1, 3)
    assert np.array_equal(tail, by_rank[0][1:3]), "any part without the rest"
    plain = np.stack([EpochOrder(a, shuffle=False).of_rank(rank, 0) for rank in range(w)], axis=1).reshape(-1)
    assert plain.tolist() == list(range(len(a)))


def test_the_order_does_not_depend_on_the_world_size() -> None:
    plan = pt.plan([5] * 24, 5)
    orders = []
    for w in (1, 2, 3, 8):
        a = plan.align(w)
        orders.append(
            np.stack([EpochOrder(a, seed=5).of_rank(r, 0) for r in range(w)], axis=1).reshape(-1).tolist()
        )
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("options", [{}, {"samples_per_step": 5, "packs_multiple": 4}])
@pytest.mark.parametrize("balance", [None, "step"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_without_torch_is_that_of_the_sampler(
    options: dict[str, int], balance: str | None, drop_last: bool
) -> None:
    from packtrain.data import PackSampler

    plan = pt.plan([3 + i * 7 % 11 for i in range(43)], 16, **options)
    for world in (1, 2, 4):
        view = plan.align(world, drop_last)
        accum = view.block // world if options else 2
        for rank, (seed, epoch) in enumerate([(0, 0), (None, 1), (5, 2), (1 << 70, 3)][:world]):
            sampler = PackSampler(
                view, rank, seed or 0, shuffle=seed is not None, balance=balance, grad_accum=accum
            )
            sampler.set_epoch(epoch)
            found = plan.epoch(
                seed, epoch, rank, world, drop_last=drop_last, balance=balance, grad_accum=accum
            )
            assert found.tolist() == [view.pack_id(position) for position in sampler]


def test_a_pass_of_an_earlier_epoch_is_not_moved_by_a_later_one() -> None:
    """One order serves every epoch: with a plan for each, asking for one leaves the others as they are."""
    from packtrain.planning.replan import EpochPlans

    lengths = pt.Lengths([3 + i * 7 % 11 for i in range(90)])
    plan = pt.plan(lengths, 16)
    order = EpochOrder(plan.align(2), grad_accum=2, balance="step", replan=EpochPlans(plan, lengths))
    alone = {epoch: order.of_rank(1, epoch).tolist() for epoch in range(3)}
    assert len({order.view(epoch).plan.checksum for epoch in range(3)}) == 3
    for epoch in (2, 0, 1, 0):
        halves = [order.of_rank(1, epoch, *part) for part in ((0, 7), (7, None))]
        order.of_rank(0, (epoch + 1) % 3)
        assert np.concatenate(halves).tolist() == alone[epoch]


def test_steps_of_more_micro_steps_than_there_can_be_are_refused() -> None:
    """An edited record of a run names them; numpy would count them in floats."""
    aligned = pt.plan(pt.Lengths([3, 4, 5]), 5).align(1)
    for count in (0, 1 << 40, 1 << 63):
        with pytest.raises(InputError, match="grad_accum"):
            EpochOrder(aligned, grad_accum=count)
