"""Marks of consumption: in the folder of each run, and read by whoever removes chunks."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_lazy_sharded import UNEVEN, Feed, ids

from packtrain.data import LazyShardedDataset
from packtrain.errors import FormatError
from packtrain.export.producer import Housekeeping
from packtrain.store.chunk_folder import readers

FIRST_CHUNKS = 9  # packs of the first three chunks of UNEVEN


@pytest.fixture
def stream(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "out", UNEVEN).all()


def read(reader: LazyShardedDataset, packs: int) -> list[int]:
    """Train on so many packs behind the last checkpoint, and save the next one."""
    reader.load_state_dict(reader.state_dict())
    one = iter(reader)
    found = ids([next(one) for _ in range(packs)])
    reader.acknowledge()
    return found


def chunks_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("chunk_*.arrow"))


@pytest.mark.spec(
    "002",
    "marks lie in the folder of the run: a second experiment reads used chunks without a key",
    key="`training.output_dir`",
    api="`LazyShardedDataset(run=)`",
)
def test_a_second_experiment_reads_everything(stream: Feed, tmp_path: Path) -> None:
    before = sorted(stream.folder.iterdir())
    first = LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "first")
    read(first, FIRST_CHUNKS)
    assert first.marks.parent == tmp_path / "first" / "consumed"
    marks = sorted(path.name for path in first.marks.iterdir())
    assert marks == ["acks", *(f"chunk_{n:08d}.arrow.completed" for n in range(3))]
    assert sorted(set(stream.folder.iterdir()) - set(before)) == [stream.folder / "readers"]
    second = LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "second")
    assert ids(list(second)) == list(range(stream.samples))
    again = LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "first")
    behind = LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "third", start="acknowledged")
    assert again.begins_at == FIRST_CHUNKS and ids(list(again)) == ids(list(behind))
    assert len(
        list(LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "first", start="beginning"))
    ) == sum(UNEVEN)


@pytest.mark.spec(
    "002",
    "cleaning up reads the marks of all runs that registered",
    key="`produce --keep-completed`",
    api="`PackingProducer(keep_completed=)`",
)
def test_only_what_every_run_has_used_is_removed(
    stream: Feed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = Housekeeping(stream.folder, stream.stream, list(UNEVEN))
    fast, slow = (LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / name) for name in ("fast", "slow"))
    assert house.ahead() == len(UNEVEN) and house.clean(0) == []
    slow.peek(1)  # it has begun: registered, and nothing is used up until it says so
    read(fast, FIRST_CHUNKS)
    assert set(readers(stream.folder, stream.stream)) == {fast.marks, slow.marks}
    assert house.ahead() == len(UNEVEN) and house.clean(0) == []
    read(slow, 5)
    assert house.ahead() == len(UNEVEN) - 2 and house.clean(0) == [0, 1] and house.clean(0) == []
    plain = LazyShardedDataset(stream.folder, 0, 1, start="acknowledged")  # one that is in no run
    read(plain, 1)
    assert plain.marks == stream.folder and house.clean(0) == []
    read(slow, FIRST_CHUNKS - 5)
    assert house.clean(0) == [2]
    with pytest.raises(FormatError, match="was removed: it had been acknowledged by every run"):
        list(LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "late"))
    late = LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "late", start="acknowledged")
    assert len(list(late)) == sum(UNEVEN) - plain.state_dict()["slots"]
    for reader in (fast, slow, plain):
        read(reader, sum(UNEVEN) - reader.state_dict()["slots"])
    shutil.rmtree(late.marks)  # its run was deleted, or lies on a disk that is not mounted here
    with caplog.at_level(logging.WARNING):
        assert house.clean(0) == [] and house.clean(0) == []
    assert caplog.text.count("are not to be seen") == 1 and str(late.marks) in caplog.text
    assert chunks_of(stream.folder)[0] == "chunk_00000003.arrow"


def test_a_state_of_before_keeps_its_reader(stream: Feed, tmp_path: Path) -> None:
    """A run that marked in the directory itself goes on marking there: it stays one reader."""
    old = LazyShardedDataset(stream.folder, 0, 1)
    read(old, 5)
    state: dict[str, Any] = old.state_dict()
    resumed = LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "run")
    resumed.load_state_dict(state)
    rest = list(resumed)
    resumed.acknowledge()
    assert len(rest) == sum(UNEVEN) - 5 and "registered" not in resumed.state_dict()
    assert set(readers(stream.folder, stream.stream)) == {stream.folder}
    house = Housekeeping(stream.folder, stream.stream, list(UNEVEN))
    assert house.clean(0) == [0, 1, 2, 3, 4]


def test_ranks_of_a_run_share_its_marks(stream: Feed, tmp_path: Path) -> None:
    """Used up is what all ranks of the run have acknowledged; its state goes on at another size."""
    two = [LazyShardedDataset(stream.folder, rank, 2, run=tmp_path / "run") for rank in range(2)]
    read(two[0], 4)
    house = Housekeeping(stream.folder, stream.stream, list(UNEVEN))
    assert house.used_up() == set()
    read(two[1], 4)
    assert house.used_up() == {0, 1, 3} and house.clean(0) == [0, 1, 3]
    alone = LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "run")
    alone.load_state_dict(two[0].state_dict())
    assert len(list(alone)) == 24 - 8
    alone.acknowledge()
    assert house.used_up() == set(range(len(UNEVEN)))


def test_a_directory_that_cannot_be_written_trains(
    stream: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr("packtrain.packs.growing.register", refuse)
    reader = LazyShardedDataset(stream.folder, 0, 1, run=tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        read(reader, FIRST_CHUNKS)
    assert "cannot register" in caplog.text and (reader.marks / "chunk_00000002.arrow.completed").exists()
