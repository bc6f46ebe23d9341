"""Streams under bad input, damaged states and loaders at their end: refused, and nothing lost."""

from __future__ import annotations

import copy
import errno
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from packtrain import Lengths, plan
from packtrain.data import (
    EqualSteps,
    PackedDataset,
    StreamingPackedDataset,
    TokenBudgetDataset,
    WeightedSources,
)
from packtrain.errors import ForeignArtefactError, InputError, PacktrainError, SampleError, SourceError
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 12, 100)]


def rows(lengths: list[int] = LENGTHS) -> list[dict[str, Any]]:
    return [{"input_ids": [1] * n, "labels": [1] * n} for n in lengths]


def ids(packs: Any) -> list[list[int]]:
    return [[sample["sample_id"] for sample in pack] for pack in packs]


def flat(packs: Any) -> list[int]:
    return [i for pack in packs for i in pack]


class Lines(IterableDataset[Any]):  # type: ignore[misc]
    """An iterable dataset that knows its length and has no index."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)


class Faulty:
    """Indexable; reading sample 37 raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == 37:
            raise self.error
        return rows()[i]


def make(source: Any = None, **options: Any) -> StreamingPackedDataset:
    options = {"pack_length": 20, "window": 10, "shuffle_buffer": 7, **options}
    return StreamingPackedDataset(rows() if source is None else source, **options)


def test_an_iterable_dataset_with_a_length_is_read_as_an_iterable() -> None:
    assert sorted(flat(ids(make(Lines(rows()))))) == list(range(100))
    mixed = WeightedSources({"a": Lines(rows()[:50]), "b": Lines(rows()[50:])}, stopping="all")
    assert sorted(flat(ids(make(mixed)))) == list(range(100))


class Passed(WeightedSources):
    """A mixture without an index."""


@pytest.mark.parametrize("mixed", [(), (WeightedSources,), (Passed,), (Passed, WeightedSources)])
def test_a_sample_that_cannot_be_read_is_named_or_left_out(mixed: tuple[Any, ...], tmp_path: Path) -> None:
    """In mixtures, and mixtures of mixtures, too."""
    source: Any = Faulty(SampleError("malformed_record", "train.jsonl:38 is broken"))
    for made in mixed:
        source = made({"only": source})
    with pytest.raises(SampleError, match=r"sample 37: train\.jsonl:38 is broken"):
        list(make(source))
    ledger = tmp_path / "left.jsonl"
    assert sorted(flat(ids(make(source, on_error="skip", ledger_file=ledger)))) == [
        *range(37),
        *range(38, 100),
    ]
    assert json.loads(ledger.read_text())["reason"] == "malformed_record"
    if mixed:
        with pytest.raises(SampleError, match=r"train\.jsonl:38"):
            list(source)


def test_a_sample_of_a_file_that_is_left_out_is_told_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, the ledger and what is raised: the template's own message knows no file."""

    def encode(record: Any) -> Any:
        if record["n"] == 2:
            raise SampleError("missing_media", "/pictures/a.jpg does not exist")
        if record["n"] == 3:
            raise ValueError("odd")
        return rows([4])[0]

    path, ledger = tmp_path / "set.jsonl", tmp_path / "left.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))
    source, options = open_source(path), {"pack_length": 10, "ledger_file": ledger}
    stream = StreamingPackedDataset(source, encode, on_error="skip", **options)
    assert sum(map(len, stream.peek(9))) == 3
    assert not ledger.exists() and stream.left_out == {}
    assert "left out" not in caplog.text  # it is told when it is trained without
    assert sum(map(len, stream)) == 3
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [line["detail"] for line in lines if "detail" in line] == [
        "set.jsonl:3: /pictures/a.jpg does not exist", "set.jsonl:4: cannot be encoded: ValueError: odd",
    ]  # fmt: skip
    assert "sample 2 left out (missing_media): set.jsonl:3: /pictures" in caplog.text
    mixed = WeightedSources({"first": [{"n": 0}] * 5, "set": source})
    for given, sample in ((source, 2), (mixed, 5)):
        with pytest.raises(SampleError, match=rf"sample {sample}: set\.jsonl:3: /pictures/a\.jpg does not"):
            list(StreamingPackedDataset(given, encode, **options))
    assert [mixed.where(place) for place in (4, 5)] == ["", "set.jsonl:3"]


