"""Readers of a node that share one pass over an iterable: the same packs, one reading, and nobody waits."""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
from counted_source import Changing, Counted, Later, Named, OfRank, Various, Waiting, passes
from test_elastic import KINDS, Cluster
from torch.utils.data import DataLoader

import packtrain.packs._node_reader as node_reader
import packtrain.packs._node_server as node_server
from packtrain.data import StreamingPackedDataset, WeightedSources
from packtrain.errors import SourceError
from packtrain.packs._iterable import OfSplits, Places, mark
from packtrain.packs._node_reader import NodeReader

STREAM: dict[str, Any] = {"pack_length": 64, "window": 16, "seed": 3, "shuffle_buffer": 8}


@pytest.fixture(autouse=True)
def _fed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every reader is fed from its first sample on, unless a test says otherwise."""
    monkeypatch.setattr(NodeReader, "is_costly", True)
    monkeypatch.setattr(node_reader, "_told", set())
    yield
    for server in node_reader._started:
        server.kill()
        server.wait()
    node_reader._started.clear()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a launcher: whoever runs here is one of four ranks of a machine."""
    for name, value in {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": time.monotonic_ns()}.items():
        monkeypatch.setenv(name, str(value))


def reader(source: Any, meeting: str = "") -> NodeReader:
    return NodeReader(source, meeting or str(time.monotonic_ns()), of_one_rank=True)


def places(taken: Any) -> list[tuple[int, int]]:
    return [(place, sample["input_ids"][0]) for place, sample in taken]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("before", "after"), [((4, 0), (2, 3)), ((2, 2), (1, 0)), ((1, 4), (4, 1))])
