"""A grown source: only what is new is measured, and the bytes are those of a fresh measurement."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from words import Words

from packtrain.cli import main
from packtrain.errors import ChecksumError, ForeignArtefactError
from packtrain.pipeline import publish as ranges
from packtrain.pipeline.measure import measure
from packtrain.planning.lengths import Lengths
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.testing import crash_points, snapshot

IGNORED = ("origin.json",)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "UNIT", 8)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Seen(Words):
    """Words of the assistant's turns; notes how many were measured."""

    measured = 0

    def encode(self, sample: Any) -> dict[str, Any]:
        said = " ".join(part["text"] for part in sample["messages"][-1]["content"])
        return super().encode({"text": said})

    def measure(self, sample: Any) -> Any:
        Seen.measured += 1
        return super().measure(sample)


def line(i: int, said: str | None = None) -> str:
    said = said or ("BROKEN" if i % 13 == 4 else " ".join(["w"] * (i % 7 + 1)))
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": said}]
    return json.dumps({"messages": turns, "images": [f"{i % 4}.jpg"]}) + "\n"


def write(path: Path, first: int, last: int, **changes: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for i in range(3):  # 3.jpg is missing
        (path.parent / f"{i}.jpg").write_bytes(bytes([i]) * 50)
    path.write_text("".join(line(i, changes.get(f"_{i}")) for i in range(first, last)))


def chats(path: Path) -> ChatSource:
    return ChatSource(open_source(path))


def grown_equals_fresh(tmp_path: Path, path: Path, grow: Callable[[], object], **options: Any) -> int:
    """How many samples were measured; the folders must be equal."""
    measure(chats(path), Seen(), tmp_path / "l", **options)
    grow()
    before = snapshot(tmp_path / "l")
    with pytest.raises(ForeignArtefactError, match="source") as refused:
        measure(chats(path), Seen(), tmp_path / "l")
    assert "append=True" in str(refused.value.hint) and snapshot(tmp_path / "l") == before
    Seen.measured = 0
    measure(chats(path), Seen(), tmp_path / "l", append=True, **options)
    count = Seen.measured
    measure(chats(path), Seen(), tmp_path / "fresh")
    assert snapshot(tmp_path / "l", IGNORED) == snapshot(tmp_path / "fresh", IGNORED)
    measure(chats(path), Seen(), tmp_path / "l", append=True)
    return count


@pytest.mark.parametrize("cut", ["", "\n", "\r\n", "\n\n \n"])
def test_a_longer_jsonl(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "data" / "t.jsonl"
    write(path, 0, 50)
    if cut != "":
        path.write_bytes(path.read_bytes().rstrip() + cut.encode() * (cut == "\n\n \n"))
    added = (cut if cut in ("\n", "\r\n") else "") + "".join(line(i) for i in range(50, 71))

    def grow() -> None:
        with open(path, "ab") as handle:
            handle.write(added.encode())

    assert grown_equals_fresh(tmp_path, path, grow, persist_every=16) == 21


def test_a_changed_or_continued_jsonl_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data" / "t.jsonl"
    write(path, 0, 20)
    measure(chats(path), Seen(), tmp_path / "l")
    before = snapshot(tmp_path / "l")
    write(path, 0, 30, _3="another answer")
    with pytest.raises(ForeignArtefactError, match="did not grow from"):
        measure(chats(path), Seen(), tmp_path / "l", append=True)
    write(path, 0, 10)  # got shorter
    with pytest.raises(ForeignArtefactError, match="did not grow from"):
        measure(chats(path), Seen(), tmp_path / "l", append=True)
    write(path, 0, 20)
    with pytest.raises(ForeignArtefactError, match="another template"):
        measure(chats(path), Seen(2), tmp_path / "l", append=True)
    assert snapshot(tmp_path / "l") == before
    path.write_text(path.read_text().rstrip())  # its last line has no end, and then goes on
    measure(chats(path), Seen(), tmp_path / "m")
    path.write_text(path.read_text() + "x\n" + line(20))
    with pytest.raises(ForeignArtefactError, match="did not grow from"):
        measure(chats(path), Seen(), tmp_path / "m", append=True)


def test_new_shards(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "p-1.jsonl", 0, 20)
    write(folder / "p-2.jsonl", 20, 45)

    def grow() -> None:
        write(folder / "p-3.jsonl", 45, 60)
        write(folder / "a.jsonl", 60, 69)  # comes first: all ids move

    assert grown_equals_fresh(tmp_path, folder, grow) == 24


def test_changed_shards_are_measured_again_and_others_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for number in range(5):
        write(folder / f"p-{number}.jsonl", 10 * number, 10 * number + 10)

    def change() -> None:
        write(folder / "p-1.jsonl", 10, 20, _12="a new and longer answer than before")
        os.remove(folder / "p-3.jsonl")
        write(folder / "p-9.jsonl", 90, 93)
        (folder / "p-4.jsonl").rename(folder / "p-8.jsonl")  # its message names the file: measured again

    assert grown_equals_fresh(tmp_path, folder, change, persist_every=8) == 10 + 3 + 10
    rows = (tmp_path / "l" / "media.jsonl").read_text()
    assert rows == (tmp_path / "fresh" / "media.jsonl").read_text() and "3.jpg" in rows


def test_a_cost_that_only_a_removed_file_had(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "a.jsonl", 0, 4, **{f"_{i}": "two words" for i in range(4)})  # no `supervised`
    write(folder / "b.jsonl", 4, 8, _4="one")

    def change() -> None:
        os.remove(folder / "b.jsonl")
        write(folder / "c.jsonl", 9, 10, _9="two words")

    grown_equals_fresh(tmp_path, folder, change)
    assert list(Lengths.load(tmp_path / "l").costs) == []


def test_rows_tell_their_shards(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from packtrain.sources.encoded import EncodedTemplate

    def rows(name: str, sizes: list[int]) -> None:
        pq.write_table(
            pa.table(
                {"input_ids": [list(range(n)) for n in sizes], "labels": [list(range(n)) for n in sizes]}
            ),
            tmp_path / "rows" / name,
            row_group_size=2,
        )

    (tmp_path / "rows").mkdir()
    rows("a.parquet", [3, 1, 4, 1, 5])
    rows("b.parquet", [9, 2])
    source = open_source(tmp_path / "rows", kind="encoded")
    assert [(s.name, s.start, s.stop) for s in source.source.shards] == [
        ("a.parquet", 0, 5),
        ("b.parquet", 5, 7),
    ]
    measure(source, EncodedTemplate(), tmp_path / "l")
    rows("b.parquet", [6, 5])
    rows("c.parquet", [3])
    grown = open_source(tmp_path / "rows", kind="encoded")
    lengths = measure(grown, EncodedTemplate(), tmp_path / "l", append=True)
    assert lengths.tokens.tolist() == [3, 1, 4, 1, 5, 6, 5, 3]


def tar(path: Path, first: int, last: int, said: str = "w w w") -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as out:
        for i in range(first, last):
            for name, held in ((f"{i}.jpg", bytes([i]) * 40), (f"{i}.txt", said.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(held)
                out.addfile(info, io.BytesIO(held))


def test_tars_and_the_media_in_them(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for number in range(3):
        tar(folder / f"{number}.tar", 10 * number, 10 * number + 10)

    def change() -> None:
        tar(folder / "1.tar", 10, 18, "another caption")
        os.remove(folder / "2.tar")
        tar(folder / "4.tar", 40, 45)

    assert grown_equals_fresh(tmp_path, folder, change) == 8 + 5


def test_changed_media_of_copied_samples_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "a.jsonl", 0, 10)
    write(folder / "b.jsonl", 10, 20)
    measure(chats(folder), Seen(), tmp_path / "l")
    before = snapshot(tmp_path / "l")
    for name in ("c.jsonl", "b.jsonl"):  # grown, then changed
        write(folder / name, 20, 25)
        (folder / "1.jpg").write_bytes(b"another picture")
        with pytest.raises(ForeignArtefactError, match=r"other media: 1\.jpg"):
            measure(chats(folder), Seen(), tmp_path / "l", append=True)
        now = {name: held for name, held in snapshot(tmp_path / "l").items() if "partial" not in name}
        assert now == before


@pytest.mark.parametrize("change", ["grown", "changed"])
def test_a_stop_leaves_the_old_or_the_new_lengths(tmp_path: Path, change: str) -> None:
    data = tmp_path / "data"
    write(data / "a.jsonl", 0, 20)
    write(data / "b.jsonl", 20, 30)
    measure(chats(data), Seen(), tmp_path / "old")
    if change == "changed":
        write(data / "b.jsonl", 20, 31, _22="changed")
    write(data / "c.jsonl", 30, 41)
    source = chats(data)
    absent = 0

    def prepare(folder: Path) -> None:
        shutil.copytree(tmp_path / "old", folder)

    def old_or_new(folder: Path) -> None:
        nonlocal absent
        if not (folder / "lengths.json").exists():
            absent += 1
            assert (folder / "next" / "lengths.json").exists()
            return
        from packtrain.store.lengths import verify

        assert len(verify(folder)) in (30, len(source))

    (tmp_path / "crash").mkdir()
    steps = crash_points(
        lambda folder: measure(source, Seen(), folder, append=True, persist_every=8),
        tmp_path / "crash",
        ignore=IGNORED,
        prepare=prepare,
        check=old_or_new,
    )
    assert steps > 60 and absent < 30
    measure(source, Seen(), tmp_path / "fresh")
    assert snapshot(tmp_path / "crash" / "out", IGNORED) == snapshot(tmp_path / "fresh", IGNORED)


def test_unfinished_work_on_another_state_is_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "data" / "t.jsonl"
    write(path, 0, 20)
    measure(chats(path), Seen(), tmp_path / "l")
    write(path, 0, 60)

    class Stops(Seen):
        def measure(self, sample: Any) -> Any:
            if Seen.measured == 30:
                raise KeyboardInterrupt
            return super().measure(sample)

    Seen.measured = 0
    with pytest.raises(KeyboardInterrupt):
        measure(chats(path), Stops(), tmp_path / "l", append=True, persist_every=8)
    assert len(Lengths.load(tmp_path / "l")) == 20
    write(path, 0, 70)
    measure(chats(path), Seen(), tmp_path / "l", append=True)
    measure(chats(path), Seen(), tmp_path / "fresh")
    assert snapshot(tmp_path / "l", IGNORED) == snapshot(tmp_path / "fresh", IGNORED)
    assert np.load(tmp_path / "l" / "tokens.npy").shape == (70,)


@pytest.mark.parametrize("name", ["tokens", "supervised", "status"])
def test_lengths_that_changed_behind_their_size_and_time_are_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is planned, opened or appended of them, and nothing is written."""
    path, folder = tmp_path / "d" / "a.jsonl", tmp_path / "l"
    write(path, 0, 30)
    measure(chats(path), Seen(), folder)
    array = folder / f"{name}.npy"
    status, data = array.stat(), bytearray(array.read_bytes())
    data[-8] ^= 1
    array.write_bytes(data)
    os.utime(array, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = snapshot(folder)
    with pytest.raises(ChecksumError, match=rf"the file changed: \S+{name}\.npy"):
        measure(chats(path), Seen(), folder)
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(line(30))
    with pytest.raises(ChecksumError, match="the file changed"):
        measure(chats(path), Seen(), folder, append=True)
    for words in (["plan", str(folder), "-n", "20", "-o", str(tmp_path / "p")], ["forecast", str(folder)]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 1 and "the file changed" in " ".join(capsys.readouterr().err.split())
    assert snapshot(folder) == before and not (tmp_path / "p" / "plan.json").exists()
