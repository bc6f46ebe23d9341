"""PackSampler: law 14 (consumption), equal steps, exact restore."""

from __future__ import annotations

from typing import Any

import pytest

from packtrain.data import PackSampler
from packtrain.errors import ForeignArtefactError, InputError
from packtrain.planning.balance import Balance
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


@pytest.mark.spec(
    "000",
    "epochs shuffle packs, never the plan; `shuffle: false` keeps its order",
    key="`data.shuffle`",
    api="`PackSampler`",
)
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
        PackSampler(aligned(21, 2), 0),
        PackSampler(aligned(20, 4), 0),
        PackSampler(aligned(20, 2), 0, seed=1),
    ):
        with pytest.raises(ForeignArtefactError, match=r"the saved position has|was saved by 2 ranks"):
            other.load_state_dict(state)
    with pytest.raises(ForeignArtefactError, match="micro step 99 of 10"):
        sampler.load_state_dict({**state, "micro_step": 99})
    other = PackSampler(aligned(20, 4), 0)
    for key in ("grad_accum", "world_size"):  # ranks that could go on are never looked for one by one
        with pytest.raises(ForeignArtefactError, match=f"has {key} {1 << 63}"):
            other.load_state_dict({**state, key: 1 << 63})
    with pytest.raises(ForeignArtefactError, match="4 ranks with grad_accum 524288"):
        other.load_state_dict({**state, "grad_accum": 1 << 20})


def test_an_abandoned_pass_does_not_shift_the_next_one() -> None:
    sampler = PackSampler(aligned(20, 2), 0, seed=2)
    whole = list(sampler)
    stream = iter(sampler)
    next(stream), next(stream)
    assert sampler.micro_step == 2
    assert list(sampler) == whole


def test_a_cost_without_balance_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert list(PackSampler(aligned(4, 2), 0, cost="tokens")) == list(PackSampler(aligned(4, 2), 0))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("cost has no effect")


def test_bad_options_are_refused() -> None:
    with pytest.raises(InputError, match="balance"):
        PackSampler(aligned(4, 2), 0, balance="steps")
    with pytest.raises(InputError, match="shuffle=True would undo it"):
        PackSampler(aligned(4, 2).balance(2), 0)
    with pytest.raises(InputError, match="rank 2 of world size 2"):
        PackSampler(aligned(4, 2), rank=2)
    with pytest.raises(InputError, match="grad_accum"):
        PackSampler(aligned(4, 2), 0, grad_accum=0)


def uneven(packs: int, world_size: int) -> Any:
    return plan([60 + (i * 37) % 40 for i in range(packs)], pack_length=100).align(world_size)


@pytest.mark.parametrize(("packs", "world_size", "accum"), [(50, 3, 4), (24, 2, 3), (9, 4, 2), (5, 2, 1)])
def test_balanced_epochs_equal_the_balanced_plan(packs: int, world_size: int, accum: int) -> None:
    view = uneven(packs, world_size)
    for epoch in (0, 1):
        ranks = streams(view, epoch=epoch, seed=3, balance="step", grad_accum=accum)
        wanted = view.balance(accum, seed=3, epoch=epoch)
        merged = [view.pack_id(ranks[p % world_size][p // world_size]) for p in range(len(view))]
        assert merged == wanted.pack_ids.tolist()
        read = streams(wanted, epoch=epoch, shuffle=False)
        assert [wanted.pack_id(read[p % world_size][p // world_size]) for p in range(len(view))] == merged
        if accum == 1:
            assert ranks == streams(view, epoch=epoch, seed=3)


def test_a_balanced_plan_is_of_one_epoch() -> None:
    sampler = PackSampler(uneven(20, 2).balance(2, seed=3, epoch=1), 0, shuffle=False)
    with pytest.raises(InputError, match="order of epoch 1, not of epoch 0"):
        next(iter(sampler))


@pytest.mark.parametrize("stop", [0, 1, 5, 7, 12])
def test_balanced_restore_continues_exactly(stop: int) -> None:
    view = uneven(50, 2)
    options = {"rank": 1, "seed": 2, "balance": "step", "grad_accum": 4}
    whole = list(PackSampler(view, **options))
    state = PackSampler(view, **options).state_dict(micro_step=stop)
    again = PackSampler(view, **options)
    again.load_state_dict(state)
    assert list(again) == whole[stop:]
    with pytest.raises(ForeignArtefactError, match="balance"):
        PackSampler(view, **{**options, "balance": None}).load_state_dict(state)


def test_steps_of_samples_are_dealt_in_any_world_size() -> None:
    made = plan([20 + (i * 37) % 60 for i in range(200)], 100, samples_per_step=24, packs_multiple=8, seed=1)
    wanted = None
    for world_size in (1, 2, 4, 8):
        view = made.align(world_size)
        ranks = streams(view, epoch=2, seed=3, balance="step", grad_accum=view.grad_accum)
        merged = [view.pack_id(ranks[p % world_size][p // world_size]) for p in range(len(view))]
        width = made.spec.packs_per_step
        steps = [sorted(merged[i : i + width]) for i in range(0, len(merged), width)]
        wanted = steps if wanted is None else wanted
        assert steps == wanted and len(steps) == made.step_count


@pytest.mark.parametrize(
    ("ranks", "settings", "told"),
    [
        (1, {"balance": "step", "grad_accum": 2}, "balance step has no effect on one rank"),
        (2, {"balance": "step"}, "balance step has no effect with one micro step a step"),
        (2, {"balance": "step", "grad_accum": 2}, None),
        (1, {"seed": 5, "shuffle": False}, "seed 5 has no effect without shuffle"),
        (1, {"seed": 5, "shuffle": False, "balance": "global", "grad_accum": 2}, None),
        (1, {"seed": 5}, None),
        (1, {"balance": Balance(grad_accum=2), "grad_accum": 2}, None),  # the default of a host
    ],
)
def test_settings_without_effect_are_one_warning(
    ranks: int, settings: dict[str, Any], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """On the rank that writes, and only where they were asked for."""
    view = aligned(12, ranks)
    for rank in range(ranks):
        PackSampler(view, rank, **settings)
    lines = [one.getMessage() for one in caplog.records if "has no effect" in one.getMessage()]
    assert len(lines) == (told is not None)
    assert told is None or lines[0].startswith(told)


def test_a_seed_that_is_not_used_refuses_no_state() -> None:
    view = aligned(12, 1)
    saved = PackSampler(view, 0, seed=7, shuffle=False)
    again = PackSampler(view, 0, shuffle=False)
    again.load_state_dict(saved.state_dict(4))
    assert list(again) == list(PackSampler(view, 0, shuffle=False))[4:]
    with pytest.raises(ForeignArtefactError):
        PackSampler(view, 0).load_state_dict(PackSampler(view, 0, seed=7).state_dict(4))
