"""The producer: facts, the ledger, restarts, crash law, bad input."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
from pathlib import Path
from typing import Any

import kills
import numpy as np
import pytest
import words_in
from words_in import lengths_of, producer, put

from packtrain import files
from packtrain.cli._show import stream_figures
from packtrain.cli.produce import ShardOpener
from packtrain.data import EncodeCache, LazyShardedDataset
from packtrain.errors import (
    ConfigError,
    ForeignArtefactError,
    FormatError,
    InputError,
    SampleError,
    SourceError,
)
from packtrain.export import PackingProducer, chunks
from packtrain.pipeline.inputs import Inputs
from packtrain.planning.spec import PlanSpec
from packtrain.sources.encoded import EncodedTemplate
from packtrain.sources.encoded import open_source as open_rows
from packtrain.store.chunks import DEFAULT_MEDIA, ChunkReader
from packtrain.testing import crash_points, snapshot
from packtrain.waiting.claim import Claim

CLAIMS = ("beat.json", *(f"claim.{number:06d}" for number in range(1, 9)))


def packs_of(output: Path) -> list[list[int]]:
    return [
        reader.sample_ids(row)
        for path in sorted(output.glob("chunk_*.arrow"))
        for reader in [ChunkReader(path)]
        for row in range(len(reader))
    ]


def read_all(output: Path, world: int = 1) -> list[int]:
    return [
        one
        for rank in range(world)
        for pack in LazyShardedDataset(output, rank, world, start="beginning", timeout_s=5)
        for one in pack["sample_ids"]
    ]


def ledger_of(output: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(output.glob("chunk_*.json")):
        rows += files.read_json(path)["meta"]["ledger"]
    return rows + files.read_json(output / "END")["ledger"]


def test_facts(tmp_path: Path) -> None:
    """[30,70,30,20,30] at 100 -> 2 packs, 180 tokens; 150 is long; two of 100 stand alone."""
    put(tmp_path / "in", "a.jsonl", [30, 70, 30, 20, 30])
    stats = producer(tmp_path / "in", tmp_path / "out").run()
    assert (stats.packs, stats.tokens, stats.packed, stats.chunks) == (2, 180, 5, 1)
    assert stats.efficiency == 0.9 and stats.samples_per_pack == 2.5
    put(tmp_path / "in2", "a.jsonl", [150, 100, 100])
    stats = producer(tmp_path / "in2", tmp_path / "single").run()
    assert (stats.packs, stats.dropped, stats.waiting) == (3, {}, 0)
    assert stats.efficiency == stream_figures(tmp_path / "single")["efficiency"] == 1.0  # 350 of 350 slots
    stats = producer(tmp_path / "in2", tmp_path / "out2", long_samples="drop").run()
    assert (stats.packs, stats.dropped, stats.waiting) == (2, {"over_long": 1}, 0)
    assert [(row["id"], row["row"], row["reason"]) for row in ledger_of(tmp_path / "out2")] == [
        (0, 0, "over_long")
    ]


def test_one_default_an_option_and_a_folder_keeps_its_own(tmp_path: Path) -> None:
    """Plans, streams and producers agree; what was begun with the defaults of before goes on with them."""
    put(tmp_path / "in", "a.jsonl", [150, 100, 60])
    made = producer(tmp_path / "in", tmp_path / "new")
    assert made.spec.long_samples == PlanSpec(pack_length=100).long_samples == "single"
    assert made.media == DEFAULT_MEDIA == chunks.OPTIONS["media"]
    assert inspect.signature(EncodeCache).parameters["media"].default == DEFAULT_MEDIA
    old = {"long_samples": "drop", "media": "tensor"}
    producer(tmp_path / "in", tmp_path / "old", **old).run(end=False)
    put(tmp_path / "in", "b.jsonl", [170, 90], first=3)
    stats = producer(tmp_path / "in", tmp_path / "old").run()
    assert (stats.packed, stats.dropped) == (3, {"over_long": 2})
    assert {files.read_json(path)["media"] for path in (tmp_path / "old").glob("chunk_*.json")} == {"tensor"}
    with pytest.raises(ForeignArtefactError, match="long_samples 'drop', not 'single'"):
        producer(tmp_path / "in", tmp_path / "old", long_samples="single").run()


@pytest.mark.spec(
    "002",
    "offline tokenisation and packing; every sample once",
    key="`packtrain produce`",
    api="`PackingProducer`",
)
def test_all_samples_once_whatever_the_windows(tmp_path: Path) -> None:
    for number in range(3):
        put(tmp_path / "in", f"p{number}.jsonl", lengths_of(50, 50 * number), 50 * number)
    for window in (7, 50, 1000):
        out = tmp_path / f"out{window}"
        stats = producer(tmp_path / "in", out, window=window).run()
        assert stats.read == stats.packed == 150 and stats.shards == 3
        assert sorted(one for pack in packs_of(out) for one in pack) == list(range(150))
        assert all(len(ChunkReader(path)) == 4 for path in sorted(out.glob("chunk_*.arrow"))[:-1])
        for path in out.glob("chunk_*.arrow"):
            reader = ChunkReader(path)
            assert all(int(reader.lengths(row).sum()) <= 100 for row in range(len(reader)))


@pytest.mark.spec("002", "deterministic packs", key="`packtrain produce`", api="`PackingProducer`")
def test_listing_order_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (10, 9, 2, 1):
        put(tmp_path / "in", f"p{number}.jsonl", lengths_of(20, number))
    producer(tmp_path / "in", tmp_path / "a").run()
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: sorted(listed(folder), reverse=True))
    producer(tmp_path / "in", tmp_path / "b").run()
    assert snapshot(tmp_path / "a", CLAIMS) == snapshot(tmp_path / "b", CLAIMS)
    assert [shard.name for shard in shards(tmp_path)] == ["p1.jsonl", "p2.jsonl", "p9.jsonl", "p10.jsonl"]


def shards(root: Path) -> list[Any]:
    made = producer(root / "in", root / "a")
    made._journal.load()
    return made._journal.shards


class Unclaimed:
    """No claim: a process that was stopped cannot free one, and this process is not dead."""

    @classmethod
    def take(cls, *args: Any, **options: Any) -> Unclaimed:
        return cls()

    def say(self, *args: Any) -> None: ...

    def confirm(self) -> None: ...

    def __enter__(self) -> Unclaimed:
        return self

    def __exit__(self, *args: Any) -> None: ...


def test_crash_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 10: stopped after any write, sync, rename or removal, the same command gives the same bytes."""
    put(tmp_path / "in", "a.jsonl", lengths_of(14))
    put(tmp_path / "in", "b.jsonl", [150, *lengths_of(9, 14)], 14)

    def check(folder: Path) -> None:
        for manifest in folder.glob("chunk_*.json"):
            ChunkReader(manifest.with_suffix(".arrow")).verify()

    def verb(folder: Path) -> None:
        producer(tmp_path / "in", folder, window=8, packs_per_chunk=3).run()

    monkeypatch.setattr("packtrain.export.producer.Claim", Unclaimed)
    steps = crash_points(verb, tmp_path / "scratch", check=check, ignore=CLAIMS, every=1)
    assert steps >= 80