@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_a_sample_that_fails_is_told_alike_by_a_plan_and_by_streams(policy: str, tmp_path: Path) -> None:
    """One reason and one detail for one fault; what is no fault of the sample is none in any kind."""
    faults: dict[int, Any] = {1: SampleError("missing_media", "a.jpg is gone"), 3: ValueError("odd"), 5: None}

    def encode(record: Any) -> Any:
        fault = faults.get(record["n"], rows([2])[0])
        if isinstance(fault, Exception):
            raise fault
        return fault

    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(8)))
    source = open_source(path)

    def kinds(**options: Any) -> dict[str, Any]:
        held = PackedDataset(plan(Lengths([2] * 8), pack_length=8), source, encode, **options)
        stream = StreamingPackedDataset(source, encode, pack_length=8, **options)
        budget = TokenBudgetDataset(source, encode, max_seq_len=8, **options)
        return {"planned": (held[k] for k in range(len(held))), "stream": stream, "token_budget": budget}

    told = {}
    for kind in kinds():
        options = {"on_error": policy, "ledger_file": tmp_path / f"{kind}.jsonl"}
        list(kinds(**options)[kind])
        told[kind] = sorted(options["ledger_file"].read_text().splitlines())
    assert told["planned"] == told["stream"] == told["token_budget"]
    assert [(row["reason"], row["detail"]) for row in map(json.loads, told["planned"])] == [
        ("missing_media", "set.jsonl:2: a.jpg is gone"),
        ("encode_failed", "set.jsonl:4: cannot be encoded: ValueError: odd"),
        ("empty", "set.jsonl:6: it was encoded to nothing"),
    ]
    for error in (MemoryError("full"), OSError(errno.EMFILE, "too many files"), InputError("no")):
        faults[4] = error
        for kind in kinds():
            with pytest.raises(type(error)):
                list(kinds(on_error=policy, ledger_file=tmp_path / "machine.jsonl")[kind])


def test_an_error_of_the_source_says_where() -> None:
    def broken() -> Iterator[Any]:
        yield from rows()[:3]
        raise OSError("the disk is gone")

    with pytest.raises(SourceError, match="sample 37 of a source of 100 cannot be read: OSError: io"):
        list(make(Faulty(OSError("io"))))
    with pytest.raises(SourceError, match="failed after 3 samples: OSError: the disk is gone"):
        list(make(broken))


def after_an_error(stream: Any, mended: Any) -> list[int]:
    """Ids of what was given before the error, and by a mended stream that goes on from the state."""
    begun: list[Any] = []
    with pytest.raises(PacktrainError, match="sample 37 "):
        begun += stream
    begun = []
    packs = iter(stream)
    try:
        for pack in packs:
            begun.append(pack)
    except PacktrainError:
        pass
    mended.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    return sorted(flat(ids(begun)) + flat(ids(mended)))


