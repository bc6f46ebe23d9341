"""What a producer refuses before anything of it can be read, and records that nobody can train with."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import words_in
from test_produce import Unclaimed, ledger_of, read_all
from words_in import lengths_of, producer, put, row

from packtrain.cli import main
from packtrain.data import LazyShardedDataset
from packtrain.errors import ForeignArtefactError, InputError, PlanError, SampleError, SourceError
from packtrain.export import PackingProducer
from packtrain.extend import Measured
from packtrain.sources.encoded import EncodedTemplate
from packtrain.testing import Stopped, crash_points, snapshot


def with_rows(folder: Path, rows: list[dict[str, Any]], name: str = "a.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def run(out: Path, template: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"pack_length": 100, "window": 40, "kind": "encoded", **options}
    return PackingProducer(out.parent / "in", out, template, **settings).run()


# --------------------------------------------------------------------------------------------
# one record
# --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "odd",
    [
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"weight": -1},
        {"weight": "heavy"},
        {"weight": [1.0]},
        {"weight": 10**400},
        {"channel": float("nan")},
        {"loss_scale": [1.0, float("nan"), 1.0]},
        {"loss_scale": [1.0, "x", 1.0]},
        {"loss_scale": [1.0, 1.0]},
        {"loss_scale": 2.0},
    ],
    ids=lambda odd: str(odd)[:24],
)
def test_a_record_nobody_can_train_with_goes_to_the_ledger(tmp_path: Path, odd: dict[str, Any]) -> None:
    """Alone: its neighbours are packed, and the ledger names it."""
    with_rows(tmp_path / "in", [row(3), {**row(3), **odd}, {**row(3), "weight": 0, "channel": "x"}])
    stats = producer(tmp_path / "in", tmp_path / "out").run()
    assert (stats.packed, stats.dropped, stats.waiting) == (2, {"malformed_record": 1}, 0)
    (left,) = ledger_of(tmp_path / "out")
    name, _ = next(iter(odd.items()))
    assert left["id"] == left["row"] == 1 and f"a.jsonl:2: {name} is" in left["detail"]
    (pack,) = LazyShardedDataset(tmp_path / "out")
    assert pack["sample_ids"] == [0, 2] and pack["weight"][1] == 0


@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(errno.EMFILE, "too many open files")])
def test_a_fault_of_the_machine_is_none_of_the_sample(tmp_path: Path, error: Exception) -> None:
    """Nothing goes to the ledger for want of memory: the next run takes it."""

    class Poor(EncodedTemplate):
        def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            raise error

    put(tmp_path / "in", "a.jsonl", [5, 6])
    with pytest.raises(type(error)):
        run(tmp_path / "out", Poor())
    assert run(tmp_path / "out", EncodedTemplate()).packed == 2


# --------------------------------------------------------------------------------------------
# limits
# --------------------------------------------------------------------------------------------
def test_a_limit_on_a_cost_that_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "in", "a.jsonl", [5, 6])
    with pytest.raises(PlanError, match=r"'supervized', the template measures: supervised.*did you mean"):
        producer(tmp_path / "in", tmp_path / "out", limits={"supervized": 9})
    for limit in ("imagse=2", "images=x", "images"):
        with pytest.raises(SystemExit) as caught:
            words = ["produce", tmp_path / "in", tmp_path / "out", "-n", 100, "--kind", "encoded"]
            main([*map(str, words), "--limit", limit])
        assert caught.value.code == 2 and limit.partition("=")[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert producer(tmp_path / "in", tmp_path / "out", limits={"supervised": 6}).run().packs == 2


def test_a_limit_of_a_template_that_does_not_say_what_it_measures(tmp_path: Path) -> None:
    """Its first window says it; costs that only some samples have are 0 for the others."""

    class Silent:
        config, encode = EncodedTemplate.config, EncodedTemplate.encode

        def measure(self, sample: Mapping[str, Any]) -> Measured:
            length = len(sample["input_ids"])
            return Measured(length, **({"images": 1} if length == 5 else {}))

    put(tmp_path / "in", "a.jsonl", [4, 5, 5])
    with pytest.raises(PlanError, match="'image', the template measures: images"):
        run(tmp_path / "out", Silent(), limits={"image": 1})
    assert run(tmp_path / "out", Silent(), limits={"images": 1}).packs == 2


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_the_costs_a_template_names_are_those_it_measures(tokenizer_folder: Path, truncation: str) -> None:
    from packtrain.template import HFTemplate, load_processor

    cap = None if truncation == "error" else 8
    template = HFTemplate(load_processor(str(tokenizer_folder)), truncation=truncation, max_length=cap)
    turn = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    sample = {"messages": [turn, {**turn, "role": "assistant"}]}
    assert sorted(template.measure(sample).costs) == list(template.cost_names)
    assert sorted(EncodedTemplate().measure({"input_ids": [1], "labels": [1]}).costs) == ["supervised"]


# --------------------------------------------------------------------------------------------
# all records fail
# --------------------------------------------------------------------------------------------
CHATS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 250


class Broken(EncodedTemplate):
    """Measures, and cannot encode."""

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        raise SampleError("unsupported_media", "no such tower")


def test_an_input_without_shards_leaves_nothing(tmp_path: Path) -> None:
    for folder, told in (("none", "none does not exist"), ("in", "in holds no raw shard")):
        with pytest.raises(SourceError, match=told):
            producer(tmp_path / folder, tmp_path / "out").run()
        assert not (tmp_path / "out").exists()
        (tmp_path / "in").mkdir(exist_ok=True)
    with_rows(tmp_path / "in", CHATS)
    with pytest.raises(SourceError, match="all 250 records failed"):
        producer(tmp_path / "in", tmp_path / "out", stop_after_failures=1000).run()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["producer"]  # tells who failed, and why


def test_a_wrong_kind_stops_before_anything_is_published(tmp_path: Path) -> None:
    """After the first records while it watches, or at the end of a short input; then the right one goes."""
    with_rows(tmp_path / "in", CHATS)
    out = tmp_path / "out"
    with pytest.raises(
        SourceError, match=r"the first 120 records all failed \(malformed_record 120\).*a\.jsonl"
    ):
        producer(tmp_path / "in", out).run(watch=True)
    with pytest.raises(SourceError, match=r"all 250 records failed \(malformed_record 250\)"):
        producer(tmp_path / "in", out, window=1000, stop_after_failures=1000).run()
    assert not {"END", "stream.json", "index.json"} & {path.name for path in out.iterdir()}
    with_rows(tmp_path / "in", [row(5)] * 250)
    assert producer(tmp_path / "in", out).run().packed == 250


def test_crash_of_a_wrong_command_then_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped anywhere, also while it takes back what it began, either command can be given again."""
    with_rows(tmp_path / "in", [{**row(5), "text": [1]}, {**row(6), "text": [2]}])
    with_rows(tmp_path / "in", [{**row(7), "text": [3, 4]}], "b.jsonl")
    monkeypatch.setattr("packtrain.export.producer.Claim", Unclaimed)
    wrong = {"source_options": {"columns": {"input_ids": "text"}}}

    def verb(folder: Path) -> None:
        with pytest.raises((SourceError, ForeignArtefactError)):
            producer(tmp_path / "in", folder, **wrong).run()
        producer(tmp_path / "in", folder).run()

    assert crash_points(verb, tmp_path / "scratch", every=1) > 30
    assert read_all(tmp_path / "scratch" / "out") == [0, 1, 2]


