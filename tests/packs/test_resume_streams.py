"""Law 9 for samplers and loaders: stop anywhere, go on with other workers and other ranks, same stream."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.data import PackedDataset, PackLoader, PackSampler, loader_position
from packtrain.errors import ForeignArtefactError, InputError

EPOCHS = 3
PACKS = 160  # 40 steps of 4 packs: 2 ranks x 2, 1 x 4, 4 x 1
WIDTH = 4


class Rows:
    """Samples whose tokens are their id; picklable."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": np.full(8, i), "labels": np.full(8, i)}


def make_plan(packs: int = PACKS, **options: Any) -> pt.PackPlan:
    return pt.plan([8] * packs, pack_length=8, **options)


def whole_stream(plan: pt.PackPlan, seed: int = 5, **options: Any) -> list[int]:
    """Pack ids of all epochs in global order: one rank reads it."""
    view = plan.align(1)
    sampler = PackSampler(view, 0, seed=seed, grad_accum=WIDTH, **options)
    found: list[int] = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        found += [view.pack_id(position) for position in sampler]
    return found


def run(
    plan: pt.PackPlan, ranks: int, state: Any, micro: int | None, seed: int = 5, **options: Any
) -> tuple[list[int], Any]:
    """All ranks in lockstep from `state` for `micro` micro steps (None: to the end): (pack ids, state)."""
    view = plan.align(ranks)
    samplers = [PackSampler(view, r, seed=seed, grad_accum=WIDTH // ranks, **options) for r in range(ranks)]
    if state is not None:
        for sampler in samplers:
            sampler.load_state_dict(json.loads(json.dumps(state)))
    found: list[int] = []
    for epoch in range(samplers[0].epoch, EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for places in zip(*samplers, strict=True):
            if micro == 0:
                return found, samplers[0].state_dict(samplers[0].micro_step - 1)
            found += [view.pack_id(place) for place in places]
            micro = None if micro is None else micro - 1
    return found, samplers[0].state_dict()


def test_every_stop_of_two_one_and_four_ranks() -> None:
    """2 ranks stop at every micro step of 3 epochs of 40 steps; 1 rank goes on and stops at the next step
    border; 4 ranks finish. The concatenated stream is that of the uninterrupted run."""
    plan = make_plan()
    expected = whole_stream(plan)
    assert len(expected) == EPOCHS * PACKS
    total = EPOCHS * PACKS // 2
    for stop in range(total + 1):
        first, state = run(plan, 2, None, stop)
        assert first == expected[: 2 * stop]
        if stop == total:
            continue
        done = 2 * stop
        second, state = run(plan, 1, state, WIDTH + -done % WIDTH)  # to a border of steps, at least one step
        done += len(second)
        third = run(plan, 4, state, None)[0] if done < len(expected) else []
        assert first + second + third == expected, stop


@pytest.mark.parametrize("stop", range(0, 80, 7))
def test_the_state_is_taken_over_at_once(stop: int) -> None:
    """No position before the state is computed: the first one after it is that of the stream."""
    view = make_plan().align(2)
    whole = list(PackSampler(view, 1, seed=5))
    again = PackSampler(view, 1, seed=5)
    again.load_state_dict(PackSampler(view, 1, seed=5).state_dict(micro_step=stop))
    assert (again.micro_step, again.begins_at) == (stop, stop)
    stream = iter(again)
    assert again.state_dict()["micro_step"] == stop  # asked before the first position
    assert list(stream) == whole[stop:]


@pytest.mark.parametrize("balance", [None, "step"])
@pytest.mark.parametrize("packs", [157, 160, 9])
def test_packs_that_ranks_do_not_divide(packs: int, balance: str | None) -> None:
    """Repeats come last and are the only difference between numbers of ranks."""
    rng = np.random.default_rng(1)
    plan = pt.plan(rng.integers(60, 100, packs), pack_length=100)
    for stop in range(0, packs // 4, 3):
        first, state = run(plan, 2, None, 2 * stop, balance=balance)
        rest, _ = run(plan, 4, state, None, balance=balance)
        epochs = np.array(first[: 4 * stop] + rest)
        assert sorted(epochs[:packs]) == list(range(packs))
        per_step = np.split(
            np.array(run(plan, 4, None, None, balance=balance)[0]), range(4, len(rest) + len(first), 4)
        )
        mine = np.split(epochs, range(4, len(epochs), 4))
        for a, b in zip(mine, per_step, strict=True):
            assert sorted(a) == sorted(b)


def test_steps_of_samples_go_on_with_other_ranks_between_steps_only() -> None:
    plan = pt.plan(np.arange(300) % 7 + 1, pack_length=20, samples_per_step=30, packs_multiple=4, seed=2)
    width = plan.spec.packs_per_step
    assert width is not None and width % 4 == 0

    def step_samples(ranks: int, state: Any, micro: int | None) -> tuple[list[list[int]], Any]:
        view = plan.align(ranks)
        accum = view.block // ranks
        samplers = [PackSampler(view, r, seed=5, grad_accum=accum) for r in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        steps: list[list[int]] = []
        for count, places in enumerate(zip(*samplers, strict=True)):
            if micro == count:
                return steps, samplers[0].state_dict(samplers[0].micro_step - 1)
            if count % accum == 0:
                steps.append([])
            for place in places:
                steps[-1] += view[place].tolist()
        return [sorted(step) for step in steps], None

    whole, _ = step_samples(2, None, None)
    accum = width // 2
    for step in range(1, 10):
        first, state = step_samples(2, None, step * accum)
        rest, _ = step_samples(4, state, None)
        assert [sorted(s) for s in first] + rest == whole
    _, inside = step_samples(2, None, accum + 1)
    with pytest.raises(
        ForeignArtefactError, match=r"of the \d+ packs of the current step are consumed"
    ) as caught:
        step_samples(4, inside, None)
    assert "only 2 ranks go on exactly" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("ranks", "accum", "says", "hint"),
    [
        (
            3,
            1,
            "a step of the saved run has 4 packs (2 ranks, grad_accum 2), one of this run 3",
            "4 ranks with grad_accum 1",
        ),
        (4, 2, "one of this run 8", "1 rank with grad_accum 4"),
        (8, 1, "one of this run 8", "2 ranks with grad_accum 2"),
    ],
)
def test_steps_of_another_width_are_refused_with_what_works(
    ranks: int, accum: int, says: str, hint: str
) -> None:
    plan = make_plan()
    state = PackSampler(plan.align(2), 0, seed=5, grad_accum=2).state_dict(micro_step=8)
    with pytest.raises(ForeignArtefactError, match="saved by 2 ranks") as caught:
        PackSampler(plan.align(ranks), 0, seed=5, grad_accum=accum).load_state_dict(state)
    assert says in caught.value.message and hint in str(caught.value.hint)


def test_inside_a_step_only_ranks_that_share_what_is_left_go_on() -> None:
    plan = make_plan()
    state = PackSampler(plan.align(2), 0, seed=5, grad_accum=2).state_dict(micro_step=9)
    with pytest.raises(
        ForeignArtefactError, match="2 of the 4 packs of the current step are consumed"
    ) as caught:
        PackSampler(plan.align(4), 0, seed=5, grad_accum=1).load_state_dict(state)
    assert "1 rank with grad_accum 4, 2 ranks with grad_accum 2" in str(caught.value.hint)
    assert "4 ranks" not in str(caught.value.hint)


def test_dropped_packs_depend_on_the_ranks_and_are_refused_where_they_differ() -> None:
    plan = make_plan(10)  # 2 ranks keep 10 packs, 4 keep 8
    state = PackSampler(plan.align(2, drop_last=True), 0, seed=5, grad_accum=2).state_dict(micro_step=2)
    with pytest.raises(ForeignArtefactError, match="10 packs, one of 4 8") as caught:
        PackSampler(plan.align(4, drop_last=True), 0, seed=5).load_state_dict(state)
    assert "1 rank with grad_accum 4, 2 ranks with grad_accum 2" in str(caught.value.hint)
    with pytest.raises(ForeignArtefactError, match="drop_last"):
        PackSampler(plan.align(4), 0, seed=5).load_state_dict(state)


@pytest.mark.parametrize("key", sorted(PackSampler(make_plan().align(2), 0, seed=5).state_dict()))
@pytest.mark.parametrize("value", ["gone", "x", -1, 2.5, [1]])
def test_no_damaged_position_is_taken_or_ends_in_a_trace(key: str, value: Any) -> None:
    sampler = PackSampler(make_plan().align(2), 0, seed=5, grad_accum=2)
    state = sampler.state_dict(micro_step=8)
    state = {k: v for k, v in state.items() if k != key} if value == "gone" else {**state, key: value}
    if key in ("replan", "balance") and value == "gone":
        return  # as none, which this sampler has too
    with pytest.raises(ForeignArtefactError):
        sampler.load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], "x"])
def test_what_is_no_position_is_refused(state: Any) -> None:
    with pytest.raises(ForeignArtefactError, match="not a mapping"):
        PackSampler(make_plan().align(2), 0).load_state_dict(state)
    with pytest.raises(InputError, match="not a mapping"):
        loader_position(state)


def test_other_plans_orders_and_garbage_are_refused() -> None:
    plan = make_plan()
    sampler = PackSampler(plan.align(2), 0, seed=5, grad_accum=2)
    state = sampler.state_dict(micro_step=8)
    four = {"grad_accum": 1, "seed": 5}
    for other, key in (
        (PackSampler(make_plan(161).align(4), 0, **four), "raw_plan"),
        (PackSampler(plan.align(4), 0, seed=6), "seed"),
        (PackSampler(plan.align(4), 0, shuffle=False, **four), "shuffle"),
    ):
        with pytest.raises(ForeignArtefactError, match=f"has {key}"):
            other.load_state_dict(state)
    with pytest.raises(ForeignArtefactError, match="balanced for that many ranks"):
        balanced = plan.align(2).balance(2, seed=5)
        saved = PackSampler(balanced, 0, seed=5, shuffle=False, grad_accum=2).state_dict(micro_step=4)
        PackSampler(plan.align(4), 0, seed=5, shuffle=False).load_state_dict(saved)
    for broken in ({}, {**state, "micro_step": None}, {**state, "version": 1}, {**state, "steps": "40"}):
        with pytest.raises(ForeignArtefactError):
            sampler.load_state_dict(broken)
    with pytest.raises(ForeignArtefactError, match="arranges an epoch for 2 ranks"):
        window = PackSampler(plan.align(2), 0, seed=5, grad_accum=2, balance="window")
        PackSampler(plan.align(4), 0, seed=5, balance="window").load_state_dict(
            window.state_dict(micro_step=8)
        )


def test_batches_of_positions_are_the_positions() -> None:
    view = make_plan(11).align(1)
    sampler = PackSampler(view, 0, seed=5)
    batches = sampler.batches(4)
    expected = list(PackSampler(view, 0, seed=5))
    assert [p for batch in batches for p in batch] == expected
    assert len(batches) == 3 == len(list(batches))
    batches.load_state_dict(batches.state_dict(micro_step=4))
    assert [p for batch in batches for p in batch] == expected[4:]
    batches.set_epoch(1)
    assert sampler.epoch == 1
    with pytest.raises(InputError, match="packs is 0"):
        sampler.batches(0)


def ids(batch: list[list[dict[str, Any]]]) -> list[int]:
    return [int(sample["sample_id"]) for pack in batch for sample in pack]


def loader(workers: int = 0, packs: int = 1, count: int = 24) -> PackLoader:
    plan = make_plan(count)
    data = PackedDataset(plan.align(2), Rows(count))
    return PackLoader(data, PackSampler(plan.align(2), 1, seed=5), packs, num_workers=workers)


@pytest.mark.parametrize("packs", [1, 5])
def test_a_loader_goes_on_behind_every_batch(packs: int) -> None:
    whole: list[int] = []
    one = loader(packs=packs)
    for epoch in range(2):
        one.set_epoch(epoch)
        whole += [i for batch in one for i in ids(batch)]
    assert len(whole) == 24
    for stop in range(len(one) + 1):
        first = loader(packs=packs)
        seen: list[int] = []
        batches = iter(first)
        for _ in range(stop):
            seen += ids(next(batches))
        state = json.loads(json.dumps(first.state_dict()))
        again = loader(packs=packs)
        again.load_state_dict(state)
        assert again.state_dict()["epoch"] in (0, 1)
        for epoch in range(again.pack_sampler.epoch, 2):
            again.set_epoch(epoch)
            seen += [i for batch in again for i in ids(batch)]
        assert seen == whole


def test_workers_fetch_ahead_and_another_number_goes_on_exactly() -> None:
    whole = [i for batch in loader(count=48) for i in ids(batch)]
    first = loader(2, count=48)
    batches = iter(first)
    seen = [i for _ in range(5) for i in ids(next(batches))]
    assert first.pack_sampler.micro_step > 5  # fetched ahead
    state = first.state_dict()
    assert state["micro_step"] == 5
    del batches
    one = loader(1, count=48)
    one.load_state_dict(state)
    batches = iter(one)
    seen += [i for _ in range(4) for i in ids(next(batches))]
    none = loader(0, count=48)
    none.load_state_dict(one.state_dict())
    assert seen + [i for batch in none for i in ids(batch)] == whole


# torchdata 0.11 calls a function that torch 2.13 deprecates; torch advises against more workers than cores
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker:UserWarning")
@pytest.mark.parametrize(
    ("workers", "every", "kind"),
    [(0, 1, "sampler"), (0, 3, "batches"), (2, 3, "sampler"), (2, 1, "batches"), (4, 1, "sampler")],
)
def test_torchdata_loader_goes_on_with_any_number_of_workers(workers: int, every: int, kind: str) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    packs = 1 if kind == "sampler" else 2

    def made(count: int) -> Any:
        view = make_plan(48).align(2)
        sampler = PackSampler(view, 1, seed=5)
        options = (
            {"sampler": sampler, "batch_size": 1} if packs == 1 else {"batch_sampler": sampler.batches(2)}
        )
        return sampler, torchdata.StatefulDataLoader(
            PackedDataset(view, Rows(48)),
            collate_fn=list,
            num_workers=count,
            snapshot_every_n_steps=every,
            multiprocessing_context="fork" if count else None,
            **options,
        )

    whole = [i for batch in made(0)[1] for i in ids(batch)]
    for stop in (0, 7, 12):
        _, first = made(workers)
        batches = iter(first)
        seen = [i for _ in range(stop) for i in ids(next(batches))]
        state = pickle.loads(pickle.dumps(first.state_dict()))
        del batches
        _, again = made(workers)
        again.load_state_dict(state)
        rest = [i for batch in again for i in ids(batch)]
        assert (seen + rest)[: len(whole)] == whole
        for count in {0, 2} - {workers}:
            sampler, other = made(count)
            sampler.load_state_dict(loader_position(state, packs))
            rest = [i for batch in other for i in ids(batch)]
            if packs * stop == len(whole):  # all of it: the next epoch begins
                assert sampler.epoch == 1 and len(rest) == len(whole) and rest != whole
            else:
                assert seen + rest == whole


def test_a_loader_state_without_packs_is_refused() -> None:
    for state in ({}, {"_snapshot": {"_main_snapshot": {"_sampler_iter_state": {"samples_yielded": 3}}}}):
        with pytest.raises(InputError, match="no position in packs"):
            loader_position(state)


def all_ranks(plan: pt.PackPlan, ranks: int, workers: int, state: Any) -> list[PackLoader]:
    """The loaders of all ranks, at `state`. Workers are forked: these samples hold no tokenizer."""
    view = plan.align(ranks)
    context: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    made = []
    for rank in range(ranks):
        sampler = PackSampler(view, rank, seed=5, grad_accum=WIDTH // ranks)
        made.append(PackLoader(PackedDataset(view, Rows(PACKS)), sampler, num_workers=workers, **context))
        if state is not None:
            made[-1].load_state_dict(json.loads(json.dumps(state)))
    return made


def read(plan: pt.PackPlan, ranks: int, workers: int, state: Any, micro: int | None) -> tuple[list[int], Any]:
    """`run`, through loaders: what was fetched ahead when it stops is thrown away with the loaders."""
    loaders = all_ranks(plan, ranks, workers, state)
    found: list[int] = []
    for epoch in range(loaders[0].pack_sampler.epoch, EPOCHS):
        for each in loaders:
            each.set_epoch(epoch)
        passes = [iter(each) for each in loaders]
        while micro != 0:
            batches = [next(stream, None) for stream in passes]
            if batches[0] is None:
                assert batches == [None] * ranks  # all ranks end together
                break
            found += [i for batch in batches for i in ids(batch)]
            micro = None if micro is None else micro - 1
        if micro == 0:
            break
    states = [each.state_dict() for each in loaders]
    assert all(other == states[0] for other in states)
    return found, states[0]


@pytest.mark.parametrize("stop", [0, 33, 79, 80, 102, 159, 239])
def test_two_workers_of_two_ranks_then_of_one_then_none_of_four(stop: int) -> None:
    """Real workers, thinned (without workers every stop is tried): inside steps and around ends of epochs."""
    plan = make_plan()
    expected = whole_stream(plan)
    first, state = read(plan, 2, 2, None, stop)
    assert first == expected[: 2 * stop]
    second, state = read(plan, 1, 2, state, WIDTH + -len(first) % WIDTH)
    third, _ = read(plan, 4, 0, state, None)
    assert first + second + third == expected


def test_every_stop_of_loaders_without_workers() -> None:
    """As the exhaustive test above, through `PackLoader`, whose state counts what it handed out."""
    plan = make_plan()
    expected = whole_stream(plan)
    for stop in range(EPOCHS * PACKS // 2):
        loaders = all_ranks(plan, 2, 0, PackSampler(plan.align(2), 0, seed=5, grad_accum=2).state_dict())
        for each in loaders:
            each.set_epoch(stop // 80)
            each.load_state_dict({**each.state_dict(), "micro_step": stop % 80})
        passes = [iter(each) for each in loaders]
        got = [i for stream in passes for i in ids(next(stream))]
        assert got == expected[2 * stop : 2 * stop + 2]
        assert all(each.state_dict()["micro_step"] == stop % 80 + 1 for each in loaders)


# torch advises against more workers than cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker:UserWarning")
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_pb05_the_position_counts_packs_and_the_packs_their_samples(workers: int) -> None:
    """400 samples, 4 in each pack; after 30 packs the next one holds samples 120..123."""
    plan = pt.plan([4] * 400, pack_length=16)
    view = plan.align(1)

    def made(count: int) -> PackLoader:
        context: dict[str, Any] = {"multiprocessing_context": "fork"} if count else {}
        data = PackedDataset(view, Rows4())
        return PackLoader(data, PackSampler(view, 0, shuffle=False), num_workers=count, **context)

    first = made(workers)
    batches = iter(first)
    seen = [i for _ in range(30) for i in ids(next(batches))]
    again = made(2 - workers // 2)
    again.load_state_dict(first.state_dict())
    del batches
    rest = [ids(batch) for batch in again]
    assert rest[0] == [120, 121, 122, 123]
    assert seen + [i for batch in rest for i in batch] == list(range(400))


class Rows4(Rows):
    """Samples of four tokens."""

    def __init__(self) -> None:
        super().__init__(400)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": np.full(4, i), "labels": np.full(4, i)}


def test_pb23_four_ranks_then_two_and_an_older_state_of_four_is_not_mixed_in() -> None:
    """12 packs, 4 ranks, stopped after one step: 2 ranks share the other 8. One state serves all ranks."""
    plan = make_plan(12)
    expected = whole_stream(plan)[:12]
    state = PackSampler(plan.align(4), 0, seed=5, grad_accum=1).state_dict(micro_step=1)
    two = [PackSampler(plan.align(2), rank, seed=5, grad_accum=2) for rank in range(2)]
    for sampler in two:
        sampler.load_state_dict(state)
    parts = [list(sampler) for sampler in two]
    assert [len(part) for part in parts] == [4, 4]
    assert [pack for pair in zip(*parts, strict=True) for pack in pair] == expected[4:]
    other = PackSampler(plan.align(2), 0, seed=5, grad_accum=1).state_dict(
        micro_step=1
    )  # run B: 2 packs a step
    with pytest.raises(ForeignArtefactError, match="a step of the saved run has 2 packs"):
        PackSampler(plan.align(4), 0, seed=5, grad_accum=1).load_state_dict(other)


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 11])
def test_pb43_nothing_all_and_a_second_epoch(stop: int) -> None:
    """8 packs; the state goes to new objects; behind the last pack the next epoch begins."""
    plan = make_plan(8)
    orders = [list(PackSampler(plan.align(1), seed=s)) for s in (5,)]
    later = PackSampler(plan.align(1), seed=5)
    later.set_epoch(1)
    orders.append(list(later))
    sampler = PackSampler(plan.align(1), seed=5)
    sampler.set_epoch(stop // 9)
    again = PackSampler(plan.align(1), seed=5)
    again.load_state_dict(sampler.state_dict(micro_step=stop % 8 if stop > 8 else stop))
    assert (again.epoch, again.begins_at) == (stop // 8, stop % 8)
    assert list(again) == orders[stop // 8][stop % 8 :]


def test_pb85_workers_that_stay_get_the_order_of_their_epoch() -> None:
    """The order is made in the main process, so torch's persistent workers follow it; twice the same."""

    def launch() -> list[list[int]]:
        from torch.utils.data import DataLoader

        view = make_plan(24).align(1)
        sampler = PackSampler(view, 0, seed=5)
        data = DataLoader(
            PackedDataset(view, Rows(24)), batch_size=1, sampler=sampler, collate_fn=list,
            num_workers=2, persistent_workers=True, multiprocessing_context="fork",
        )  # fmt: skip
        epochs = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            epochs.append([i for batch in data for i in ids(batch)])
        return epochs

    one, two = launch(), launch()
    assert one == two and all(sorted(epoch) == list(range(24)) for epoch in one)
    assert len({tuple(epoch) for epoch in one}) == 3


def test_a_beginning_outside_the_epoch_is_refused() -> None:
    sampler = PackSampler(make_plan(8).align(2), 0, seed=5)
    for step in (-1, 5):
        with pytest.raises(InputError, match=f"micro step {step} of 4"):
            sampler.begin_at(step)
    sampler.begin_at(4)
    assert list(sampler) == []


def test_mapped_lengths_travel_to_workers_as_a_name(tmp_path: Path) -> None:
    pt.Lengths(np.full(200_000, 8)).save(tmp_path / "l")
    lengths = pt.Lengths.load(tmp_path / "l")
    pt.plan(lengths, pack_length=64).save(tmp_path / "p")
    data = PackedDataset(pt.PackPlan.load(tmp_path / "p"), Rows(200_000), lengths=lengths)
    sent = pickle.dumps(data)
    assert len(sent) < 4096
    back = pickle.loads(sent)
    assert np.array_equal(back.lengths, lengths.tokens) and not back.lengths.flags.writeable
    assert ids([back[3]]) == ids([data[3]])
    held = PackedDataset(make_plan(4), Rows(4), lengths=np.full(4, 8))
    assert pickle.loads(pickle.dumps(held)).lengths.tolist() == [8] * 4


def test_loader_options_that_would_undo_the_order_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    plan = make_plan(4)
    data, sampler = PackedDataset(plan.align(1), Rows(4)), PackSampler(plan.align(1))
    with pytest.raises(InputError, match="PackLoader has no shuffle"):
        PackLoader(data, sampler, shuffle=True)
    loader = PackLoader(data, sampler, num_workers=1, persistent_workers=True)
    assert "no effect beside packs: persistent_workers" in caplog.text and not loader.persistent_workers