def test_a_state_behind_an_error_loses_no_sample() -> None:
    def failing(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["n"] == 37:
            raise SampleError("failed", "no")
        return sample

    samples = [{**row, "n": n} for n, row in enumerate(rows())]
    with pytest.raises(SampleError, match="sample 37: no"):
        list(StreamingPackedDataset(samples, failing, pack_length=20, window=10))
    stream = StreamingPackedDataset(samples, failing, pack_length=20, window=10)
    begun: list[Any] = []
    try:
        for pack in stream:
            begun.append(pack)
    except SampleError:
        pass
    mended = StreamingPackedDataset(samples, pack_length=20, window=10)
    mended.load_state_dict(stream.state_dict())
    assert sorted(flat(ids(begun)) + flat(ids(mended))) == list(range(100))

    state = json.loads(json.dumps(stream.state_dict()))
    window = state["held"][0]["run"]["window"]
    assert len(window) == 7
    for other in (window[::-1], window[:-1], [0, *window]):
        with pytest.raises(ForeignArtefactError, match="damaged"):
            mended.load_state_dict(changed(state, ("held", 0, "run", "window"), other))

    long = rows()
    long[37] = rows([99])[0]
    options = {"shuffle_buffer": 0, "long_samples": "error"}
    assert after_an_error(make(long, **options), make(**options)) == list(range(100))
    unlabelled = rows()
    del unlabelled[37]["labels"]
    budget: dict[str, Any] = {"max_seq_len": 20, "count_mode": "effective", "buffer_size": 10}
    found = after_an_error(TokenBudgetDataset(unlabelled, **budget), TokenBudgetDataset(rows(), **budget))
    assert found == list(range(100))


@pytest.mark.parametrize("value", [None, 5, "abc", b"abc", [[1], [1, 2]], {"a": 1}, np.array(3)])
def test_input_ids_that_are_no_row_are_named(value: Any) -> None:
    with pytest.raises(InputError, match="sample 1 has input_ids that are no row of numbers"):
        list(make([rows()[0], {"input_ids": value}]))


def test_whole_numbers_may_be_numpys_and_end_up_plain() -> None:
    one = np.int64(1)
    stream = make(seed=one, shuffle_buffer=one, max_carry=one, rank=np.int64(0), world_size=one)
    next(iter(stream))
    assert json.dumps(stream.state_dict())
    with pytest.raises(InputError, match="epoch is"):
        stream.set_epoch(1 << 63)
    with pytest.raises(InputError, match="must be written down"):
        make(long_samples={"tokens": "drop"})


@pytest.mark.parametrize(
    ("lengths", "buffer", "match"),
    [
        (95, 7, "was cut"), (95, 0, "was cut"), (60, 7, "was cut"), (3, 7, "was cut"),
        (150, 7, "extended"), (150, 0, None),
    ],
)  # fmt: skip
def test_a_source_of_another_length_is_refused(lengths: int, buffer: int, match: str | None) -> None:
    """A shuffled order belongs to a length: with another, samples would come twice or never."""
    stream = make(shuffle_buffer=buffer)
    packs = iter(stream)
    begun = ids(next(packs) for _ in range(15))
    again = make((rows() + rows())[:lengths], shuffle_buffer=buffer)
    again.load_state_dict(stream.state_dict())
    if match is None:
        assert sorted(flat(begun) + flat(ids(again))) == list(range(lengths))
        return
    with pytest.raises(SourceError, match=match):
        list(again)


def test_an_iterable_that_ends_before_what_was_read_is_refused() -> None:
    stream = make(Lines(rows([20] * 50)), window=1, shuffle_buffer=0)
    packs = iter(stream)
    for _ in range(30):
        next(packs)
    again = make(Lines(rows([20] * 12)), window=1, shuffle_buffer=0)
    again.load_state_dict(stream.state_dict())
    with pytest.raises(SourceError, match="was cut"):
        list(again)


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    out = copy.deepcopy(state)
    held = out
    for key in path[:-1]:
        held = held[key]
    if value == "gone":
        del held[path[-1]]
    else:
        held[path[-1]] = value
    return out


@pytest.mark.parametrize("indexed", [True, False])
def test_a_damaged_state_is_refused_when_it_is_loaded(indexed: bool) -> None:
    def new() -> StreamingPackedDataset:
        return make(rows() if indexed else Lines(rows()))

    stream = new()
    packs = iter(stream)
    for _ in range(12):
        next(packs)
    state = json.loads(json.dumps(stream.state_dict()))
    tried = 0
    (split,) = state["held"]
    at = ("held", 0, "run")
    for name in split["run"]:
        for value in ("gone", "x", -1, 2.5, [[1, "a"]], [-1], {"a": "b"}, True):
            if name == "total" and value == "gone":
                continue  # a state of an earlier version
            with pytest.raises(ForeignArtefactError, match="incomplete or damaged"):
                new().load_state_dict(changed(state, (*at, name), value))
            tried += 1
    for path in (
        (*at, "packer", "ids", 0),
        (*at, "packer", "age", 0),
        (*at, "places", 0),
        (*at, "packer"),
        *((name,) for name in ("splits", "window", "buffer", "held", "reader")),
        *(("held", 0, name) for name in ("split", "turn", "epoch", "run")),
        ("held", 0),
    ):
        with pytest.raises(ForeignArtefactError, match="damaged"):
            new().load_state_dict(changed(state, path, "gone"))
    for path, value in (
        (("splits",), 2), (("splits",), 1 << 40), (("window",), 0), (("reader",), [1, 1, 1, 0]),
        (("reader",), [2, 0, 1, 0]), (("held", 0, "split"), 1), (("held", 0, "turn"), -1),
        (("held", 0, "done"), True), (("held",), [split, split]), (("held",), [split, 7]),
    ):  # fmt: skip
        with pytest.raises(ForeignArtefactError, match="damaged"):
            new().load_state_dict(changed(state, path, value))
    twice = changed(state, (*at, "ready"), [split["run"]["ready"][0]] * 2)
    with pytest.raises(ForeignArtefactError, match="held twice"):
        new().load_state_dict(twice)
    for epoch in (-1, True, "x", None):
        with pytest.raises(ForeignArtefactError, match="epoch"):
            new().load_state_dict({**state, "epoch": epoch})
    assert tried > 80


@pytest.mark.parametrize("costs", [{}, "other", "further"])
def test_what_waits_under_other_limits_is_no_state(costs: Any) -> None:
    """A packer joins what waits with what comes, cost by cost."""

    def new() -> TokenBudgetDataset:
        return TokenBudgetDataset(
            rows(), micro_batch_size=1, max_seq_len=40, count_mode="effective", buffer_size=16
        )

    stream = new()
    packs = iter(stream)
    next(packs)
    state = json.loads(json.dumps(stream.state_dict()))
    at = ("held", 0, "run", "packer", "costs")
    held = state["held"][0]["run"]["packer"]["costs"]
    (values,) = held.values()
    assert values and not new().check_state(state)
    edited = {"other": {"other": values}, "further": {**held, "images": values}}.get(str(costs), {})
    with pytest.raises(ForeignArtefactError, match="damaged"):
        new().load_state_dict(changed(state, at, edited))


def test_an_epoch_chosen_in_the_middle_of_an_endless_stream_is_the_next_one() -> None:
    stream = make(cyclic=True)
    whole = len(ids(make()))
    packs = iter(stream)
    next(packs)
    stream.set_epoch(5)
    for _ in range(whole - 1):
        next(packs)
    other = make()
    other.set_epoch(5)
    assert ids(next(packs) for _ in range(5)) == ids(other)[:5]


def test_weights_that_differ_by_millions_are_kept() -> None:
    mixed = WeightedSources(
        {"a": [0] * 8, "b": [1] * 8}, {"a": 7e-7, "b": np.float32(2**-22)}, stopping="all"
    )
    taken = list(mixed)
    assert taken.count(0) > 2 * taken.count(1) - 2 and 1 in taken
    for source in (None, "abc", {"a": 1}, 7):
        with pytest.raises(InputError, match="gives no samples"):
            WeightedSources({"a": source})
    with pytest.raises(InputError, match="expected samples"):
        list(WeightedSources({"a": lambda: None}))
    with pytest.raises(InputError, match="weights are for 1, sources are a"):
        WeightedSources({"a": [1]}, {1: 1})  # type: ignore[dict-item]


def test_equal_steps_take_no_damaged_state_and_stay_as_they_are() -> None:
    for ahead in ("x", 1.5, 0, True):
        with pytest.raises(InputError, match="ahead is"):
            EqualSteps([], ahead=ahead)  # type: ignore[arg-type]
    steps = EqualSteps(make())
    before = steps.state_dict()
    for change in ({"steps": "x"}, {"steps": True}, {"ended": 1}, {"packs": {"x": 1}}, {"packs": None}):
        with pytest.raises(ForeignArtefactError):
            steps.load_state_dict({**before, **change})
        assert steps.state_dict() == before


def test_equal_steps_behind_the_end_begin_the_next_pass() -> None:
    """The packs they had taken of the old epoch must not be missing from the new one."""
    ended = EqualSteps(make())
    first = ids(ended)
    state = json.loads(json.dumps(ended.state_dict()))
    stream = make()
    steps = EqualSteps(stream)
    steps.load_state_dict(state)
    assert ids(steps) == first
    steps.load_state_dict(state)
    stream.set_epoch(1)
    second = ids(steps)
    assert second != first and sorted(flat(second)) == list(range(100))


def encode(sample: Any) -> Any:
    return sample


def test_encoders_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"function cannot be sent to a worker.*set encode_workers=0"):
        list(StreamingPackedDataset(rows(), lambda sample: sample, pack_length=20, encode_workers=1))
    with monkeypatch.context() as daemon:
        daemon.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
        with pytest.raises(InputError, match="in a worker of a loader, which cannot start processes"):
            list(StreamingPackedDataset(rows(), encode, pack_length=20, encode_workers=1))


