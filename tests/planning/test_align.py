"""align: the same number of packs on every rank, for any N >= 1 and W >= 1."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packtrain as pt
from packtrain.errors import PlanError
from packtrain.planning.epoch_order import EpochOrder


def test_worked_examples() -> None:
    plan = pt.plan([40] * 10, 80)
    assert len(plan) == 5
    dropped = plan.align(4, drop_last=True)
    assert len(dropped) == 4 and dropped.dropped.tolist() == [4] and len(dropped.repeated) == 0
    padded = plan.align(world_size=4)
    assert len(padded) == 8 and padded.pack_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert padded.repeated.tolist() == [5, 6, 7] and len(padded.dropped) == 0
    assert padded[7].tolist() == plan[2].tolist() and padded.steps == 2
    three = pt.plan([5, 5, 5], 5).align(8)
    assert three.pack_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 40), w=st.integers(1, 50), drop=st.booleans())
def test_laws(n: int, w: int, drop: bool) -> None:
    plan = pt.plan([5] * n, 5)
    if drop and n < w:
        with pytest.raises(PlanError, match="leaves none"):
            plan.align(w, drop_last=True)
        return
    a = plan.align(w, drop_last=drop)
    assert len(a) % w == 0 and len(a) == len(a.pack_ids)
    assert [a.pack_id(i) for i in range(len(a))] == a.pack_ids.tolist()
    if drop:
        assert a.pack_ids.tolist() == list(range(n // w * w))
    else:
        assert set(a.pack_ids.tolist()) == set(range(n)) and len(a) - n == len(a.repeated) < w
        assert a.pack_ids.tolist() == (list(range(n)) * (w + 1))[: len(a)]


def test_errors_and_checksum() -> None:
    plan = pt.plan([40] * 10, 80)
    with pytest.raises(PlanError, match="no packs"):
        pt.plan([], 80).align(2)
    for bad in (0, -1, 1.5, True, None):
        with pytest.raises(PlanError, match="world_size"):
            plan.align(bad)  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        plan.align(4)[8]
    sums = {plan.align(w, d).checksum for w in (1, 2, 4) for d in (False, True)}
    assert len(sums) == 6 and plan.align(4).checksum == pt.plan([40] * 10, 80).align(4).checksum
    assert plan.align(4)[-1].tolist() == plan.align(4)[7].tolist()


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 40), w=st.integers(1, 6), accumulated=st.integers(1, 7), drop=st.booleans())
def test_with_accumulation_an_epoch_ends_with_a_whole_step(
    n: int, w: int, accumulated: int, drop: bool
) -> None:
    plan = pt.plan([5] * n, pack_length=5)
    group = w * accumulated
    if drop and n < group:
        with pytest.raises(PlanError, match="leaves none"):
            plan.align(w, drop, grad_accum=accumulated)
        return
    view = plan.align(w, drop, grad_accum=accumulated)
    assert len(view) % group == 0 and view.steps % accumulated == 0
    assert len(view) == (n // group * group if drop else -(-n // group) * group)
    assert view.pack_ids.tolist() == [position % n for position in range(len(view))]
    assert view.kept == min(n, len(view)) and len(view.repeated) == len(view) - view.kept
    assert (view.checksum == plan.align(w, drop).checksum) == (accumulated == 1)
    order = [plan.epoch(3, rank=rank, world_size=w).tolist() for rank in range(w)]
    assert len({len(places) for places in order}) == 1


def test_a_whole_step_goes_on_with_other_ranks() -> None:
    plan = pt.plan([5] * 21, pack_length=5)
    four = EpochOrder(plan.align(4, grad_accum=2), seed=1, grad_accum=2)
    two = EpochOrder(plan.align(2, grad_accum=4), seed=1, grad_accum=4)
    assert four.micro_steps * 4 == two.micro_steps * 2 == 24
    assert two.resume(four.state(0, 2)) == (0, 4)
    with pytest.raises(PlanError, match="a step of this plan is 2 micro steps"):
        pt.plan([5] * 8, pack_length=10, samples_per_step=4, packs_multiple=2).align(1, grad_accum=3)