def test_encoding_faults_go_to_the_ledger(tmp_path: Path) -> None:
    """A sample that fails only when it is encoded leaves its pack; chunks keep their size."""

    class Fails(EncodedTemplate):
        def encode(self, sample: Any) -> Any:
            if len(sample["input_ids"]) == 39:
                raise SampleError("truncated_media", "cut off")
            if len(sample["input_ids"]) == 76:
                raise RuntimeError("a decoder's own error")
            return super().encode(sample)

    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    made = PackingProducer(
        tmp_path / "in",
        tmp_path / "out",
        Fails(),
        pack_length=100,
        packs_per_chunk=3,
        window=20,
        kind="encoded",
    )
    stats = made.run()
    bad = [number for number, length in enumerate(lengths_of(60)) if length in (39, 76)]
    assert set(stats.dropped) == {"truncated_media", "encode_failed"}
    assert sum(stats.dropped.values()) == len(bad)
    assert stats.read == stats.packed + len(bad)
    assert sorted(row["id"] for row in ledger_of(tmp_path / "out")) == bad
    assert sorted(one for pack in packs_of(tmp_path / "out") for one in pack) == [
        number for number in range(60) if number not in bad
    ]
    assert all(len(ChunkReader(path)) == 3 for path in sorted((tmp_path / "out").glob("*.arrow"))[:-1])
    assert made.where(5) == "a.jsonl:6"