def test_going_on_anyway(tmp_path: Path) -> None:
    with_rows(tmp_path / "in", CHATS)
    stats = producer(tmp_path / "in", tmp_path / "out", stop_after_failures=0).run()
    assert (stats.read, stats.packs, stats.dropped) == (250, 0, {"malformed_record": 250})
    assert [one["id"] for one in ledger_of(tmp_path / "out")] == list(range(250))
    assert list(LazyShardedDataset(tmp_path / "out", timeout_s=1)) == []


def test_one_good_record_is_enough(tmp_path: Path) -> None:
    """Faults of many records are for the ledger where any is good, and all of several kinds until the end."""
    with_rows(tmp_path / "in", [row(5), *CHATS])
    stats = producer(tmp_path / "in", tmp_path / "out").run()
    assert (stats.packed, stats.dropped) == (1, {"malformed_record": 250})
    with_rows(tmp_path / "in2", [*CHATS, {"input_ids": []}, *CHATS])
    with pytest.raises(SourceError, match=r"all 501 records failed \(empty 1, malformed_record 500\)"):
        producer(tmp_path / "in2", tmp_path / "out2", stop_after_failures=251).run()


@pytest.mark.parametrize("count", [20, 160])
def test_a_template_that_encodes_nothing_stops(tmp_path: Path, count: int) -> None:
    """Measuring went well, so packs wait; none of them can be written."""
    put(tmp_path / "in", "a.jsonl", lengths_of(count))
    with pytest.raises(SourceError, match=r"unsupported_media.*no such tower"):
        run(tmp_path / "out", Broken(), window=40, packs_per_chunk=10)
    assert run(tmp_path / "out", EncodedTemplate()).packed == count