def test_a_state_of_one_reader_is_not_given_to_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was resumed in the main process, and then read by a loader: both would give its part."""
    stream = make()
    next(iter(stream))
    again = make()
    again.load_state_dict(stream.state_dict())

    class Info:
        num_workers, id = 2, 0

    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", Info)
    with pytest.raises(InputError, match="has 1 split, which 1 rank × 2 workers cannot share"):
        list(again)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 calls it
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loader_resumes_at_the_end_of_an_epoch(workers: int, persistent: bool) -> None:
    """A worker that ended before the others has nothing left; the next epoch is the one that was chosen."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    uneven = rows([15, 2] * 20)  # the first of two workers has four times the packs

    def new() -> tuple[StreamingPackedDataset, Any]:
        data = make(lambda: iter(uneven))
        return data, torchdata.StatefulDataLoader(
            data, batch_size=None, num_workers=workers, persistent_workers=persistent
        )

    data, loader = new()
    first = ids(loader)
    data.set_epoch(1)
    second = ids(loader)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(40)) and first != second
    for left in (2, 1, 0):
        data, loader = new()
        packs = iter(loader)
        begun = ids(next(packs) for _ in range(len(first) - left))
        if not left:
            assert next(packs, None) is None
        state = json.loads(json.dumps(loader.state_dict()))
        data, loader = new()
        loader.load_state_dict(state)
        if left:
            data.set_epoch(0)
            assert begun + ids(loader) == first
        data.set_epoch(1)
        assert ids(loader) == second


