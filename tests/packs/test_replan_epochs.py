"""`replan: epoch`: each epoch another plan of as many packs, each sample once, resumed exactly."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.data import PackedDataset, PackLoader, PackSampler, pack_source
from packtrain.errors import ForeignArtefactError, InputError, PlanError
from packtrain.planning.balance import Balance
from packtrain.planning.replan import EpochPlans

N = 400
LENGTHS = pt.Lengths(np.random.default_rng(4).integers(1, 20, N))
BASE = pt.plan(LENGTHS, 64)
SAMPLES = [{"input_ids": list(range(int(n))), "labels": list(range(int(n)))} for n in LENGTHS.tokens]


def setup(rank: int = 0, world_size: int = 2, **options: Any) -> tuple[PackSampler, PackedDataset]:
    plans = EpochPlans(BASE, LENGTHS)
    view = BASE.align(world_size)
    data = PackedDataset(view, SAMPLES, lengths=LENGTHS, replan=plans)
    return PackSampler(view, rank, seed=3, replan=plans, **options), data


def epoch_ids(epoch: int, **options: Any) -> list[list[list[int]]]:
    """Sample ids of every pack of the epoch, rank by rank."""
    out = []
    for rank in (0, 1):
        sampler, data = setup(rank, **options)
        sampler.set_epoch(epoch)
        data.set_epoch(epoch)
        out.append([[member["sample_id"] for member in data[place]] for place in sampler])
        assert len(out[-1]) == len(sampler) == BASE.align(2).steps
    return out


@pytest.mark.parametrize("options", [{}, {"balance": "step", "grad_accum": 3}, {"balance": "global"}])
def test_three_epochs_hold_each_sample_once_in_other_packs(options: dict[str, Any]) -> None:
    contents = []
    for epoch in range(3):
        packs = [tuple(pack) for rank in epoch_ids(epoch, **options) for pack in rank]
        assert len(packs) == len(BASE.align(2)) and len(set(packs)) == len(BASE)
        assert sorted(i for pack in set(packs) for i in pack) == list(range(N))
        contents.append(set(packs))
    assert contents[0] == {tuple(pack.tolist()) for pack in BASE}
    assert contents[0] != contents[1] != contents[2] != contents[0]


@pytest.mark.parametrize("balance", [None, "step"])
@pytest.mark.parametrize("stop", [0, 7, None])
def test_resume_in_the_third_epoch_continues_exactly(balance: str | None, stop: int | None) -> None:
    options: dict[str, Any] = {"balance": balance, "grad_accum": 2}
    wanted = [epoch_ids(epoch, **options)[1] for epoch in (2, 3)]
    sampler, _ = setup(1, **options)
    stop = len(sampler) if stop is None else stop
    sampler.set_epoch(2)
    state = json.loads(json.dumps(sampler.state_dict(micro_step=stop)))
    assert state["replan"]["epoch"] == 2 and state["replan"]["checksum"] == sampler.aligned.plan.checksum
    assert (
        state["replan"]["lengths_digest"] == LENGTHS.digest and state["replan"]["spec"]["pack_length"] == 64
    )
    again, data = setup(1, **options)
    again.load_state_dict(state)
    seen = []
    for epoch in range(again.epoch, 4):
        again.set_epoch(epoch)
        data.set_epoch(epoch)
        seen += [[member["sample_id"] for member in data[place]] for place in again]
    assert seen == [*wanted[0][stop:], *wanted[1]]


def test_states_of_other_runs_are_refused() -> None:
    sampler, _ = setup()
    sampler.set_epoch(1)
    state = sampler.state_dict(micro_step=3)
    plain = PackSampler(BASE.align(2), 0, seed=3)
    with pytest.raises(ForeignArtefactError, match="replan 'epoch', this run has None"):
        plain.load_state_dict(state)
    with pytest.raises(ForeignArtefactError, match="replan None, this run has 'epoch'"):
        sampler.load_state_dict(plain.state_dict())
    for changed, match in (
        ({"replan": {**state["replan"], "checksum": "0"}}, "epoch 1 was planned as '0'"),
        ({"epoch": 2}, "epoch 2, this run has 1"),
        ({"replan": {**state["replan"], "lengths_digest": "0"}}, "lengths_digest"),
    ):
        with pytest.raises(ForeignArtefactError, match=match):
            setup()[0].load_state_dict({**state, **changed})


def test_what_cannot_be_planned_anew_is_refused() -> None:
    other = pt.plan(LENGTHS, 65)
    with pytest.raises(InputError, match="another run"):
        PackSampler(other.align(2), 0, replan=EpochPlans(BASE, LENGTHS))
    with pytest.raises(InputError, match="cost for every pack"):
        setup(balance=Balance(grad_accum=1, mode="global", cost=np.ones(len(BASE), dtype=np.int64)))
    with pytest.raises(InputError, match="balanced for one epoch"):
        balanced = BASE.align(2).balance(2)
        PackSampler(balanced, 0, shuffle=False, replan=EpochPlans(BASE, LENGTHS))
    for options, match in (
        ({"window": 50}, "window=50"),
        ({"samples_per_step": 40}, "samples_per_step"),
        ({"packer": "random_fit"}, "random_fit"),
    ):
        with pytest.raises(PlanError, match=match):
            EpochPlans(pt.plan(LENGTHS, 64, **options), LENGTHS)
    with pytest.raises(PlanError, match="packs were taken out"):
        EpochPlans(BASE.without([0], "under_filled"), LENGTHS)
    with pytest.raises(PlanError, match="not the lengths"):
        EpochPlans(BASE, [1, 2])


def test_a_worker_reads_the_plan_of_its_epoch() -> None:
    _, data = setup()
    data.set_epoch(1)
    copy = pickle.loads(pickle.dumps(data))
    assert copy.replan is None and copy.plan == data.plan != BASE
    assert [m["sample_id"] for m in copy[5]] == [m["sample_id"] for m in data[5]]
    raw = PackedDataset(BASE, SAMPLES, replan=EpochPlans(BASE, LENGTHS))
    raw.set_epoch(1)
    assert raw.packs is raw.plan and raw.plan == data.plan


def test_a_pass_whose_packs_are_of_another_plan_by_now_stops() -> None:
    for read in (list, lambda source: list(source.loader(len))):
        source = pack_source(PackedDataset(BASE.align(1), SAMPLES), replan=EpochPlans(BASE, LENGTHS))
        packs = iter(source if read is list else source.loader(len))
        next(packs)
        source.set_epoch(1)
        with pytest.raises(InputError, match="epoch 1 was chosen in the middle of a pass of epoch 0"):
            next(packs)
        assert len(read(source)) == len(source)


def test_a_pass_that_began_keeps_its_order() -> None:
    sampler, _ = setup(balance="step", grad_accum=2)
    whole = list(sampler)
    stream = iter(sampler)
    begun = [next(stream), next(stream)]
    sampler.set_epoch(1)
    assert begun + list(stream) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_the_dataset_of_a_loader_follows_the_epoch_of_its_sampler(workers: int) -> None:
    """Hosts tell samplers the epoch, as torch's scripts do: the dataset reads the plan of that epoch then."""
    wanted = [epoch_ids(epoch)[0] for epoch in range(3)]
    sampler, data = setup(0)
    loader = PackLoader(data, sampler, num_workers=workers)

    def ids() -> list[list[int]]:
        return [[member["sample_id"] for member in pack] for (pack,) in loader]

    for epoch in (0, 2, 1):
        loader.sampler.set_epoch(epoch)
        assert ids() == wanted[epoch]
    state = loader.sampler.state_dict(5)
    loader.set_epoch(2)
    loader.sampler.load_state_dict(state)  # epoch 1, behind its fifth pack
    assert ids() == wanted[1][5:]