def test_samples_that_fail_are_encoded_once(tmp_path: Path) -> None:
    """Also where a chunk is not full without them: they leave the packs that wait."""
    seen: list[int] = []

    class Counting(EncodedTemplate):
        def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            if len(sample["input_ids"]) % 3 == 0:
                seen.append(int(sample["input_ids"][0]))
                raise SampleError("truncated_media", "cut off")
            return super().encode(sample)

    lengths = [12 + number % 4 for number in range(120)]
    put(tmp_path / "in", "a.jsonl", lengths)
    stats = run(tmp_path / "out", Counting(), window=20, packs_per_chunk=5, max_age=0)
    assert len(seen) == len(set(seen)) == stats.dropped["truncated_media"] == sum(n % 3 == 0 for n in lengths)
    assert stats.read == stats.packed + len(seen)


def test_unreadable_shards_stop_a_watching_producer(tmp_path: Path) -> None:
    """Ten of them, and none that can be read: the kind is wrong; the right one takes them all."""
    for number in range(10):
        put(tmp_path / "in", f"p{number}.jsonl", [5, 6], 10 * number)
    with pytest.raises(SourceError, match="none of the 10 raw shards"):
        producer(tmp_path / "in", tmp_path / "out", kind="parquet").run(watch=True)
    assert producer(tmp_path / "in", tmp_path / "out").run().packed == 20


