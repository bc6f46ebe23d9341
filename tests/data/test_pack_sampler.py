"""PackSampler: law 14 (consumption), equal steps, exact restore."""

from __future__ import annotations

from typing import Any

import pytest

from packtrain.data import PackSampler
from packtrain.errors import ForeignArtefactError, InputError
from packtrain.planning.build import plan


def aligned(packs: int, world_size: int, drop_last: bool = False) -> Any:
    return plan([8] * packs, pack_length=8).align(world_size=world_size, drop_last=drop_last)


def streams(view: Any, epoch: int = 0, **options: Any) -> list[list[int]]:
    out = []
    for rank in range(view.world_size):
        sampler = PackSampler(view, rank=rank, **options)
        sampler.set_epoch(epoch)
        out.append(list(sampler))
        assert len(out[-1]) == len(sampler)
    return out


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_the_epoch_without_overlap(world_size: int, drop_last: bool) -> None:
    view = aligned(10, world_size, drop_last)
    ranks = streams(view, seed=3)
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(p for rank in ranks for p in rank) == list(range(len(view)))


def test_order_does_not_depend_on_the_world_size_and_repeats_come_last() -> None:
    one = streams(aligned(10, 1), seed=5)[0]
    for world_size in (2, 4):
        view = aligned(10, world_size)
        ranks = streams(view, seed=5)
        merged = [ranks[place % world_size][place // world_size] for place in range(len(view))]
        assert merged[:10] == one
        assert merged[10:] == view.repeated.tolist()


def test_epochs_and_seeds_differ_and_repeat_exactly() -> None:
    view = aligned(50, 1)
    orders = [streams(view, epoch=e, seed=s)[0] for s in (0, 1) for e in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6
    assert orders[1] == streams(view, epoch=1, seed=0)[0]
    assert streams(view, shuffle=False)[0] == list(range(50))


@pytest.mark.parametrize(
    ("drop_last", "packs", "per_rank", "optimizer_steps"), [(False, 12, 3, 2), (True, 8, 2, 1)]
)
def test_pb21_the_length_told_is_the_length_of_a_pass(
    drop_last: bool, packs: int, per_rank: int, optimizer_steps: int
) -> None:
    view = aligned(10, 4, drop_last)
    assert len(view) == packs
    for epoch in range(3):
        for rank in streams(view, epoch=epoch, grad_accum=2):
            assert len(rank) == per_rank
    assert -(-per_rank // 2) == optimizer_steps


def test_three_packs_on_eight_ranks() -> None:
    view = aligned(3, 8)
    ranks = streams(view, shuffle=False)
    assert [view.pack_id(rank[0]) for rank in ranks] == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("stop", [0, 1, 4, 9, 10])
def test_restore_continues_exactly(stop: int) -> None:
    view = aligned(20, 2)
    whole = PackSampler(view, rank=1, seed=2)
    expected = []
    for epoch in range(3):
        whole.set_epoch(epoch)
        expected += list(whole)
    first = PackSampler(view, rank=1, seed=2)
    first.set_epoch(1)
    stream = iter(first)
    for _ in range(stop):
        next(stream)
    state = first.state_dict()
    again = PackSampler(view, rank=1, seed=2)
    again.load_state_dict(state)
    rest = list(again)
    epoch = again.epoch + 1
    again.set_epoch(epoch)
    if epoch < 3:
        rest += list(again)
    assert rest == expected[10 + stop :]


def test_state_of_another_plan_or_order_is_refused() -> None:
    sampler = PackSampler(aligned(20, 2), rank=0)
    state = sampler.state_dict(micro_step=4)
    assert state["micro_step"] == 4
    for other in (
        PackSampler(aligned(21, 2)),
        PackSampler(aligned(20, 4)),
        PackSampler(aligned(20, 2), seed=1),
    ):
        with pytest.raises(ForeignArtefactError, match="the saved position has"):
            other.load_state_dict(state)
    with pytest.raises(ForeignArtefactError, match="micro step 99 of 10"):
        sampler.load_state_dict({**state, "micro_step": 99})


def test_an_abandoned_pass_does_not_shift_the_next_one() -> None:
    sampler = PackSampler(aligned(20, 2), seed=2)
    whole = list(sampler)
    stream = iter(sampler)
    next(stream), next(stream)
    assert sampler.micro_step == 2
    assert list(sampler) == whole


def test_bad_options_are_refused() -> None:
    with pytest.raises(InputError, match="balance"):
        PackSampler(aligned(4, 2), balance="step")
    with pytest.raises(InputError, match="rank 2 of world size 2"):
        PackSampler(aligned(4, 2), rank=2)
    with pytest.raises(InputError, match="grad_accum"):
        PackSampler(aligned(4, 2), grad_accum=0)