def test_workers_make_the_same_bytes(tmp_path: Path) -> None:
    """Two processes or none, and one that dies is named; the run after it goes on."""
    put(tmp_path / "in", "a.jsonl", lengths_of(50))
    put(tmp_path / "in", "b.jsonl", lengths_of(30, 50), 50)
    producer(tmp_path / "in", tmp_path / "one", packs_per_chunk=7).run()
    template = words_in.Dies(tmp_path / "once")
    options: dict[str, Any] = {"pack_length": 100, "packs_per_chunk": 7, "window": 40, "kind": "encoded"}
    with pytest.raises(InputError, match=r"a worker died on the pack of samples \[.*\(exit code 9\)"):
        PackingProducer(tmp_path / "in", tmp_path / "two", template, workers=2, **options).run()
    stats = PackingProducer(tmp_path / "in", tmp_path / "two", template, workers=2, **options).run()
    assert stats.packed == 80
    assert snapshot(tmp_path / "one", CLAIMS) == snapshot(tmp_path / "two", CLAIMS)
    local: dict[str, Any] = {"open_shard": lambda path: open_rows(path), "workers": 2}
    with pytest.raises(InputError, match="function cannot be sent to a worker process"):
        producer(tmp_path / "in", tmp_path / "three", **local).run()


def test_duplicate_faulty_and_rewritten_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "in", "a.jsonl", lengths_of(30))
    shutil.copy(tmp_path / "in" / "a.jsonl", tmp_path / "in" / "a-again.jsonl")
    (tmp_path / "in" / "torn.tar").write_bytes(b"\x00garbage" * 9)
    with pytest.raises(RuntimeError, match="halt"):
        halted(producer(tmp_path / "in", tmp_path / "out", window=10), after=2).run()
    put(tmp_path / "in", "a-again.jsonl", lengths_of(31))
    with pytest.raises(SourceError, match=r"a-again\.jsonl was written again after it was read: 30"):
        producer(tmp_path / "in", tmp_path / "out", window=10).run()
    shutil.copy(tmp_path / "in" / "a.jsonl", tmp_path / "in" / "a-again.jsonl")
    stats = producer(tmp_path / "in", tmp_path / "out", window=10).run()
    assert (stats.read, stats.packed, stats.duplicates, stats.faulty) == (30, 30, 1, 1)
    assert (
        "a.jsonl has the bytes of a-again.jsonl" in caplog.text and "torn.tar cannot be read" in caplog.text
    )


def halted(made: PackingProducer, after: int) -> PackingProducer:
    """A producer that fails before it writes chunk `after`."""
    commit = made._commit

    def stop(writer: Any, number: int) -> None:
        if number == after:
            writer.discard()
            raise RuntimeError("halt")
        commit(writer, number)

    made._commit = stop  # type: ignore[method-assign]
    return made