def test_crash_while_a_beginning_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at any removal, the right command goes on; the folder is that of a fresh run."""
    with_rows(tmp_path / "in", [row(5)] * 30)
    put(tmp_path / "in", "b.jsonl", lengths_of(5))
    monkeypatch.setattr("packtrain.export.producer.Claim", Unclaimed)
    producer(tmp_path / "in", tmp_path / "fresh").run()

    def prepare(folder: Path) -> None:
        class Halts(EncodedTemplate):
            def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
                raise Stopped("killed")

        with pytest.raises(Stopped):
            run(folder.parent / "x" / ".." / folder.name, Halts(), pack_length=50, packs_per_chunk=3)

    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "x").mkdir()
    (tmp_path / "scratch" / "in").symlink_to(tmp_path / "in")

    def verb(folder: Path) -> None:
        producer(tmp_path / "in", folder).run()

    assert crash_points(verb, tmp_path / "scratch", prepare=prepare, every=2) > 10
    assert snapshot(tmp_path / "scratch" / "out") == snapshot(tmp_path / "fresh")


# --------------------------------------------------------------------------------------------
# resumed with other options
# --------------------------------------------------------------------------------------------
def test_options_of_reading_are_options_of_the_stream(tmp_path: Path) -> None:
    """Another column would make other samples of the same ids."""
    rows = [{"input_ids": [1, 2], "other": [3, 4, 5], "labels": [1, 2]} for _ in range(30)]
    with_rows(tmp_path / "in", rows)
    producer(tmp_path / "in", tmp_path / "out", packs_per_chunk=1).run()
    (tmp_path / "out" / "END").unlink()
    options = {"source_options": {"columns": {"input_ids": "other", "labels": "other"}}}
    with pytest.raises(ForeignArtefactError, match=r"with reading \{'kind': 'encoded'\}, not \{"):
        producer(tmp_path / "in", tmp_path / "out", packs_per_chunk=1, **options).run()


def test_a_stream_without_a_chunk_is_begun_anew(tmp_path: Path) -> None:
    """Nobody can have read of it; a reader that waits already takes the new one."""
    put(tmp_path / "in", "a.jsonl", lengths_of(30))
    out = tmp_path / "out"

    class Halts(EncodedTemplate):
        def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            raise Stopped("killed")

    with pytest.raises(Stopped):
        run(out, Halts(), pack_length=50, packs_per_chunk=2)
    assert (out / "stream.json").exists()

    class Turn:
        time = 0.0

        def now(self) -> float:
            return self.time

        def sleep(self, seconds: float) -> None:
            self.time += seconds
            if self.time == 2:
                producer(tmp_path / "in", out).run()

    reader = LazyShardedDataset(out, clock=Turn(), timeout_s=9)
    assert sorted(one for pack in reader for one in pack["sample_ids"]) == list(range(30))


def test_a_producer_that_was_taken_over_publishes_nothing(tmp_path: Path) -> None:
    """It stood still (a stopped process, a sleeping laptop) while another went on."""

    class Sleeps(EncodedTemplate):
        def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            if not later.exists():
                later.parent.mkdir(exist_ok=True)
                later.write_text("{}")
            return super().encode(sample)

    later = tmp_path / "out" / "producer" / "claim.000002"
    put(tmp_path / "in", "a.jsonl", lengths_of(30))
    with pytest.raises(InputError, match="another process took over"):
        run(tmp_path / "out", Sleeps())
    assert not list((tmp_path / "out").glob("chunk_*"))


def test_an_output_that_is_removed_meanwhile(tmp_path: Path) -> None:
    """What is left of it is no stream: no END says so."""

    class Removes(EncodedTemplate):
        def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            if list(out.glob("chunk_*.json")):
                shutil.rmtree(out)
                (out / "producer").mkdir(parents=True)  # as the next heartbeat does
            return super().encode(sample)

    out = tmp_path / "out"
    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    with pytest.raises(InputError, match="was removed while this process"):
        run(out, Removes(), packs_per_chunk=2)
    assert not (out / "END").exists()
    shutil.rmtree(out)
    assert run(out, EncodedTemplate(), packs_per_chunk=2).packed == 60


# --------------------------------------------------------------------------------------------
# links
# --------------------------------------------------------------------------------------------
def test_a_link_to_nothing_is_named_with_its_target(tmp_path: Path) -> None:
    put(tmp_path / "in", "a.jsonl", [5, 6])
    link = tmp_path / "in" / "b.jsonl"
    link.symlink_to(tmp_path / "gone.jsonl")
    for ready in ("rename", "stable"):
        with pytest.raises(SourceError, match=r"in/b\.jsonl is a link to \S+/gone\.jsonl, which does not"):
            producer(tmp_path / "in", tmp_path / ready, ready=ready, stable_s=0, poll_s=0.01).run()
        assert not (tmp_path / ready / "END").exists()
    link.unlink()
    (tmp_path / "in" / "clips").symlink_to(tmp_path / "no-folder")
    with pytest.raises(SourceError, match=r"clips is a link to \S+/no-folder"):
        producer(tmp_path / "in", tmp_path / "rename").run()
    (tmp_path / "in" / "clips").unlink()
    assert producer(tmp_path / "in", tmp_path / "rename").run().packed == 2
    (tmp_path / "whole").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"whole is a link to \S+/nowhere"):
        producer(tmp_path / "whole", tmp_path / "out").run()


def test_a_watching_producer_waits_for_what_a_link_points_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be mounted or copied later; once it was read, it may go."""
    target = tmp_path / "later" / "b.jsonl"

    class Turn:
        time = 0.0

        def now(self) -> float:
            return self.time

        def sleep(self, seconds: float) -> None:
            self.time += seconds
            if self.time == 3:
                put(target.parent, target.name, [7, 8], 50)
            if self.time == 80:  # behind a look at all that was taken
                target.unlink()
            if self.time == 200:
                (tmp_path / "in" / "END").touch()

    put(tmp_path / "in", "a.jsonl", [5, 6])
    (tmp_path / "in" / "b.jsonl").symlink_to(target)
    stats = producer(tmp_path / "in", tmp_path / "out", clock=Turn(), packs_per_chunk=1).run(watch=True)
    assert stats.packed == 4 and sorted(read_all(tmp_path / "out")) == [0, 1, 2, 3]
    assert caplog.text.count("is a link to") == 1