def test_packs_are_those_of_reading_by_itself_through_stops_and_other_readers(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, states in the middle and states at the end; an epoch and a half, or to the end of one."""
    monkeypatch.setitem(KINDS, "counted", (StreamingPackedDataset, lambda: Counted(tmp_path, 700), STREAM))
    for cyclic in (False, True):
        for stop in (0, 3, 9):
            told = []
            for fed in (False, True):
                monkeypatch.setattr(node_reader, "WORTH_S", 1e9)
                monkeypatch.setattr(NodeReader, "is_costly", fed)
                begun = Cluster("counted", *before, splits=12, cyclic=cyclic)
                steps = [begun.step() for _ in range(stop)]
                states = begun.states()
                other = Cluster("counted", *after, states, splits=12, cyclic=cyclic)
                steps += [other.step() for _ in range(240 // after[0])]
                told.append((steps, states, other.states()))
            assert told[0] == told[1] and (cyclic or told[0][0][-1][0] is None)
    served = [epoch for pid, epoch in passes(tmp_path) if pid != os.getpid()]
    assert set(served) == ({0, 1} if after != (1, 0) else {0}) and len(served) <= 12


@pytest.mark.usefixtures("ranks")
def test_the_source_is_begun_once_an_epoch_for_all_readers_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 readers through two epochs; resumed by 4, what waits and what follows are one pass, too."""
    monkeypatch.setitem(KINDS, "counted", (StreamingPackedDataset, lambda: Counted(tmp_path, 700), STREAM))
    cluster = Cluster("counted", 4, 3, splits=12, cyclic=True)
    for _ in range(70):
        cluster.step()
    ((first, _), *_) = told = passes(tmp_path)
    assert told == [(first, 0), (first, 1)] and first != os.getpid()
    states = cluster.states()
    monkeypatch.setenv("MASTER_PORT", "7")  # another launch
    other = Cluster("counted", 2, 2, states, splits=12, cyclic=True)
    for _ in range(20):
        other.step()
    assert [epoch for _, epoch in passes(tmp_path)[2:]] == [1] and passes(tmp_path)[2][0] != first


def test_readers_are_fed_once_passing_by_has_cost_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a pass, wherever that is; a source without cost never."""
    monkeypatch.setattr(NodeReader, "is_costly", False)
    for pause, worth, by in ((0.002, 0.02, 2), (0.0, 1e9, 1), (0.0, 0.0, None)):
        monkeypatch.setattr(node_reader, "WORTH_S", worth)
        source = Counted(tmp_path, 200, pause=pause)
        parts = [reader(source, f"switch {pause} {worth}") for _ in range(2)]
        taken = [one.taken(0, OfSplits({k: k}, 2)) for k, one in enumerate(parts)]
        found = [places(one) for one in taken]
        assert found == [[(k, k) for k in range(first, 200, 2)] for first in (0, 1)]
        if by is not None:
            assert len({pid for pid, _ in passes(tmp_path)}) == by
            assert [one.is_costly for one in parts] == [by == 2] * 2
        (tmp_path / "passes").unlink()


@pytest.mark.parametrize("kill_at", [1, 60, 199])
def test_nothing_is_lost_or_repeated_where_the_server_is_killed(
    kill_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Counted(tmp_path, 4000, kilobytes=4)
    one, other = reader(source, "kill"), reader(source, "kill")
    taken, rest = one.taken(0, OfSplits({0: 0}, 4)), other.taken(0, OfSplits({1: 5, 3: 3}, 4))
    found = [next(taken)[0] for _ in range(kill_at)]
    given = [next(rest)[0]]
    os.kill(passes(tmp_path)[0][0], signal.SIGKILL)
    found += [place for place, _ in taken]
    given += [place for place, _ in rest]
    assert found == list(range(0, 4000, 4))
    assert given == [place for place in range(3, 4000) if place % 4 == 3 or (place % 4 == 1 and place > 4)]
    assert [r.getMessage() for r in caplog.records] == [
        "each reader of this node reads the source by itself: the process that read it for all is gone"
    ]
    assert [pid == os.getpid() for pid, _ in passes(tmp_path)] == [False, True, True]


def test_a_reader_that_stops_or_dies_or_sleeps_holds_up_nobody(tmp_path: Path) -> None:
    """Four readers: one stops in the loop, one is thrown away, one sleeps and goes on later."""
    source = Counted(tmp_path, 3000, kilobytes=20)
    taken = [reader(source, "stops").taken(0, OfSplits({k: k}, 4)) for k in range(4)]
    first = [next(one)[0] for one in taken]
    assert first == [0, 1, 2, 3]
    taken[1].close()
    taken[2] = None  # type: ignore[call-overload]
    assert [place for place, _ in taken[0]] == list(range(4, 3000, 4))
    assert [place for place, _ in taken[3]] == list(range(7, 3000, 4))
    assert len(passes(tmp_path)) == 1


def test_what_a_log_holds_is_bounded_and_the_slowest_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readers, one of which stands still: memory, then files, then it has to read by itself."""
    limits = {"SEGMENT": 64 << 10, "KEPT": 256 << 10, "MOST": 1 << 20, "AHEAD": 128 << 10, "BLOCK": 32 << 10}
    for name, value in {**limits, "PATIENCE_S": 0.2, "LINGER_S": 0.5}.items():
        monkeypatch.setattr(node_server, name, value)
    log = node_server.Log(Counted(tmp_path, 4000, kilobytes=1), 0)
    fast, slow = log.join(OfSplits({0: 0}, 2), -1), log.join(OfSplits({1: 1}, 2), -1)
    assert fast is not None and slow is not None
    thread = threading.Thread(target=log.read)
    thread.start()
    found, most, spilled = [], 0, 0
    while (answer := log.block(fast))[0] == "samples":
        found += [place for place, _ in answer[1]]
        most, spilled = max(most, log.in_memory), max(spilled, log.in_files)
        assert log.in_memory <= (256 + 2 * 64) << 10 and log.in_files <= 1 << 20
        if len(found) == 100:  # what was put away comes as it was
            word, told = log.block(slow)
            assert word == "samples" and [place for place, _ in told][:3] == [1, 3, 5]
    assert answer == ("ended", 4000) and found == list(range(0, 4000, 2))
    assert spilled > 512 << 10 and log.block(slow)[0] == "behind"
    assert log.join(Places({3}), -1) is None and log.join(Places({3999}), -1) is not None
    log.cursors.clear()
    thread.join(30)
    assert not thread.is_alive() and not log.is_open
    assert log.join(OfSplits({0: 0}, 2), -1) is None


def test_a_log_reads_no_further_than_its_readers_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_server, "SEGMENT", 16 << 10)
    monkeypatch.setattr(node_server, "AHEAD", 64 << 10)
    log = node_server.Log(Counted(tmp_path, 4000, kilobytes=1), 0)
    cursor = log.join(OfSplits({0: 0}, 1), -1)
    assert cursor is not None
    thread = threading.Thread(target=log.read, daemon=True)
    thread.start()
    word, told = log.block(cursor)
    assert word == "samples"
    time.sleep(0.3)
    assert log.in_memory < sum(len(body) for _, body in told) + (64 + 3 * 16 << 10)
    log.leave(cursor)


