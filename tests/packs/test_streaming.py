"""Streams of packs: conservation, hard caps, exact resume anywhere, equal steps, clear faults."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from packtrain.data import StreamingPackedDataset, TokenBudgetDataset
from packtrain.errors import DriftError, ForeignArtefactError, InputError, SampleError, SourceError


def rows(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": [i] * n, "extra": f"kept {i}"} for i, n in enumerate(lengths)]


LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 40, 300)]


class Lines:
    """An iterable that begins anew with every pass; picklable."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.samples)


def ids(packs: Any) -> list[list[int]]:
    return [[sample["sample_id"] for sample in pack] for pack in packs]


def flat(packs: list[list[int]]) -> list[int]:
    return [i for pack in packs for i in pack]


def make(kind: str = "sequence", lengths: list[int] = LENGTHS, **options: Any) -> StreamingPackedDataset:
    source: Any = rows(lengths)
    if kind == "iterable":
        source = Lines(source)
    return StreamingPackedDataset(source, **{"pack_length": 64, "window": 50, **options})


@pytest.mark.spec(
    "001",
    "every sample once, packs within the cap, resume at any pack",
    key="`data.kind: stream`",
    api="`StreamingPackedDataset`",
)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 80), max_size=120),
    window=st.integers(1, 60),
    cap=st.integers(20, 90),
    buffer=st.integers(0, 20),
    carry=st.integers(0, 4),
    kind=st.sampled_from(["sequence", "iterable"]),
    data=st.data(),
)
def test_conservation_hard_cap_and_resume_at_any_pack(
    lengths: list[int], window: int, cap: int, buffer: int, carry: int, kind: str, data: Any
) -> None:
    options = {"pack_length": cap, "window": window, "max_carry": carry, "shuffle_buffer": buffer, "seed": 3}
    packs = list(make(kind, lengths, **options))
    seen = ids(packs)
    assert sorted(i for pack in seen for i in pack) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or sum(len(sample["input_ids"]) for sample in pack) <= cap
        assert all(sample["extra"] == f"kept {sample['sample_id']}" for sample in pack)
    stop = data.draw(st.integers(0, len(packs)))
    first = make(kind, lengths, **options)
    stream = iter(first)
    begun = [next(stream) for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    again = make(kind, lengths, **options)
    again.load_state_dict(state)
    assert json.loads(json.dumps(again.state_dict())) == state
    rest = list(again)
    assert ids(begun) + ids(rest) == seen
    assert [s["input_ids"] for pack in rest for s in pack] == [
        s["input_ids"] for pack in packs[stop:] for s in pack
    ]


@pytest.mark.parametrize("kind", ["sequence", "iterable"])
@pytest.mark.parametrize("readers", [1, 3, 7])
def test_readers_share_the_stream(kind: str, readers: int) -> None:
    """Each sample to one reader, the first one too, also where there are more readers than anything."""
    found: list[int] = []
    for rank in range(readers):
        part = make(kind, LENGTHS[:5], rank=rank, world_size=readers, shuffle_buffer=3)
        found += [i for pack in ids(part) for i in pack]
    assert sorted(found) == list(range(5))


@pytest.mark.spec(
    "001",
    "`cyclic`: the next epoch begins where one ends",
    key="`training.max_steps`",
    api="`StreamingPackedDataset(cyclic=True)`",
)
@pytest.mark.parametrize("kind", ["sequence", "iterable"])
def test_epochs_differ_and_repeat_and_cyclic_goes_on(kind: str) -> None:
    stream = make(kind, shuffle_buffer=30, seed=1)
    first = ids(stream)
    assert ids(stream) == first  # the same epoch again
    stream.set_epoch(1)
    second = ids(stream)
    assert second != first and sorted(flat(second)) == list(range(300))
    endless = make(kind, shuffle_buffer=30, seed=1, cyclic=True)
    taken = iter(endless)
    assert ids(next(taken) for _ in range(len(first) + len(second))) == first + second
    state = endless.state_dict()
    following = ids(next(taken) for _ in range(5))
    again = make(kind, shuffle_buffer=30, seed=1, cyclic=True)
    again.load_state_dict(state)
    taken = iter(again)
    assert ids(next(taken) for _ in range(5)) == following
    with pytest.raises(InputError, match="no sample"):
        next(iter(make(kind, [], cyclic=True)))


def test_an_epoch_named_in_the_middle_of_a_pass_counts_for_the_next_one() -> None:
    stream = make(shuffle_buffer=1)
    first = ids(stream)
    packs = iter(stream)
    begun = [next(packs)]
    stream.set_epoch(1)
    assert ids([*begun, *packs]) == first
    assert ids(stream) != first and stream.state_dict()["epoch"] == 1


def test_a_buffer_shuffles_and_nothing_else_changes() -> None:
    one = {"lengths": [64] * 300}  # every sample fills a pack
    plain, mixed = (flat(ids(make("iterable", shuffle_buffer=n, **one))) for n in (0, 100))
    assert plain == list(range(300)) and mixed != plain and sorted(mixed) == plain


@pytest.mark.parametrize("workers", [2])
def test_encode_workers_change_nothing_and_may_change_at_a_resume(workers: int) -> None:
    source = list(range(120))
    options: dict[str, Any] = {"pack_length": 50, "window": 20, "shuffle_buffer": 1, "seed": 2}
    expected = ids(StreamingPackedDataset(source, encode, **options))
    stream = StreamingPackedDataset(source, encode, encode_workers=workers, **options)
    packs = iter(stream)
    begun = ids(next(packs) for _ in range(7))
    state = stream.state_dict()
    del packs
    again = StreamingPackedDataset(source, encode, **options)
    again.load_state_dict(state)
    assert begun + ids(again) == expected


def encode(i: int) -> dict[str, Any]:
    return {"input_ids": [i] * (i % 13 + 1)}


def tensors(i: int) -> dict[str, Any]:
    return {"input_ids": torch.arange(i % 13 + 1), "labels": torch.arange(i % 13 + 1)}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_tensors_of_encode_workers_hold_no_files() -> None:
    """Through shared memory each that waits would keep a file open; 1,024 are the usual limit."""
    stream = StreamingPackedDataset(range(300), tensors, pack_length=50, window=300, encode_workers=1)
    before = len(os.listdir("/proc/self/fd"))
    held = list(stream)
    assert len(flat(ids(held))) == 300 and len(os.listdir("/proc/self/fd")) < before + 20


def failing(i: int) -> dict[str, Any]:
    if i == 57:
        raise SampleError("missing_media", "its picture is gone")
    if i == 90:
        raise ValueError("a bug")
    if i == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(i)


def test_an_error_in_a_worker_is_raised_at_its_sample() -> None:
    stream = StreamingPackedDataset(range(80), failing, pack_length=50, window=20, encode_workers=1)
    packs = iter(stream)
    seen = []
    with pytest.raises(SampleError, match="sample 57: its picture is gone"):
        for pack in packs:
            seen += pack
    assert 20 <= len(seen) < 57


def test_a_bad_sample_stops_the_stream_by_name_or_goes_to_the_ledger(tmp_path: Path) -> None:
    options: dict[str, Any] = {"pack_length": 50, "window": 20}
    with pytest.raises(SampleError, match="sample 57: its picture is gone"):
        list(StreamingPackedDataset(range(80), failing, **options))
    ledger = tmp_path / "left.jsonl"
    stream = StreamingPackedDataset(range(80), failing, on_error="skip", ledger_file=ledger, **options)
    assert sorted(flat(ids(stream))) == [i for i in range(80) if i != 57]
    assert stream.left_out == {"missing_media": 1}
    assert [json.loads(line)["sample_id"] for line in ledger.read_text().splitlines()] == [57]
    with pytest.raises(InputError, match=r"sample 90 cannot be encoded: ValueError: a bug"):
        list(StreamingPackedDataset(Shifted(60, 95), failing, **options))


class Shifted:
    """Samples low … high-1 under ids of their own."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __len__(self) -> int:
        return self.high

    def __getitem__(self, i: int) -> int:
        return max(i, self.low)


def test_a_killed_worker_is_told_within_seconds() -> None:
    stream = StreamingPackedDataset(Shifted(95, 100), failing, pack_length=50, window=20, encode_workers=1)
    began = time.monotonic()
    with pytest.raises(InputError, match=r"a worker died on sample 99 \(killed by SIGKILL\)"):
        list(stream)
    assert time.monotonic() - began < 60


def test_long_samples_follow_the_policy(tmp_path: Path) -> None:
    lengths = [10, 99, 5]
    assert sorted(ids(make(lengths=lengths))) == [[0, 2], [1]]
    ledger = tmp_path / "l.jsonl"
    stream = make(lengths=lengths, long_samples="drop", ledger_file=ledger)
    assert ids(stream) == [[0, 2]] and stream.left_out == {"over_long": 1}
    assert json.loads(ledger.read_text())["sample_id"] == 1
    with pytest.raises(InputError, match="sample 1 is long: 99 tokens, limit 64"):
        list(make(lengths=lengths, long_samples="error"))


def test_a_source_that_was_cut_or_changed_is_refused() -> None:
    for kind in ("sequence", "iterable"):
        stream = make(kind, window=30)
        packs = iter(stream)
        for _ in range(9):
            next(packs)
        state = stream.state_dict()
        short = make(kind, LENGTHS[:10], window=30)
        short.load_state_dict(state)
        with pytest.raises(SourceError, match="was cut"):
            list(short)
        changed = make(kind, [n % 7 + 1 for n in LENGTHS], window=30)
        changed.load_state_dict(state)
        with pytest.raises(DriftError, match="tokens when the state was saved"):
            list(changed)


def test_states_of_other_settings_and_readers_are_refused() -> None:
    stream = make(shuffle_buffer=4)
    next(iter(stream))
    state = stream.state_dict()
    for other, key in (
        (make(shuffle_buffer=4, seed=1), "seed"),
        (make(shuffle_buffer=4, window=51), r"settings window 50 \(this one 51\)$"),
        (make(shuffle_buffer=0), r"settings shuffle True \(this one False\)$"),
        (make(shuffle_buffer=4, splits=2), "splits"),
    ):
        with pytest.raises(ForeignArtefactError) as foreign:
            other.load_state_dict(state)
        assert re.search(f"has {key}", foreign.value.message)
    for of in ({}, None, {"spec": 5}, {"spec": {}, "skip": [1]}):  # of an earlier version, or damaged
        with pytest.raises(ForeignArtefactError, match="has settings"):
            make(shuffle_buffer=4, window=51).load_state_dict({**state, "of": of})
    with pytest.raises(ForeignArtefactError, match="version"):
        stream.load_state_dict({**state, "version": 0})
    with pytest.raises(InputError, match="the stream has 1 split, which 2 ranks cannot share") as caught:
        make(shuffle_buffer=4, rank=1, world_size=2).load_state_dict(state)
    assert "one of 1" in str(caught.value.hint)
    two = [make(rank=rank, world_size=2).state_dict() for rank in range(2)]
    one = make(rank=0, world_size=1)
    with pytest.raises(ForeignArtefactError, match=r"rank 0 of 2 holds 1 of 2 splits \(0\)") as caught:
        one.load_state_dict(two[0])
    assert "load_state_dict([state, …])" in str(caught.value.hint)
    with pytest.raises(ForeignArtefactError, match="hold a split twice"):
        one.load_state_dict([two[0], two[0]])
    with pytest.raises(ForeignArtefactError, match="has seed 1"):
        one.load_state_dict([two[0], {**two[1], "seed": 1}])
    with pytest.raises(ForeignArtefactError, match="different streams: window 50, 49"):
        one.load_state_dict([two[0], {**two[1], "window": 49}])
    one.load_state_dict(two)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="generator that can be read only once"):
        StreamingPackedDataset(iter([]), pack_length=4)
    with pytest.raises(InputError, match="int is no source"):
        StreamingPackedDataset(7, pack_length=4)
    for options, match in (
        ({"exhausted": "stop"}, "exhausted"),
        ({"window": 0}, "window"),
        ({"max_carry": -1}, "max_carry"),
        ({"encode_workers": True}, "encode_workers"),
        ({"on_error": "skip"}, "must be written down"),
        ({"on_error": "zero"}, "must be written down"),
        ({"on_error": "drop"}, "on_error"),
        ({"packer": "bdf"}, "bfd"),
    ):
        with pytest.raises(InputError, match=match):
            make(**options)
    with pytest.raises(InputError, match="sample 0 has no input_ids"):
        list(StreamingPackedDataset([{"text": "a"}], pack_length=4))


def test_state_is_bounded_and_indexed_sources_are_not_read_again() -> None:
    class Counting(list):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, i: Any) -> Any:
            Counting.reads += 1
            return super().__getitem__(i)

    lengths = [7] * 5000
    stream = StreamingPackedDataset(Counting(rows(lengths)), pack_length=64, window=50, shuffle_buffer=1)
    packs = iter(stream)
    for _ in range(500):
        next(packs)
    state = stream.state_dict()
    assert len(json.dumps(state)) < 8000
    Counting.reads = 0
    again = StreamingPackedDataset(Counting(rows(lengths)), pack_length=64, window=50, shuffle_buffer=1)
    again.load_state_dict(state)
    next(iter(again))
    assert Counting.reads <= 150


@pytest.mark.parametrize("workers", [2])
def test_loader_workers_share_the_stream(workers: int) -> None:
    stream = make(shuffle_buffer=1)
    loader = DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context="spawn")
    assert sorted(flat(ids(loader))) == list(range(300))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_loader_resumes_exactly(workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loader(count: int) -> Any:
        return torchdata.StatefulDataLoader(make(shuffle_buffer=1), batch_size=None, num_workers=count)

    expected = ids(loader(workers))
    first = loader(workers)
    packs = iter(first)
    begun = ids(next(packs) for _ in range(11))
    state = first.state_dict()
    del packs
    again = loader(workers)
    again.load_state_dict(state)
    assert begun + ids(again) == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_reaches_loader_workers(persistent: bool) -> None:
    stream = make(shuffle_buffer=1)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=persistent)
    passes = []
    for epoch in (0, 1, 1, 0):
        stream.set_epoch(epoch)
        passes.append(ids(loader))
    assert passes[0] == passes[3] != passes[1] == passes[2]
    assert sorted(flat(passes[1])) == list(range(300))
    planned = TokenBudgetDataset(rows(LENGTHS), max_seq_len=64, lengths=LENGTHS, shuffle_buffer=1)
    loader = DataLoader(planned, batch_size=None, num_workers=1, persistent_workers=persistent)
    first = ids(loader)
    planned.set_epoch(1)
    second = ids(loader)
    assert second != first and sorted(flat(second)) == sorted(flat(first))


def test_a_state_behind_the_end_begins_the_next_pass() -> None:
    stream = make(shuffle_buffer=1)
    expected = ids(stream)
    again = make(shuffle_buffer=1)
    again.load_state_dict(stream.state_dict())
    assert ids(again) == expected


class Frozen:
    """Samples that say how many objects no garbage collection of their process looks at."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": [1], "frozen": gc.get_freeze_count()}


def test_a_worker_of_a_loader_freezes_what_it_was_born_with_and_nobody_else_does() -> None:
    stream = StreamingPackedDataset(Frozen(), pack_length=4, window=4)
    gc.unfreeze()
    try:
        assert {sample["frozen"] for pack in stream for sample in pack} == {0}
        packs = list(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork"))
        assert min(sample["frozen"] for pack in packs for sample in pack) > 10_000
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_garbage_collection_is_set_in_processes_of_our_own_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's trainer iterates a stream with its collections as they were."""
    from packtrain.workers import own_process

    source = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    stream = StreamingPackedDataset(source, pack_length=8)
    called: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: called.append(name))
    next(iter(stream))
    assert called == []
    with own_process():
        next(iter(stream))
    next(iter(stream))
    assert called == ["freeze", "unfreeze"]
