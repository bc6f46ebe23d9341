"""balance: ranks finish together, and the content of a step stays what it was."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packtrain as pt
from packtrain.errors import InputError, PlanError, UnknownNameError
from packtrain.planning.balance import Balance, deal, rank_totals
from packtrain.planning.costs import FlopsCost, costs_of
from packtrain.planning.epoch_order import EpochOrder


def sft(n: int, cap: int = 8192, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(357), 1.2, n)
    return np.clip(drawn.astype(np.int64), 16, cap)


def micro(view: pt.AlignedPlan, ids: np.ndarray | None = None) -> float:
    """Sum of the slowest rank over the sum of the mean rank, over all micro steps."""
    costs = costs_of(view.plan)[0][view.pack_ids if ids is None else ids].reshape(-1, view.world_size)
    return float(costs.max(axis=1).sum() / costs.mean(axis=1).sum())


def step_sets(ids: np.ndarray, width: int) -> list[list[int]]:
    return [sorted(ids[i : i + width].tolist()) for i in range(0, len(ids), width)]


@settings(deadline=None, max_examples=80)
@given(
    packs=st.integers(1, 60),
    world=st.integers(1, 7),
    accum=st.integers(1, 5),
    drop=st.booleans(),
    seed=st.sampled_from([None, 0, 9]),
    sync=st.sampled_from(["micro", "step"]),
    cost=st.sampled_from(["tokens", "attention", "flops"]),
)
def test_steps_keep_their_packs(
    packs: int, world: int, accum: int, drop: bool, seed: int | None, sync: str, cost: str
) -> None:
    plan = pt.plan([(i * 37) % 90 + 60 for i in range(packs)], 110)
    if drop and len(plan) < world:
        return
    a = plan.align(world, drop_last=drop)
    b = a.balance(accum, cost, seed=seed, epoch=2, sync=sync)
    order = EpochOrder(a, seed=seed or 0, shuffle=seed is not None).at(np.arange(len(a)), 2)
    before, after = a.pack_ids[order], b.pack_ids
    assert step_sets(before, world * accum) == step_sets(after, world * accum)
    assert [b.pack_id(i) for i in range(len(b))] == after.tolist() and len(b) == len(a)
    assert len(b.repeated) == len(a.repeated) and b.dropped.tolist() == a.dropped.tolist()
    assert set(np.delete(after, b.repeated).tolist()) == set(a.pack_ids[: a.kept].tolist())
    if accum == 1:
        assert after.tolist() == before.tolist(), "nothing to rearrange"
    assert pickle.loads(pickle.dumps(b)).pack_ids.tolist() == after.tolist()


def test_targets_on_chat_lengths() -> None:
    """Predicted time, 8192, 64 ranks: at most 1.045 with 4 micro steps, 1.022 with 8."""
    a = pt.plan(sft(300_000), 8192).align(64)
    for accum, most in ((4, 1.045), (8, 1.022)):
        b = a.balance(accum, seed=0)
        order = EpochOrder(a).at(np.arange(len(a)), 0)
        assert micro(a, a.pack_ids[order]) > 1.09
        assert micro(b) <= most
        held = EpochOrder(a, grad_accum=accum, balance="step")
        before, after = held.samples_per_step(balanced=False), held.samples_per_step()
        assert np.array_equal(before, after), "samples of every step, so also their spread"


def test_step_totals_are_more_even_than_a_shuffle() -> None:
    a = pt.plan(sft(100_000), 8192).align(8)
    b = a.balance(4, "attention", seed=0, sync="step")
    costs = costs_of(a.plan, "attention")[0]
    full = len(a) // 32 * 32

    def worst(ids: np.ndarray) -> float:
        totals = costs[ids[:full]].reshape(-1, 4, 8).sum(axis=1)
        return float(totals.max(axis=1).sum() / totals.mean(axis=1).sum())

    order = EpochOrder(a).at(np.arange(len(a)), 0)
    assert worst(a.pack_ids[order]) > 1.5 and worst(b.pack_ids) < 1.05


def test_deal_finds_the_even_split() -> None:
    costs = np.array([[9, 3, 3, 3, 6, 4, 4, 4]], dtype=np.int64)
    for compiled in (False, True):
        order = deal(costs, 2, compiled)
        assert sorted(order[0].tolist()) == list(range(8))
        assert rank_totals(costs, order, 2)[0].tolist() == [18, 18]
        assert np.all(np.diff(np.take_along_axis(costs, order, 1).reshape(4, 2), axis=0) <= 0)


def test_even_keeps_images_together() -> None:
    r = np.random.default_rng(1)
    tokens = r.integers(60, 100, 400)
    images = np.where(r.random(400) < 0.4, 1, 0)
    a = pt.plan(pt.Lengths(tokens, {"images": images}), 100).align(4)

    def mixed(view: pt.AlignedPlan, steps: int) -> list[int]:
        has = (a.plan.pack_costs["images"][view.pack_ids] > 0).reshape(-1, 4).sum(axis=1)
        return [int(((has[i : i + steps] % 4) > 0).sum()) for i in range(0, len(has), steps)]

    plain, even = a.balance(8, seed=0), a.balance(8, seed=0, even="images")
    assert max(mixed(even, 8)) <= 1 < max(mixed(plain, 8))
    assert step_sets(plain.pack_ids, 32) == step_sets(even.pack_ids, 32)
    with pytest.raises(UnknownNameError, match="patches"):
        a.balance(8, even="patches")


def test_window_and_global_say_what_they_do(caplog: pytest.LogCaptureFixture) -> None:
    a = pt.plan(sft(60_000), 8192).align(4)
    for mode in ("window", "global"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            b = a.balance(2, mode=mode, seed=3, epoch=1)
        assert f"balance mode '{mode}' moves packs between steps" in caplog.text and "sd" in caplog.text
        assert sorted(b.pack_ids.tolist()) == sorted(a.pack_ids.tolist())
        assert micro(b) < micro(a.balance(2, seed=3, epoch=1)) < micro(a)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        a.balance(2, seed=3)
    assert not caplog.records


def test_costs() -> None:
    plan = pt.plan(pt.Lengths([10, 20, 30], {"patches": [0, 4, 8]}), 30)
    assert plan.pack_sq.tolist() == [500, 900]
    assert costs_of(plan, "tokens")[0].tolist() == [30, 30]
    assert costs_of(plan)[0].tolist() == [30 * 24_000 + 500 + 4 * 24_000, 30 * 24_000 + 900 + 8 * 24_000]
    assert costs_of(plan, FlopsCost(l_star=10, patch=500))[0].tolist() == [300 + 500 + 20, 300 + 900 + 40]
    a = plan.align(1)
    sums = {a.balance(2, c).checksum for c in ("tokens", "flops", FlopsCost(36_000), [1, 2], [0.5, 2.0])}
    assert len(sums) == 5 and a.balance(2).checksum == a.balance(2, "flops", "step").checksum
    assert a.balance(2, np.array([1, 2])).checksum == a.balance(2, [1, 2]).checksum
    assert a.balance(2, [1, 2]).pack_ids.tolist() == [1, 0]
    for other in (a.balance(2, seed=0), a.balance(2, epoch=1), a.balance(1), a.balance(2, sync="step")):
        assert other.checksum != a.balance(2).checksum
    for cost, match in (([1, 2, 3], "expected one number"), ([-1, 2], "negative"), ([1, np.nan], "finite")):
        with pytest.raises(PlanError, match=match):
            a.balance(2, cost)
    with pytest.raises(UnknownNameError, match="flops"):
        a.balance(2, "flop")


def test_steps_of_samples_keep_their_width() -> None:
    plan = pt.plan(sft(4000), 8192, samples_per_step=256, packs_multiple=4, seed=0)
    view = plan.align(4)
    b = view.balance(view.grad_accum, seed=1, epoch=3)
    width = plan.spec.packs_per_step
    assert sorted(map(tuple, step_sets(b.pack_ids, width))) == sorted(
        map(tuple, step_sets(view.pack_ids, width))
    )
    assert micro(b) < 1.08 < micro(view, np.arange(len(plan)))
    with pytest.raises(PlanError, match=f"use grad_accum={view.grad_accum}|grad_accum is"):
        view.balance(view.grad_accum + 1)
    with pytest.raises(PlanError, match="would mix the samples"):
        view.balance(view.grad_accum, mode="global")


def test_bad_settings() -> None:
    a = pt.plan([5] * 9, 10).align(2)
    for options, match in (
        ({"grad_accum": 0}, "grad_accum is 0"),
        ({"grad_accum": 2, "mode": "steps"}, "balance mode"),
        ({"grad_accum": 2, "sync": "x"}, "sync"),
        ({"grad_accum": 2, "epoch": -1}, "epoch is -1, expected an integer >= 0"),
    ):
        with pytest.raises(InputError, match=match):
            a.balance(**options)
    with pytest.raises(InputError, match="balanced already"):
        a.balance(2).balance(2)


@pytest.mark.parametrize(
    ("idle", "same"),
    [
        ({"mode": "window", "sync": "step"}, {"mode": "window"}),
        ({"mode": "global", "even": "images"}, {"mode": "global"}),
        ({"sync": "step", "even": "images"}, {"sync": "step"}),
    ],
)
def test_settings_without_effect_are_told_once(
    idle: dict[str, str], same: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert Balance(grad_accum=2, **idle) == Balance(grad_accum=2, **same)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has no effect" in line
