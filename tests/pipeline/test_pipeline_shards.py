"""Shards: each task writes for itself, and merging gives the bytes of a single run or says what lacks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from words import Texts, Words, many

from packtrain.errors import ChecksumError, ForeignArtefactError, FormatError, InputError
from packtrain.pipeline import publish as ranges
from packtrain.pipeline.measure import measure
from packtrain.pipeline.shards import measure_shard, merge, shard_lengths
from packtrain.planning.lengths import Lengths
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.store import parts
from packtrain.testing import crash_points, snapshot

IGNORED = ("origin.json",)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "UNIT", 8)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Chats(Words):
    """Words of the assistant's turns."""

    def encode(self, sample):  # type: ignore[no-untyped-def]
        said = " ".join(part["text"] for part in sample["messages"][-1]["content"])
        return super().encode({"text": said})


def pictured(folder: Path, count: int) -> ChatSource:
    """A JSONL of chats about three images, some of them missing, some chats broken."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(3):
        (folder / f"{i}.jpg").write_bytes(bytes([i]) * 50)
    with open(folder / "t.jsonl", "w") as handle:
        for i in range(count):
            said = "BROKEN" if i % 13 == 4 else " ".join(["w"] * (i % 7 + 1))
            user = {"role": "user", "content": "<image>?"}
            turns = [user, {"role": "assistant", "content": said}]
            handle.write(json.dumps({"messages": turns, "images": [f"{i % 4}.jpg"]}) + "\n")
    return ChatSource(open_source(folder / "t.jsonl"))


@pytest.mark.parametrize("of", [1, 3, 7, 60])
def test_merged_shards_are_a_single_run(tmp_path: Path, of: int) -> None:
    source = pictured(tmp_path / "data", 50)
    measure(source, Chats(), tmp_path / "one", persist_every=8)
    for number in reversed(range(of)):
        shard = measure_shard(source, Chats(), tmp_path / "many", (number, of), persist_every=8)
        assert len(shard_lengths(shard)) == shard.stop - shard.start
    merged = merge(tmp_path / "many")
    assert snapshot(tmp_path / "many", IGNORED) == snapshot(tmp_path / "one", IGNORED)
    assert "source.json" in snapshot(tmp_path / "one")
    assert merge(tmp_path / "many").digest == merged.digest  # again is no error
    assert not measure_shard(source, Chats(), tmp_path / "many", (0, of)).folder.exists()
    with pytest.raises(ForeignArtefactError, match="another template"):
        measure_shard(source, Chats(2), tmp_path / "many", (0, of))


def test_a_stopped_merge_is_run_again(tmp_path: Path) -> None:
    source = many(30)

    def shards(folder: Path) -> None:
        for number in range(3):
            measure_shard(source, Words(), folder, (number, 3))

    def absent_or_whole(folder: Path) -> None:
        if (folder / "lengths.json").exists():
            assert len(Lengths.load(folder)) == 30

    assert crash_points(merge, tmp_path, ignore=IGNORED, prepare=shards, check=absent_or_whole) > 40


def test_a_stopped_shard_goes_on(tmp_path: Path) -> None:
    class Counted(Texts):
        reads = 0

        def __getitem__(self, index: int) -> dict[str, str]:
            Counted.reads += 1
            return super().__getitem__(index)

    source = Counted(many(90).texts)
    crash = tmp_path / "crash"
    crash.mkdir()
    crash_points(
        lambda folder: measure_shard(source, Words(), folder, (1, 3), persist_every=8, origin={"a": 1}),
        crash,
        ignore=("shard.json",),  # its origin holds times
        every=4,
    )
    shard = measure_shard(source, Words(), tmp_path / "l", (1, 3), persist_every=8)
    names = [path.name for path in parts.finished(shard.folder, 30)]
    os.remove(shard.folder / "shard.json")
    os.remove(shard.folder / "partial" / names[-1])
    Counted.reads = 0
    measure_shard(source, Words(), tmp_path / "l", (1, 3), persist_every=8)
    assert Counted.reads == 6  # the last of 8 + 8 + 8 + 6


def test_what_does_not_fit_together_is_named(tmp_path: Path) -> None:
    out = tmp_path / "l"
    with pytest.raises(FormatError, match="holds no shards"):
        merge(out)
    with pytest.raises(InputError, match="shard 4/4 does not exist"):
        measure_shard(many(40), Words(), out, (4, 4))
    for number in (0, 2):
        measure_shard(many(40), Words(), out, (number, 4))
    started = measure_shard(many(40), Words(), out, (3, 4))
    os.remove(started.folder / "shard.json")
    with pytest.raises(InputError, match=r"missing: 1/4 .*not finished: 3/4") as error:
        merge(out)
    assert "--shard 1/4" in str(error.value.hint)
    measure_shard(many(40), Words(), out, (3, 4))
    measure_shard(many(40), Words(2), out, (1, 4))
    with pytest.raises(ForeignArtefactError, match="shard 1/4 is of another template than shard 0/4"):
        merge(out)
    with pytest.raises(ForeignArtefactError, match="a shard of another template"):
        measure_shard(many(40), Words(), out, (1, 4))
    made = measure_shard(many(40), Words(), out, (1, 4), overwrite=True)
    measure_shard(many(40), Words(), out, (0, 2))
    with pytest.raises(ForeignArtefactError, match="1 of 2 and 4 of 4"):
        merge(out)
    foreign = out / "shard_00000_of_00002"
    for path in sorted(foreign.rglob("*.*")):
        path.unlink()
    (foreign / "partial").rmdir()
    foreign.rmdir()
    part = parts.finished(made.folder, 10)[0]
    raw = part.read_bytes()
    part.write_bytes(raw[:-1] + b"x")
    with pytest.raises(ChecksumError, match=r"is not what shard\.json says"):
        merge(out)
    part.write_bytes(raw)
    measure(many(40), Words(2), tmp_path / "other")
    for path in (tmp_path / "other").iterdir():
        path.rename(out / path.name)
    with pytest.raises(ForeignArtefactError, match="holds lengths of another template"):
        merge(out)
    assert len(merge(out, overwrite=True)) == 40
    measure(many(40), Words(), tmp_path / "one")
    assert snapshot(out, IGNORED) == snapshot(tmp_path / "one", IGNORED)


@pytest.mark.parametrize(
    ("name", "value"), [("root", 1 << 64), ("template", 10**39), ("key", []), ("layout", "x")]
)
def test_an_edited_identity_is_told(name: str, value: object, tmp_path: Path) -> None:
    """A number where a folder belongs came as far as the lengths, and ended in a traceback there."""
    source = many(12)
    for number in range(2):
        shard = measure_shard(source, Words(), tmp_path, (number, 2))
    marker = shard.folder.parent / "shard_00000_of_00002" / "shard.json"
    told = json.loads(marker.read_text())
    told["identity"][name] = value
    marker.write_text(json.dumps(told))
    with pytest.raises(FormatError, match=rf"shard\.json is not the marker of a shard: .*{name}"):
        merge(tmp_path)