def test_a_missing_clip_is_a_sample_of_the_ledger(tmp_path: Path) -> None:
    """A link among the clips that leads nowhere is a fault of its record, not of the folder."""
    from packtrain.export._journal import content_digest

    clips = tmp_path / "in" / "clips"
    clips.mkdir(parents=True)
    (clips / "a.txt").write_text("one")
    (clips / "a.wav").symlink_to(tmp_path / "gone.wav")
    digest, size = content_digest(clips)
    assert size == 3
    (tmp_path / "gone.wav").write_bytes(b"RIFF")
    assert content_digest(clips)[0] != digest


def test_a_shard_that_goes_away_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "in", "a.jsonl", [5, 6])
    gone = put(tmp_path / "in", "b.jsonl", [7])
    from packtrain.export import _intake

    digest = _intake.content_digest

    def taken_away(path: Path) -> tuple[str, int]:
        if path == gone and path.exists():
            os.remove(path)
        return digest(path)

    monkeypatch.setattr(_intake, "content_digest", taken_away)
    assert producer(tmp_path / "in", tmp_path / "out").run().packed == 2


def test_what_is_passed_over_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Records in a folder below, and a pipe, which nobody could wait for."""
    put(tmp_path / "in", "a.jsonl", [5, 6])
    put(tmp_path / "in" / "below", "b.jsonl", [7])
    (tmp_path / "in" / "pictures").mkdir()
    (tmp_path / "in" / "pictures" / "x.png").touch()
    os.mkfifo(tmp_path / "in" / "pipe.jsonl")
    assert producer(tmp_path / "in", tmp_path / "out", poll_s=0.01).run().read == 2
    assert caplog.text.count("below holds files of records, and is passed over") == 1
    assert caplog.text.count("pipe.jsonl is no file and no folder") == 1 and "pictures" not in caplog.text


# --------------------------------------------------------------------------------------------
# outputs and processes
# --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    ["plan.json", "lengths.json", "run.json", "partial/x", ".packtrain/key.json", "chunk_00000000.arrow"],
)
def test_the_folder_of_another_job_is_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path / "in", "a.jsonl", [5, 6])
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("{}")
    with pytest.raises(ForeignArtefactError, match="is no folder of a stream: it holds"):
        producer(tmp_path / "in", out).run()
    assert [path.name for path in out.iterdir()] == [name.partition("/")[0]]
    (tmp_path / "taken").touch()
    with pytest.raises(InputError, match=r"/taken is a file, not a folder"):
        producer(tmp_path / "in", tmp_path / "taken" / "sub").run()


def test_notes_of_people_are_no_other_job(tmp_path: Path) -> None:
    put(tmp_path / "in", "a.jsonl", [5, 6])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README").write_text("packs of May")
    assert producer(tmp_path / "in", tmp_path / "out").run().packed == 2


def test_the_command_and_the_class_make_the_same_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either goes on where the other was stopped."""
    put(tmp_path / "in", "a.jsonl", lengths_of(60))

    class Halts(EncodedTemplate):
        seen = 0

        def encode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
            self.seen += 1
            if self.seen > 20:
                raise Stopped("killed")
            return super().encode(sample)

    with pytest.raises(Stopped):
        run(tmp_path / "out", Halts(), packs_per_chunk=2)
    assert list((tmp_path / "out").glob("chunk_*.json"))
    words = [tmp_path / "in", tmp_path / "out", "-n", 100, "--kind", "encoded", "--packs-per-chunk", 2]
    with pytest.raises(SystemExit) as caught:
        main(["produce", *map(str, words), "--window", "40", "--json"])
    assert caught.value.code == 0 and json.loads(capsys.readouterr().out)["packed"] == 60


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system does not say what the space was for."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    put(tmp_path / "in", "a.jsonl", [5, 6])
    made = producer(tmp_path / "in", tmp_path / "out")
    monkeypatch.setattr("packtrain.export.producer.Claim", Unclaimed)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*shard_00000000\.json"):
        made.run()