@pytest.mark.parametrize(("bad", "said"), [(1, None), (2, "2 of 8. records"), (50, "2 of 4 records")])
def test_keys_that_are_not_read_stop_a_stream(bad: int, said: str | None, tmp_path: Path) -> None:
    """A key that changes training is in the ledger; more than 1 % of the records with one stop the stream."""

    def encode_(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["bad"]:
            raise SampleError("unread_key", "the key 'token_mask' holds a mask and is not read")
        return {name: sample[name] for name in ("input_ids", "labels")}

    step = 100 // bad
    source = [{**row, "bad": i % step == step // 2 + step // 4} for i, row in enumerate(rows())]
    ledger = tmp_path / "left_out.jsonl"
    stream = make(source, template=encode_, on_error="skip", ledger_file=ledger)
    if said is None:
        assert len(flat(ids(list(stream)))) == 99 and "unread_key" in ledger.read_text()
        return
    with pytest.raises(InputError, match="token_mask") as error:
        list(stream)
    assert "ignore_keys" in str(error.value.hint) and error.value.exit_code == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_keys_that_a_source_does_not_read_are_told_by_a_stream(workers: int, caplog: Any) -> None:
    """After the first window, at tenfold of it, and where new ones came at the end; `peek` tells nothing."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    records = [{"messages": turns, "mood": "m"} for _ in range(120)]
    source = ChatSource([*records, {"messages": turns, "hue": "h"}])
    stream = make(source, template=_three, window=10, encode_workers=workers)
    stream.peek(2)
    assert "keys of" not in caplog.text
    assert len(flat(ids(list(stream)))) == 121
    told = [record.getMessage() for record in caplog.records if "keys of" in record.getMessage()]
    assert [text.split(", not read")[0] for text in told] == [
        "keys of the first 10 samples",
        "keys of the first 100 samples",
        "keys of the first 121 samples",
    ] or workers, told
    assert told[-1] == "keys of the first 121 samples, not read: mood (120), hue (1)"


def _three(sample: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}


class Skipping:
    """ms-swift's way: a template gives None or nothing for what it skips, or raises."""

    def encode(self, sample: dict[str, Any]) -> Any:
        n = len(sample["input_ids"])
        if n == 3:
            return None
        if n == 4:
            return {}
        if n == 5:
            raise ValueError("no image")
        return sample


@pytest.mark.spec(
    "001",
    "an encode that gives None or nothing, or raises, is skipped, counted, in the ledger",
    key="`data.on_error: skip`",
    api="`StreamingPackedDataset(on_error=)`",
)
@pytest.mark.parametrize("workers", [0, 2])
def test_encodes_that_give_nothing_or_raise_are_skipped_and_counted(workers: int, tmp_path: Path) -> None:
    lengths = [6, 3, 7, 4, 2, 5, 8, 3]
    ledger = tmp_path / "left_out.jsonl"
    options: dict[str, Any] = {"pack_length": 10, "encode_workers": workers, "ledger_file": ledger}
    stream = StreamingPackedDataset(rows(lengths), Skipping(), on_error="skip", **options)
    assert sorted(flat(ids(stream))) == [0, 2, 4, 6]
    assert stream.left_out == {"empty": 3, "encode_failed": 1}
    written = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [(row["sample_id"], row["reason"]) for row in written] == [
        (1, "empty"), (3, "empty"), (5, "encode_failed"), (7, "empty"),
    ]  # fmt: skip
    assert "ValueError: no image" in written[2]["detail"]
    with pytest.raises(SampleError, match="sample 1: it was encoded to nothing"):
        list(StreamingPackedDataset(rows(lengths), Skipping(), pack_length=10))
    with pytest.raises(InputError, match="sample 5 cannot be encoded: ValueError: no image"):
        list(StreamingPackedDataset([*rows([2] * 5), *rows([5])], Skipping(), pack_length=10))


@pytest.mark.spec(
    "001",
    "a limit of what is skipped",
    key="`data.max_skip_fraction`",
    api="`StreamingPackedDataset(max_skip_fraction=)`",
)
def test_a_limit_of_what_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stream(lengths: list[int], limit: float) -> StreamingPackedDataset:
        return StreamingPackedDataset(
            rows(lengths), Skipping(), pack_length=10, on_error="skip", max_skip_fraction=limit,
            ledger_file=tmp_path / "left_out.jsonl",
        )  # fmt: skip

    assert len(flat(ids(stream([6] * 9 + [3], 0.1)))) == 9
    with pytest.raises(InputError, match=r"2 of 10 samples were left out, more than max_skip_fraction 0\.1"):
        list(stream([6] * 8 + [3, 4], 0.1))
    with pytest.raises(InputError, match=r"21 of .* left out"):  # before the end of a long source
        next(iter(stream([3] * 30 + [6] * 5000, 0.2)))
    given = {"pack_length": 20, "ledger_file": tmp_path / "l"}
    with pytest.raises(InputError, match="max_skip_fraction"):
        StreamingPackedDataset(rows(), on_error="skip", max_skip_fraction=1.0, **given)
    caplog.clear()
    StreamingPackedDataset(rows(), max_skip_fraction=0.1, **given)
    assert caplog.messages == ["max_skip_fraction has no effect with on_error 'raise'"]


def test_a_stream_that_is_open_ends_with_the_interpreter_without_a_word() -> None:
    """Its pass is let go when names of modules are gone already."""
    code = (
        "from packtrain.data import StreamingPackedDataset\n"
        "stream = StreamingPackedDataset([{'input_ids': [1] * 5}] * 500, pack_length=20, window=10)\n"
        "packs = iter(stream)\n"
        "print(len(next(packs)))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("4\n", "")
