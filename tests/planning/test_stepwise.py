"""Steps of samples: exactly B samples and K packs a step, even, canonical, the same for every rank count."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packtrain as pt
from packtrain.errors import InputError, LawError, PlanError
from packtrain.planning.epoch_order import EpochOrder
from packtrain.planning.laws import check_laws
from packtrain.planning.ledger import read_skip_file
from packtrain.planning.stats import step_evenness
from packtrain.testing import check_plan, compiled_path, plain_path


def sft(n: int, cap: int = 8192, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(357), 1.2, n)
    return np.clip(drawn.astype(np.int64), 16, cap)


def step_ids(plan: pt.PackPlan) -> list[list[int]]:
    each = min(plan.spec.packs_per_step, plan.spec.samples_per_step)
    packs = [pack.tolist() for pack in plan]
    return [[j for pack in packs[i : i + each] for j in pack] for i in range(0, len(packs), each)]


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.lists(st.integers(0, 130), max_size=70),
    batch=st.integers(1, 20),
    multiple=st.sampled_from([1, 2, 3, 8, 32]),
    last=st.sampled_from(["keep", "drop"]),
    limited=st.booleans(),
    seed=st.sampled_from([None, 0, 5]),
    m=st.sampled_from([1, 8]),
)
def test_laws(
    tokens: list[int], batch: int, multiple: int, last: str, limited: bool, seed: int | None, m: int
) -> None:
    lengths = pt.Lengths(tokens, {"images": [t % 4 for t in tokens]})
    options = {"limits": {"images": 5}, "max_samples": 4} if limited else {}
    options |= {"samples_per_step": batch, "packs_multiple": multiple, "last_step": last, "seed": seed}
    usable = sum(t > 0 for t in tokens)
    if usable == 0 or (last == "drop" and usable < batch):
        with pytest.raises(PlanError, match="no step"):
            pt.plan(lengths, 100, multiple_of=m, **options)
        return
    with plain_path():
        plan = pt.plan(lengths, 100, multiple_of=m, **options)
    with compiled_path():
        fast = pt.plan(lengths, 100, multiple_of=m, **options)
    assert plan == fast and plan.stats() == fast.stats()
    if last == "keep":
        check_plan(plan, lengths)
    check_laws(plan, lengths)
    packs = plan.spec.packs_per_step
    assert packs % multiple == 0
    steps = step_ids(plan)
    assert all(len(step) == batch for step in steps[:-1]) and plan.step_count == len(steps)
    rest = usable % batch
    assert len(steps[-1]) == (rest if rest and last == "keep" else batch)
    assert plan.ledger.counts().get("partial_step", 0) == (rest if last == "drop" else 0)
    again = pt.plan(lengths, spec=plan.spec)
    assert again == plan and again.checksum == plan.checksum


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(st.integers(1, 130), min_size=1, max_size=60), batch=st.integers(1, 20), data=st.data()
)
def test_every_world_size_that_divides_the_packs_reads_the_same_steps(
    tokens: list[int], batch: int, data: st.DataObject
) -> None:
    plan = pt.plan(tokens, 100, samples_per_step=batch, packs_multiple=4, seed=1)
    packs, steps = plan.spec.packs_per_step, step_ids(plan)
    world = data.draw(st.sampled_from([w for w in range(1, packs + 1) if packs % w == 0]))
    view = plan.align(world)
    assert len(view) == plan.step_count * packs and view.grad_accum == packs // world
    ids = view.pack_ids
    assert [view.pack_id(i) for i in range(len(view))] == ids.tolist()
    assert np.flatnonzero(ids < 0).tolist() == view.fillers.tolist() and len(view.repeated) == 0
    for s, step in enumerate(steps):
        held = [i for p in range(s * packs, (s + 1) * packs) for i in view[p].tolist()]
        assert sorted(held) == sorted(step)
    ranks = [EpochOrder(view, seed=3).of_rank(r, 1) for r in range(world)]
    epoch = np.stack(ranks, axis=1).reshape(-1)
    assert sorted(epoch.tolist()) == list(range(len(view)))
    order = epoch.reshape(-1, packs)[:, 0] // packs
    assert np.array_equal(epoch, (order[:, None] * packs + np.arange(packs)).reshape(-1)), "steps stay whole"
    if len(tokens) % batch:
        assert order[-1] == plan.step_count - 1, "the partial step is the last"


def test_steps_are_even_and_small_ones_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    lengths = pt.Lengths(sft(20 * 1024))
    with caplog.at_level(logging.WARNING):
        plan = pt.plan(lengths, 8192, samples_per_step=1024, packs_multiple=64, seed=0)
    assert not caplog.records and plan.spec.packs_per_step == 128 and len(plan) == 20 * 128
    assert all(step_evenness(plan, w) < 1.01 for w in (1, 2, 8, 32, 64))
    assert plan.stats()["step_imbalance"] < 1.01 and plan.stats()["steps"] == 20
    with caplog.at_level(logging.WARNING):
        small = pt.plan(lengths, 8192, samples_per_step=512, packs_multiple=64, seed=0)
    assert small.stats()["step_imbalance"] > 1.5
    assert "samples_per_step=512 is small for 64 ranks" in caplog.text and "up to 32 ranks" in caplog.text


def test_the_order_is_seeded_and_stays_in_id_order_without_a_seed() -> None:
    tokens = sft(3000)
    plain, one, two = (pt.plan(tokens, 8192, samples_per_step=100, seed=s) for s in (None, 1, 2))
    assert sorted(step_ids(plain)[3]) == list(range(300, 400))
    assert sorted(step_ids(one)[3]) != sorted(step_ids(two)[3])
    assert one.checksum == pt.plan(tokens.tolist(), 8192, samples_per_step=100, seed=1).checksum


def test_golden_plan() -> None:
    tokens = [(i * 7919) % 900 + (i % 17 == 0) * 5000 for i in range(1, 501)]
    plan = pt.plan(tokens, 8192, samples_per_step=64, packs_multiple=4, seed=7)
    assert (plan.spec.packs_per_step, plan.checksum[:16]) == (8, "5d7d775077ae628d")


def test_refusals() -> None:
    plan = pt.plan([5] * 30, 10, samples_per_step=6, packs_multiple=4)
    assert plan.spec.packs_per_step == 4
    with pytest.raises(PlanError, match="4 packs, which 3 ranks cannot share") as caught:
        plan.align(3)
    assert "1, 2, 4" in str(caught.value.hint) and "packs_multiple=3" in str(caught.value.hint)
    with pytest.raises(PlanError, match="packs_per_step is 2, but a step needs 3"):
        pt.plan([5] * 30, 10, samples_per_step=6, packs_per_step=2)
    with pytest.raises(PlanError, match="cannot be taken out"):
        plan.without([0], "gone")


def test_drop_last_leaves_the_partial_step_out_of_the_view() -> None:
    plan = pt.plan([5] * 20, 10, samples_per_step=6, packs_multiple=3)
    view = plan.align(3, drop_last=True)
    assert len(view) == 9 and view.dropped.tolist() == list(range(9, len(plan)))
    assert len(plan.align(3)) == 12 and len(plan.align(3).dropped) == 0


def test_saved_and_damaged(tmp_path: Path) -> None:
    lengths = pt.Lengths(sft(200))
    plan = pt.plan(lengths, 8192, samples_per_step=64, packs_multiple=4, seed=7)
    plan.save(tmp_path / "p")
    again = pt.PackPlan.load(tmp_path / "p")
    assert again == plan and again.spec == plan.spec and again.header()["packs_per_step"] == 4 * 2
    assert again.align(4).pack_ids.tolist() == plan.align(4).pack_ids.tolist()
    other = pt.plan(lengths, 8192, samples_per_step=63, packs_multiple=4, seed=7)
    plan.offsets, plan.indices = other.offsets, other.indices
    with pytest.raises(LawError, match="step 0 does not hold 64 samples"):
        check_laws(plan, lengths)


def test_skipped_samples_go_to_the_ledger(tmp_path: Path) -> None:
    lengths = pt.Lengths([5, 0, 5, 5, 5, 5])
    for more in ({}, {"samples_per_step": 2}, {"window": 2}):
        plan = pt.plan(lengths, 10, skip=[4, 1, 4], **more)
        assert dict(plan.ledger) == {1: "empty", 4: "skipped"} and len(plan.indices) == 4
        assert plan.lengths_digest == lengths.digest and plan.spec.skip == (1, 4)
        check_laws(plan, lengths)
    with pytest.raises(PlanError, match="skip holds sample 6, but 6"):
        pt.plan(lengths, 10, skip=[6])
    (tmp_path / "ids").write_text("# broken\n4\n\n1  # again\n4\n")
    assert read_skip_file(tmp_path / "ids") == (1, 4)
    (tmp_path / "ids").write_text("[4, 1]")
    assert read_skip_file(tmp_path / "ids") == (1, 4)
    for text, match in (("4\n-1\n", ":2: '-1' is not"), ("[1.5]", "something else"), ("[1", "not a JSON")):
        (tmp_path / "ids").write_text(text)
        with pytest.raises(InputError, match=match):
            read_skip_file(tmp_path / "ids")
    with pytest.raises(InputError, match="cannot be read"):
        read_skip_file(tmp_path / "none")