def test_a_failure_of_the_source_is_that_of_reading_by_itself(tmp_path: Path) -> None:
    source = Counted(tmp_path, 40, fails=30)
    found = []
    with pytest.raises(SourceError, match="the source failed after 30 samples: ValueError: no more"):
        for place, _ in reader(source).taken(0, OfSplits({1: 1}, 2)):
            found.append(place)
    assert found == list(range(1, 30, 2))
    with pytest.raises(SourceError, match="the state holds sample 57 of a source that now has 20"):
        list(reader(Counted(tmp_path, 20)).taken(0, OfSplits({1: 59}, 2)))
    assert os.getpid() not in {pid for pid, _ in passes(tmp_path)}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (lambda folder: lambda: iter(Counted(folder, 40)), "it cannot be sent to the process"),
        (lambda folder: Changing(folder, 40), "made for one process"),
        (lambda folder: OfRank(folder, 40), "gets other samples"),
        (lambda folder: Later(folder, 40), "a sample cannot be unpickled (TypeError: not here)"),
    ],
)
def test_what_cannot_be_shared_is_read_by_each_reader_with_one_warning(
    kind: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeReader, "is_costly", False)
    monkeypatch.setattr(node_reader, "WORTH_S", 0.0)
    monkeypatch.setattr(
        NodeReader, "_is_worth", lambda self, sample: setattr(self, "is_costly", True) or True
    )
    source = kind(tmp_path)
    for k in range(2):
        assert places(reader(source).taken(0, OfSplits({k: k}, 2))) == [(i, i) for i in range(k, 40, 2)]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1 and why in warned[0]


def test_values_that_each_process_pickles_otherwise_are_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors (torch writes addresses) and sets (in an order for each process)."""
    source = Various(tmp_path, 40)
    one = reader(source, "various")
    for place, sample in enumerate(source):
        one._see(0, place, sample)
    assert len(set(one._seen[0])) == 40
    del one._seen[0][4:]
    found = [(place, int(sample["one"])) for place, sample in one.taken(0, OfSplits({1: 1}, 2))]
    assert found == [(place, int(sample["one"])) for place, sample in enumerate(source) if place % 2]
    assert not caplog.records and [pid == os.getpid() for pid, _ in passes(tmp_path)] == [True, False, True]


def test_samples_larger_than_all_that_is_read_ahead_come(tmp_path: Path) -> None:
    """The first ones, too, which are compared before a reader moves."""
    taken = reader(Counted(tmp_path, 6, kilobytes=40 << 10), "large").taken(0, OfSplits({1: 1}, 2))
    assert [place for place, _ in taken] == [1, 3, 5]


@pytest.mark.usefixtures("ranks")
def test_sources_that_begin_alike_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Two streams of one launch; each is begun once an epoch, whatever its source counts meanwhile."""
    streams = {
        (name, rank): StreamingPackedDataset(
            Named(tmp_path, 60, name), rank=rank, world_size=4, splits=4, **STREAM
        )
        for name in "ab"
        for rank in range(4)
    }
    for epoch in range(2):
        for (name, rank), stream in streams.items():
            stream.set_epoch(epoch)
            stream.reader.source.begun += rank * epoch
            for sample in (sample for pack in stream for sample in pack):
                assert sample["name"] == (name if sample["sample_id"] >= 8 else "head")
    assert len({pid for pid, _ in passes(tmp_path)}) == 4 and len(passes(tmp_path)) == 4