def test_a_shard_that_changes_while_it_is_read(tmp_path: Path) -> None:
    """Nothing that was read from other bytes is published."""

    class Meddles(EncodedTemplate):
        def encode(self, sample: Any) -> Any:
            put(tmp_path / "in", "a.jsonl", lengths_of(60), 7)  # as long, other tokens
            return super().encode(sample)

    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    made = PackingProducer(tmp_path / "in", tmp_path / "out", Meddles(), pack_length=100, kind="encoded")
    with pytest.raises(SourceError, match=r"a\.jsonl (was written again|changed after)"):
        made.run()
    assert not list((tmp_path / "out").glob("chunk_*"))


def test_a_restart_hashes_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    with pytest.raises(RuntimeError):
        halted(producer(tmp_path / "in", tmp_path / "out", window=10), after=2).run()
    monkeypatch.setattr("packtrain.export._journal.content_digest", lambda path: pytest.fail("hashed again"))
    producer(tmp_path / "in", tmp_path / "out", window=10).run()
    reader = LazyShardedDataset(tmp_path / "out")
    assert [reader.where(one) for one in (0, 59)] == [("a.jsonl", 0), ("a.jsonl", 59)]
    with pytest.raises(InputError, match="no sample 60"):
        reader.where(60)


def test_crash_while_cleaning_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removal stopped anywhere is finished by the next run; what is not acknowledged stays."""
    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    monkeypatch.setattr("packtrain.export.producer.Claim", Unclaimed)

    def prepare(folder: Path) -> None:
        with pytest.raises(RuntimeError):
            halted(producer(tmp_path / "in", folder, window=10), after=6).run()
        reader = LazyShardedDataset(folder, start="beginning", timeout_s=1)
        for _, _ in zip(range(14), reader, strict=False):
            pass
        assert reader.acknowledge() == [0, 1, 2]

    def verb(folder: Path) -> None:
        producer(tmp_path / "in", folder, window=10, keep_completed=1).run()

    def check(folder: Path) -> None:
        assert all((folder / f"chunk_{number:08d}.json").exists() for number in (2, 3, 4, 5))

    assert crash_points(verb, tmp_path / "scratch", prepare=prepare, check=check, ignore=CLAIMS, every=5) > 20
    out = tmp_path / "scratch" / "out"
    assert sorted(int(path.name[6:14]) for path in out.glob("chunk_*.arrow"))[:2] == [2, 3]
    rest = list(LazyShardedDataset(out, timeout_s=1))
    assert rest[0].slot == 14 and len(rest) == sum(files.read_json(out / "index.json")["packs"]) - 14


def test_a_raw_shard_that_is_gone(tmp_path: Path) -> None:
    path = put(tmp_path / "in", "a.jsonl", lengths_of(60))
    put(tmp_path / "in", "b.jsonl", lengths_of(20, 60), 60)
    with pytest.raises(RuntimeError):
        halted(producer(tmp_path / "in", tmp_path / "out", window=10), after=1).run()
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.jsonl is gone"):
        producer(tmp_path / "in", tmp_path / "out", window=10).run()


def test_options_and_folders_that_do_not_fit(tmp_path: Path) -> None:
    put(tmp_path / "in", "a.jsonl", lengths_of(30))
    producer(tmp_path / "in", tmp_path / "out").run()
    with pytest.raises(ForeignArtefactError, match="pack_length 100, not 200"):
        producer(tmp_path / "in", tmp_path / "out", pack_length=200).run()
    put(tmp_path / "in", "b.jsonl", lengths_of(3))
    with pytest.raises(InputError, match=r"has ended, and b\.jsonl"):
        producer(tmp_path / "in", tmp_path / "out").run()
    with pytest.raises(SourceError, match="holds no raw shard"):
        (tmp_path / "empty").mkdir()
        producer(tmp_path / "empty", tmp_path / "out2").run()
    with pytest.raises(SourceError, match="does not exist"):
        producer(tmp_path / "absent", tmp_path / "out3").run()
    with (
        Claim.take(tmp_path / "out4" / "producer", threaded=False),
        pytest.raises(InputError, match="is being written by another run"),
    ):
        producer(tmp_path / "in", tmp_path / "out4").run()


@pytest.mark.parametrize("end", [True, False])
def test_a_refused_start_changes_nothing(tmp_path: Path, end: bool) -> None:
    """Of a stream that a run has made, ended or stopped: the claim too says what that run said."""
    put(tmp_path / "in", "a.jsonl", lengths_of(30))
    out = tmp_path / "out"
    producer(tmp_path / "in", out).run(end=end)
    before = snapshot(out)
    put(tmp_path / "in2", "b.jsonl", lengths_of(9))
    refused = [(tmp_path / "in", {"pack_length": 200}), (tmp_path / "in2", {"max_samples": 3})]
    for folder, options in [*refused, *([(tmp_path / "in2", {})] if end else [])]:
        with pytest.raises((ForeignArtefactError, InputError)):
            producer(folder, out, **options).run()
        assert snapshot(out) == before


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full at each write in turn: the file is named, and the next run goes on."""
    put(tmp_path / "in", "a.jsonl", lengths_of(40))
    monkeypatch.setattr("packtrain.export.producer.Claim", Unclaimed)
    out = tmp_path / "out"
    fsync, left = os.fsync, 3

    def full(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    failures = 0
    for room in range(3, 60, 7):
        left = room
        monkeypatch.setattr(os, "fsync", full)
        try:
            producer(tmp_path / "in", out, window=10).run()
        except OSError as error:
            assert error.errno == errno.ENOSPC
            failures += 1
        monkeypatch.setattr(os, "fsync", fsync)
        assert not list(out.glob(".chunk*"))
    stats = producer(tmp_path / "in", out, window=10).run()
    assert failures > 2 and stats.packed == 40 and sorted(read_all(out)) == list(range(40))


def test_torn_newest_chunk_is_made_again(tmp_path: Path) -> None:
    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    with pytest.raises(RuntimeError):
        halted(producer(tmp_path / "in", tmp_path / "out", window=10), after=4).run()
    out = tmp_path / "out"
    whole = (out / "chunk_00000003.arrow").read_bytes()
    (out / "chunk_00000003.arrow").write_bytes(whole[:100])
    producer(tmp_path / "in", out, window=10).run()
    assert (out / "chunk_00000003.arrow").read_bytes() == whole
    assert sorted(read_all(out, 3)) == list(range(60))
    for path in sorted(out.glob("chunk_*.arrow"))[2:]:
        path.write_bytes(b"")
    (out / "END").unlink()
    with pytest.raises(FormatError, match="cannot go on behind chunk 1"):
        producer(tmp_path / "in", out, window=10).run()


@pytest.mark.spec(
    "002",
    "the producer keeps a bounded lead; used chunks are removed",
    key="`produce --max-ahead --keep-completed`",
    api="`PackingProducer(max_ahead=, keep_completed=)`",
)
def test_back_pressure_and_clean_up(tmp_path: Path) -> None:
    """The producer waits for its reader, and removes only what the reader has acknowledged."""
    put(tmp_path / "in", "a.jsonl", lengths_of(200))
    out = tmp_path / "out"
    reader = LazyShardedDataset(out, timeout_s=5)
    seen: list[int] = []
    most = 0

    class Turn:
        """Each time the producer waits, the reader trains on one chunk and saves a checkpoint."""

        def __init__(self) -> None:
            self.time = 0.0
            self.packs = iter(reader)

        def now(self) -> float:
            return self.time

        def sleep(self, seconds: float) -> None:
            nonlocal most
            self.time += seconds
            most = max(most, len(list(out.glob("chunk_*.arrow"))))
            for _ in range(4):
                seen.extend(next(self.packs)["sample_ids"])
            reader.acknowledge()

    made = producer(tmp_path / "in", out, window=20, max_ahead=3, keep_completed=1, clock=Turn())
    stats = made.run()
    seen += [one for pack in made._clock.packs for one in pack["sample_ids"]]  # type: ignore[attr-defined]
    assert sorted(seen) == list(range(200)) and stats.packed == 200
    assert most <= 6 and len(list(out.glob("chunk_*.arrow"))) < stats.chunks // 2
    with pytest.raises(FormatError, match="was removed: it had been acknowledged"):
        list(LazyShardedDataset(out, start="beginning", timeout_s=5))
    assert list(LazyShardedDataset(out, timeout_s=5)) != []


def test_completeness(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """rename, marker, stable: a shard that is still being written is not read."""

    class Clock:
        time = 0.0

        def now(self) -> float:
            return self.time

        def sleep(self, seconds: float) -> None:
            self.time += seconds
            if growing.exists() and self.time < 8:
                with open(growing, "a", encoding="utf-8") as handle:
                    handle.write(json.dumps({"input_ids": [1, 2], "labels": [1, 2]}) + "\n")
                os.utime(growing, ns=(0, int(self.time)))  # a clock that stands still elsewhere

    growing = tmp_path / "in" / "b.jsonl"
    put(tmp_path / "in", "a.jsonl", [5, 6])
    put(tmp_path / "in", "b.jsonl", [7])
    put(tmp_path / "in", "c.jsonl.tmp", [9])
    put(tmp_path / "in", ".hidden.jsonl", [9])
    stats = producer(tmp_path / "in", tmp_path / "s", ready="stable", stable_s=4, clock=Clock()).run()
    assert stats.read == 2 + 1 + 7
    (tmp_path / "in" / "a.jsonl.done").touch()
    made = producer(tmp_path / "in", tmp_path / "m", ready="marker")
    assert made._raw.complete() == ["a.jsonl"] and made._raw.visible() == ["a.jsonl", "b.jsonl"]
    assert made.run().read == 2 and "b.jsonl has no marker b.jsonl.done" in caplog.text
    with pytest.raises(InputError, match="ready"):
        producer(tmp_path / "in", tmp_path / "x", ready="perhaps")


def test_a_chunk_is_full_by_size_too(tmp_path: Path) -> None:
    """Large media close a chunk before it has its packs; readers take chunks of any number."""

    class Large(EncodedTemplate):
        def encode(self, sample: Any) -> Any:
            return {**super().encode(sample), "feature": np.arange(50_000, dtype=np.float32).reshape(2, -1)}

    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    stats = PackingProducer(
        tmp_path / "in", tmp_path / "out", Large(), pack_length=100, chunk_mb=1, window=20, kind="encoded"
    ).run()
    counts = [len(ChunkReader(path)) for path in sorted((tmp_path / "out").glob("*.arrow"))]
    assert sum(counts) == stats.packs and len(set(counts)) > 1 and max(counts) < 8
    assert sorted(read_all(tmp_path / "out", 3)) == list(range(60))


@pytest.mark.spec(
    "002", "data that arrives over time", key="`produce --watch`", api="`PackingProducer.run(watch=True)`"
)
def test_watching_until_the_end_marker(tmp_path: Path) -> None:
    out = tmp_path / "out"

    class Clock:
        time = 0.0

        def now(self) -> float:
            return self.time

        def sleep(self, seconds: float) -> None:
            self.time += seconds
            number = int(self.time)
            if number % 5 == 0 and number <= 30:
                put(tmp_path / "in", f"p{number}.jsonl", lengths_of(11, number), number)
            if number == 40:
                (tmp_path / "in" / "END").touch()

    (tmp_path / "in").mkdir()
    stats = producer(tmp_path / "in", out, packs_per_chunk=2, flush_s=3, clock=Clock()).run(watch=True)
    assert stats.shards == 6 and stats.packed == stats.read == 66
    assert sorted(read_all(out, 2)) == list(range(66))


def test_weights_and_channels_travel(tmp_path: Path) -> None:
    rows = [
        {
            "input_ids": [1, 2, 3],
            "labels": [1, 2, 3],
            "weight": 0.5,
            "channel": "chat",
            "loss_scale": [0, 1, 2],
        },
        {"input_ids": [4, 5], "labels": [4, 5], "weight": 2, "channel": "maths", "loss_scale": [1, 1]},
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_command = ShardOpener(Inputs(source="", processor="", kind="encoded"))
    for name, more in (
        ("api", {}),
        ("command", {"open_shard": of_command}),
        ("processes", {"open_shard": of_command, "workers": 2}),
    ):
        made = producer(tmp_path / "in", tmp_path / name, **more)
        assert made.run().keys == {}  # what travels is read
        (pack,) = LazyShardedDataset(tmp_path / name)
        assert pack["weight"] == [0.5, 2] and pack["channel"] == ["chat", "maths"]
        assert pack["loss_scale"].tolist() == [0, 1, 2, 1, 1]
    ignoring = ShardOpener(
        Inputs(source="", processor="", kind="encoded", ignore_keys=("weight", "loss_scale"))
    )
    producer(tmp_path / "in", tmp_path / "less", open_shard=ignoring).run()
    (pack,) = LazyShardedDataset(tmp_path / "less")
    assert pack["channel"] == ["chat", "maths"]
    assert all(not {"weight", "loss_scale"} & set(sample) for sample in pack)


def test_real_kills(tmp_path: Path) -> None:
    """Producer and reader, killed at random: every sample is used exactly once. (100 kills: make bench.)"""
    assert kills.run(tmp_path / "killed", 5, seed=3)["kills"] == 5


class Halt(Exception):
    """Stops a producer behind a chunk."""


def stopped(tmp_path: Path, behind: int = 6) -> tuple[Path, Path]:
    """A producer of 60 samples that was stopped behind a chunk: (input, output)."""
    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    one = producer(tmp_path / "in", tmp_path / "out", window=10, packs_per_chunk=2)
    commit = one._commit

    def then_stop(writer: Any, number: int) -> None:
        commit(writer, number)
        if number == behind:
            raise Halt

    one._commit = then_stop  # type: ignore[method-assign]
    with pytest.raises(Halt):
        one.run()
    return tmp_path / "in", tmp_path / "out"


@pytest.mark.parametrize("torn", [None, b"", b"{", b"[]"])
def test_a_lost_stream_marker_is_made_again(tmp_path: Path, torn: bytes | None) -> None:
    """The same options and bytes give the id that the chunks have; nothing of the index is lost."""
    raw, out = stopped(tmp_path)
    held = (out / "stream.json").read_bytes()
    (out / "stream.json").unlink()
    if torn is not None:
        (out / "stream.json").write_bytes(torn)
    with pytest.raises(ForeignArtefactError, match="not made with these options"):
        producer(raw, out, window=12, packs_per_chunk=2).run()
    producer(raw, out, window=10, packs_per_chunk=2).run()
    assert (out / "stream.json").read_bytes() == held
    assert sorted(read_all(out, 2)) == list(range(60))


@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b"{}"])
def test_a_torn_end_is_made_again(tmp_path: Path, torn: bytes) -> None:
    raw, out = stopped(tmp_path)
    producer(raw, out, window=10, packs_per_chunk=2).run()
    held = files.read_json(out / "END")
    (out / "END").write_bytes(torn)
    producer(raw, out, window=10, packs_per_chunk=2).run()
    assert files.read_json(out / "END") == held


@pytest.mark.parametrize("name", ["chunk_00000002.json", "chunk_00000002.arrow"])
def test_a_chunk_in_the_middle_that_is_damaged_stops_the_producer(tmp_path: Path, name: str) -> None:
    """Its packs are unknown: an index without them would move all slots behind it."""
    raw, out = stopped(tmp_path)
    whole = (out / name).read_bytes()
    (out / name).write_bytes(b"{")
    with pytest.raises(FormatError, match=r"chunk_00000002.*though later chunks are there"):
        producer(raw, out, window=10, packs_per_chunk=2).run()
    assert not (out / "END").exists() and not (out / "index.json").exists()
    (out / name).write_bytes(whole)
    producer(raw, out, window=10, packs_per_chunk=2).run()
    assert sorted(read_all(out, 2)) == list(range(60))


def test_a_journal_that_lacks_a_shard_or_holds_strangers(tmp_path: Path) -> None:
    put(tmp_path / "in", "b.jsonl", lengths_of(9), first=100)
    raw, out = stopped(tmp_path)
    (out / "journal" / "state_note.json").write_text("[]")
    (out / "journal" / "shard_00000000.json").rename(tmp_path / "kept")
    with pytest.raises(FormatError, match="lacks raw shard 0"):
        producer(raw, out, window=10, packs_per_chunk=2).run()
    (tmp_path / "kept").rename(out / "journal" / "shard_00000000.json")
    assert producer(raw, out, window=10, packs_per_chunk=2).run().packed == 69
    (out / "END").unlink()
    newest = max((out / "journal").glob("state_0*.json"))
    newest.write_text("[]")
    with pytest.raises(FormatError, match="the state behind it is gone"):
        producer(raw, out, window=10, packs_per_chunk=2).run()


def test_output_among_the_raw_shards_is_refused(tmp_path: Path) -> None:
    """Its manifests would be taken for raw shards, for ever."""
    put(tmp_path / "in", "a.jsonl", lengths_of(5))
    for output in (tmp_path / "in", tmp_path / "in" / "out", tmp_path / "out" / ".." / "in"):
        with pytest.raises(InputError, match="the input"):
            producer(tmp_path / "in", output)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("option", ["poll_s", "flush_s", "stable_s"])
def test_seconds_that_nobody_can_wait(tmp_path: Path, option: str) -> None:
    for value in (-1.0, float("nan")):
        with pytest.raises(InputError, match=option):
            producer(tmp_path / "in", tmp_path / "out", **{option: value})


def test_packs_may_wait_for_ever_for_their_windows(tmp_path: Path) -> None:
    put(tmp_path / "in", "a.jsonl", lengths_of(5))
    stats = producer(tmp_path / "in", tmp_path / "out", flush_s=float("inf")).run()
    assert stats.packed == stats.read


def test_a_wrong_option_is_no_fault_of_a_shard(tmp_path: Path) -> None:
    """No shard is put down as unreadable for it, and no END is written where none can be read."""
    put(tmp_path / "in", "a.jsonl", lengths_of(5))
    with pytest.raises(ConfigError, match="no option 'zz'"):
        producer(tmp_path / "in", tmp_path / "out", source_options={"zz": "1"}).run()
    assert producer(tmp_path / "in", tmp_path / "out").run().packed == 5
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(SourceError, match="none of the 1 raw shards"):
        producer(tmp_path / "bad", tmp_path / "out2", kind=None).run()
    assert not (tmp_path / "out2" / "END").exists()


def test_a_value_no_chunk_can_hold_is_named_by_its_record(tmp_path: Path) -> None:
    """The template's fault, so it stops."""

    class Odd(EncodedTemplate):
        def encode(self, sample: Any) -> Any:
            odd = {"note": float("nan")} if len(sample["input_ids"]) == 7 else {}
            return {**super().encode(sample), **odd}

    put(tmp_path / "in", "a.jsonl", [5, 6, 7])
    with pytest.raises(InputError, match=r"note is a float.*a\.jsonl:3"):
        PackingProducer(tmp_path / "in", tmp_path / "out", Odd(), pack_length=100, kind="encoded").run()