def test_workers_end_with_a_producer_that_is_killed(tmp_path: Path) -> None:
    """They wait for work that never comes, with a processor in memory."""
    put(tmp_path / "in", "a.jsonl", lengths_of(60))
    told = tmp_path / "pids"
    script = Path(words_in.__file__)
    parent = subprocess.Popen([sys.executable, script, tmp_path / "in", tmp_path / "out", told])
    try:
        wait_until(lambda: told.exists() and len(told.read_text().split()) == 2)
    finally:
        parent.kill()
        parent.wait()
    workers = [int(one) for one in told.read_text().split()]
    wait_until(lambda: not any(Path(f"/proc/{one}").exists() for one in workers))


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


# --------------------------------------------------------------------------------------------
# the account of keys
# --------------------------------------------------------------------------------------------
def test_keys_that_nothing_reads_are_counted(tmp_path: Path) -> None:
    with_rows(tmp_path / "in", [{**row(2), "odd": 3} for _ in range(90)])
    out = tmp_path / "out"
    assert run(out, EncodedTemplate()).keys == {"odd": 90}
    assert json.loads((out / "END").read_text())["stats"]["keys"] == {"odd": 90}


@pytest.mark.parametrize(
    ("good", "bad", "stops"), [(0, 1, True), (99, 1, False), (98, 2, True), (300, 4, True)]
)
def test_more_than_one_percent_of_unread_records_stops(
    tmp_path: Path, good: int, bad: int, stops: bool
) -> None:
    rows = [row(2)] * good + [{**row(2), "pixel_values": [1.0]}] * bad
    with_rows(tmp_path / "in", rows)
    options = {"stop_after_failures": 0, "packs_per_chunk": 1000}
    if not stops:
        assert run(tmp_path / "out", EncodedTemplate(), **options).dropped == {"unread_key": bad}
        return
    with pytest.raises(InputError, match="pixel_values") as error:
        run(tmp_path / "out", EncodedTemplate(), **options)
    assert "ignore_keys" in str(error.value.hint) and not (tmp_path / "out" / "stream.json").exists()
    again = {**options, "source_options": {"ignore_keys": ["pixel_values"]}}
    assert run(tmp_path / "out", EncodedTemplate(), **again).packed == good + bad
