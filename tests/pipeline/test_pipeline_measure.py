"""Measuring: deterministic, resumable at every write, refused when foreign, nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from words import Texts, Words, many

import packtrain as pt
from packtrain.errors import ForeignArtefactError, InputError, PlanError, SourceError
from packtrain.pipeline import publish as module
from packtrain.pipeline.measure import measure
from packtrain.pipeline.plan import check_measured
from packtrain.pipeline.publish import details
from packtrain.planning.lengths import Lengths
from packtrain.store import parts
from packtrain.testing import crash_points, snapshot

IGNORED = ("origin.json",)


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNIT", 8)


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop inside this process cannot lose what was written, so the disk need not be waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_every_sample_has_a_length_or_a_reason(tmp_path: Path) -> None:
    source = many(200)
    lengths = measure(source, Words(), tmp_path / "l")
    assert len(lengths) == 200
    for i, text in enumerate(source.texts):
        words = text.split()
        if "BROKEN" in words:
            assert (
                lengths.status[i] == 2 and lengths.reasons[i] == "template_error" and lengths.tokens[i] == 0
            )
        elif not words:
            assert lengths.status[i] == 1 and lengths.reasons[i] == "empty"
        else:
            assert lengths.status[i] == 0 and lengths.tokens[i] == len(words)
            assert lengths.costs["supervised"][i] == (len(words) if len(words) % 2 else 0)
    told = details(tmp_path / "l")
    assert told[5] == "texts[5]: a broken word" and sorted(told) == sorted(lengths.reasons)
    plan = pt.plan(lengths, pack_length=20)
    assert sorted([*plan.indices.tolist(), *plan.ledger.ids.tolist()]) == list(range(200))


def test_bytes_do_not_depend_on_workers_or_parts(tmp_path: Path) -> None:
    source = many(100)
    whole = []
    for number, options in enumerate([{}, {"persist_every": 1}, {"persist_every": 24}, {"workers": 2}]):
        folder = tmp_path / str(number)
        seen: list[tuple[int, int]] = []
        measure(source, Words(), folder, progress=lambda done, total: seen.append((done, total)), **options)  # noqa: B023
        whole.append(snapshot(folder, IGNORED))
        assert seen == [(min(stop, 100), 100) for stop in range(8, 108, 8)]
    assert all(one == whole[0] for one in whole)


@pytest.mark.usefixtures("no_sync")
def test_a_stop_after_any_write_loses_and_changes_nothing(tmp_path: Path) -> None:
    source = many(30)

    def verb(folder: Path) -> None:
        measure(source, Words(), folder, persist_every=8)

    def absent_or_whole(folder: Path) -> None:
        if (folder / "lengths.json").exists():
            assert len(Lengths.load(folder)) == 30

    assert crash_points(verb, tmp_path, ignore=IGNORED, check=absent_or_whole) > 40


@pytest.mark.usefixtures("no_sync")
def test_a_stop_while_overwriting_leaves_no_mixture(tmp_path: Path) -> None:
    def verb(folder: Path) -> None:
        measure(many(30), Words(), folder, persist_every=8, overwrite=True)

    def prepare(folder: Path) -> None:
        measure(many(40), Words(2), folder)

    def absent_or_whole(folder: Path) -> None:
        if (folder / "lengths.json").exists():
            assert len(Lengths.load(folder)) in (30, 40)

    crash_points(verb, tmp_path, ignore=IGNORED, prepare=prepare, check=absent_or_whole, every=5)


def test_finished_parts_are_not_measured_again(tmp_path: Path) -> None:
    class Counted(Texts):
        reads = 0

        def __getitem__(self, index: int) -> dict[str, str]:
            Counted.reads += 1
            if Counted.reads == 50:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    source = Counted(many(100).texts)
    with pytest.raises(KeyboardInterrupt):
        measure(source, Words(), tmp_path / "l", persist_every=8)
    assert [path.name for path in parts.finished(tmp_path / "l")][-1] == "part_000000000040_000000000048.npz"
    before = Counted.reads
    measure(source, Words(), tmp_path / "l", persist_every=8)
    assert Counted.reads - before == 52


def test_default_cadence_flushes_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNIT", 256)
    written: list[str] = []
    real = parts.add_part
    monkeypatch.setattr(parts, "add_part", lambda folder, part: (written.append(""), real(folder, part))[1])
    measure(many(20_000), Words(), tmp_path / "l", workers=1)
    assert 1 <= len(written) <= 6


@pytest.mark.parametrize("seconds", [0.2, 0.5, 0.9])
def test_a_killed_process_goes_on_where_it_was(tmp_path: Path, seconds: float) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from words import Words, many\n"
        "from packtrain.pipeline import measure, publish as ranges\n"
        "ranges.UNIT = 16\n"
        "measure.measure(many(400, pause=0.003), Words(), sys.argv[2], persist_every=16, workers=1)\n"
    )
    folder = tmp_path / "l"
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 60
    while not list(folder.glob("partial/*.npz")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (folder / "lengths.json").exists()
    assert 0 < len(parts.finished(folder)) < 25
    subprocess.run(command, env=environment, check=True)
    subprocess.run([*command[:-1], str(tmp_path / "undisturbed")], env=environment, check=True)
    assert snapshot(folder, IGNORED) == snapshot(tmp_path / "undisturbed", IGNORED)


def test_equal_inputs_are_a_hit_and_other_inputs_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "l"
    first = measure(many(30), Words(), folder)
    assert measure(many(30), Words(), folder).digest == first.digest
    with pytest.raises(ForeignArtefactError, match=r"lengths of another template \(version\)"):
        measure(many(30), Words(2), folder)
    with pytest.raises(ForeignArtefactError, match="lengths of another number of samples, source"):
        measure(many(31), Words(), folder)
    assert Lengths.load(folder).digest == first.digest
    assert len(measure(many(31), Words(), folder, overwrite=True)) == 31


def test_unfinished_work_of_another_input_is_refused(tmp_path: Path) -> None:
    parts.open_parts(tmp_path / "l", {"template": "x"})
    with pytest.raises(ForeignArtefactError, match="unfinished measurement of another"):
        measure(many(30), Words(), tmp_path / "l")
    assert len(measure(many(30), Words(), tmp_path / "l", overwrite=True)) == 30


def test_no_usable_sample_is_an_error_that_names_the_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of the 3 samples can be used; the first: empty: texts\[0\]"):
        measure(Texts(["", "", ""]), Words(), tmp_path / "l")
    assert not (tmp_path / "l" / "lengths.json").exists()
    assert len(measure(many(5), Words(), tmp_path / "l")) == 5  # the corrected source needs no other folder


def test_lengths_that_were_refused_give_way_to_the_corrected_measurement(tmp_path: Path) -> None:
    folder, wrong = tmp_path / "l", Texts(["BROKEN"] * 4 + ["w w w"])
    refused = measure(wrong, Words(), folder)
    with pytest.raises(PlanError, match="4 of 5 samples"):
        check_measured(refused, folder, 0.5)
    assert measure(wrong, Words(), folder).digest == refused.digest  # equal inputs: a hit, as ever
    right = measure(many(5), Words(), folder)
    check_measured(right, folder, 0.5)
    with pytest.raises(ForeignArtefactError, match="lengths of another"):
        measure(wrong, Words(), folder)  # what was taken is nobody's to replace
    assert not (folder / "refused.json").exists()


def test_a_one_shot_generator_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="generator is no source"):
        measure(({"text": t} for t in ["a"]), Words(), tmp_path / "l")  # type: ignore[arg-type]


class Pictured(Texts):
    """Samples with a media reference, under a media root."""

    media_root: Path

    def __getitem__(self, index: int) -> dict[str, object]:
        part = {"type": "image", "image": str(self.media_root / f"{index}.jpg")}
        return {"text": self.texts[index], "messages": [{"role": "user", "content": [part]}]}


def test_changed_media_are_noticed_and_copies_are_not(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(bytes([i]) * 100)
    source = Pictured(["a", "b b", "c c c"])
    source.media_root = tmp_path
    first = measure(source, Words(), tmp_path / "l")
    rows = [json.loads(line) for line in (tmp_path / "l" / "media.jsonl").read_text().splitlines()]
    assert [row[:2] for row in rows] == [["0.jpg", 100], ["1.jpg", 100], ["2.jpg", 100]]
    os.utime(tmp_path / "1.jpg", ns=(1, 1))  # touched, not changed
    assert measure(source, Words(), tmp_path / "l").digest == first.digest
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for i in range(3):
        (moved / f"{i}.jpg").write_bytes(bytes([i]) * 100)
    copied = Pictured(source.texts)
    copied.media_root = moved
    measure(copied, Words(), tmp_path / "m")
    marker = [json.loads((tmp_path / name / "lengths.json").read_text()) for name in "lm"]
    assert marker[0]["fingerprint"] == marker[1]["fingerprint"]
    (tmp_path / "1.jpg").write_bytes(b"other" * 20)
    with pytest.raises(ForeignArtefactError, match=r"other media: 1\.jpg changed since"):
        measure(source, Words(), tmp_path / "l")
    os.remove(tmp_path / "2.jpg")
    with pytest.raises(ForeignArtefactError, match=r"1\.jpg and 1 more"):
        measure(source, Words(), tmp_path / "l")


@pytest.mark.parametrize("noted", [4, 2])
def test_other_media_behind_the_same_size_and_time(tmp_path: Path, noted: int) -> None:
    """Named by the stamp; earlier versions noted size and time alone: there one has to ask."""
    (tmp_path / "0.jpg").write_bytes(b"a" * 100)
    source = Pictured(["a"])
    source.media_root = tmp_path
    measure(source, Words(), tmp_path / "l")
    before = os.stat(tmp_path / "0.jpg")
    (tmp_path / "0.jpg").write_bytes(b"b" * 100)
    os.utime(tmp_path / "0.jpg", ns=(before.st_atime_ns, before.st_mtime_ns))
    if noted == 2:
        stats = np.load(tmp_path / "l" / "media_stat.npy")
        np.save(tmp_path / "l" / "media_stat.npy", stats[:, :2])
        measure(source, Words(), tmp_path / "l")
    else:
        with pytest.raises(ForeignArtefactError, match=r"0\.jpg changed"):
            measure(source, Words(), tmp_path / "l")
    with pytest.raises(ForeignArtefactError, match=r"0\.jpg changed"):
        measure(source, Words(), tmp_path / "l", verify_content=True)


def test_tokens_are_what_encoding_gives(tmp_path: Path) -> None:
    source = many(50)
    lengths = measure(source, Words(), tmp_path / "l")
    usable = np.flatnonzero(lengths.status == 0)
    assert [len(Words().encode(source[i])["input_ids"]) for i in usable] == lengths.tokens[usable].tolist()