def test_marks_are_of_values_and_types() -> None:
    import torch

    row = torch.arange(6)
    odd = [row, row.view(2, 3), row.int(), row[:0], row.float(), row.tolist(), row.numpy(), {1, 2}, [1, 2]]
    odd += [frozenset({1, 2}), {1, 3}, {"a": {1}}, {"a": {2}}, row.flip(0), row.bfloat16(), row[0], row > 2]
    assert len({mark(one) for one in odd}) == len(odd)
    assert mark(row.view(2, 3).t()) == mark(row.view(2, 3).t().clone()) and mark(row) == mark(row.clone())


@pytest.mark.parametrize("samples", [2, 30])
def test_the_process_ends_where_its_readers_are_gone_while_it_waits(samples: int, tmp_path: Path) -> None:
    """Its source gives nothing any more, before or behind the first samples."""
    child = os.fork()
    if not child:
        list(reader(Waiting(tmp_path, samples), "waits").taken(0, OfSplits({0: 0}, 2)))
    until = time.monotonic() + 60
    while not passes(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    ((server, _),) = passes(tmp_path)
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while time.monotonic() < until:  # whoever takes in orphans may leave them unwaited for
        try:
            state = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.1)
    os.kill(server, signal.SIGKILL)
    pytest.fail("it is still there")


def test_a_folder_that_is_too_long_for_a_socket_is_told_at_once_by_every_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None holds the lock that says that a process is about to listen."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    Path(tempfile.gettempdir()).mkdir()
    source = Counted(tmp_path, 40)
    for k in range(2):
        monkeypatch.setattr(node_reader, "_told", told := set())
        assert places(reader(source).taken(0, OfSplits({k: k}, 2))) == [(i, i) for i in range(k, 40, 2)]
        assert told == {"OSError: AF_UNIX path too long"}


def test_who_shares_and_who_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of one node over an iterable; not a reader that is alone, nor one with an index."""

    def shares(source: Any, world_size: int) -> bool:
        stream = StreamingPackedDataset(source, rank=0, world_size=world_size, **STREAM)
        return isinstance(node_reader.node_reader(stream), NodeReader)

    iterable = Counted(tmp_path, 4)
    assert not shares(iterable, 1) and not shares(iterable, 4)  # no launcher: each rank by itself
    for name, value in {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert shares(iterable, 4) and not shares([1, 2], 4)
    mixed = {"a": iterable, "b": Counted(tmp_path, 3)}
    assert shares(WeightedSources(mixed), 4) and not shares(WeightedSources({**mixed, "c": [1]}), 4)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_are_fed_by_one_process(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real ones; spawned workers know nothing of this test, and measure first."""
    stream = StreamingPackedDataset(Counted(tmp_path, 600, pause=0.004), splits=6, **STREAM)
    packs = DataLoader(stream, batch_size=None, num_workers=3, multiprocessing_context=start)
    found = [[sample["sample_id"] for sample in pack] for pack in packs]
    begun = passes(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(NodeReader, "is_costly", False)
        quick = StreamingPackedDataset(Counted(tmp_path, 600), splits=6, **STREAM)
        alone = DataLoader(quick, batch_size=None, num_workers=3, multiprocessing_context="fork")
        assert found == [[sample["sample_id"] for sample in pack] for pack in alone]
    assert len(begun) == (1 if start == "fork" else 4) and os.getpid() not in dict(begun)


def test_sockets_of_killed_servers_are_swept(tmp_path: Path) -> None:
    with Listener(str(tmp_path / "alive"), "AF_UNIX"), socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
        dead.close()
        node_reader._sweep(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["alive"]
