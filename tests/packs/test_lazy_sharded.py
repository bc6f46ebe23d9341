"""LazyShardedDataset: every pack once, in step, resumed anywhere, under other people's samplers."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from packtrain import files
from packtrain.collate import PaddingFreeCollator
from packtrain.data import LazyShardedDataset
from packtrain.errors import ChecksumError, ForeignArtefactError, FormatError, InputError, WaitTimeoutError
from packtrain.packs.growing import LengthUnknownError
from packtrain.store._folders import sealed
from packtrain.store.chunk_folder import END, INDEX, STREAM, STREAM_SCHEMA, chunk_name
from packtrain.store.chunks import ChunkWriter
from packtrain.testing import crash_points

Reader = LazyShardedDataset


class Feed:
    """Writes the chunks of a stream one after the other: chunk c has counts[c] packs of 1 or 2 samples."""

    def __init__(self, folder: Path, counts: list[int], stream: str = "s1") -> None:
        self.folder, self.counts, self.stream = folder, counts, stream
        self.next = self.samples = 0

    def begin(self) -> Feed:
        told = {"schema": STREAM_SCHEMA, "stream": self.stream, "config": {}}
        files.publish_json(self.folder / STREAM, sealed(told))
        return self

    def chunk(self) -> None:
        meta = {"stream": self.stream, "chunk": self.next}
        with ChunkWriter(self.folder / chunk_name(self.next), media="tensor", meta=meta) as writer:
            for row in range(self.counts[self.next]):
                pack = []
                for _ in range(1 + row % 2):
                    ids = torch.tensor([self.samples + 1, 7, 8])
                    pack.append(
                        {
                            "sample_id": self.samples,
                            "input_ids": ids,
                            "labels": ids,
                            "position_ids": torch.arange(3),
                        }
                    )
                    self.samples += 1
                writer.add(pack)
        self.next += 1

    def end(self) -> None:
        told = {
            "schema": STREAM_SCHEMA,
            "stream": self.stream,
            "chunks": self.next,
            "packs": sum(self.counts),
        }
        files.publish_json(self.folder / END, sealed({**told, "stats": {}, "ledger": []}))

    def all(self) -> Feed:
        self.begin()
        while self.next < len(self.counts):
            self.chunk()
        self.end()
        return self


class Ticks:
    """A clock in which every sleep lets the world go on."""

    def __init__(self, turn: Callable[[], Any] = lambda: None) -> None:
        self.time, self.turn = 0.0, turn

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.turn()


UNEVEN = [3, 2, 4, 1, 3, 3, 2]


def ids(packs: Iterator[Any] | list[Any]) -> list[int]:
    return [one for pack in packs for one in pack["sample_ids"]]


@pytest.fixture
def stream(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "out", UNEVEN).all()


def test_locate(tmp_path: Path) -> None:
    """Rank 3 of 8 with 1000-row chunks: 0 -> (3, 0), 1500 -> (11, 500)."""
    out = tmp_path / "out"
    Feed(out, []).begin()
    files.publish_json(out / INDEX, sealed({"stream": "s1", "packs": [1000] * 12}))
    reader = Reader(out, rank=3, world_size=8, timeout_s=1)
    assert [reader.locate(local) for local in (0, 999, 1000, 1500)] == [(3, 0), (3, 999), (11, 0), (11, 500)]
    with pytest.raises(WaitTimeoutError):
        Reader(out, rank=3, world_size=8, timeout_s=0.1, clock=Ticks()).locate(2000)


@pytest.mark.spec(
    "002",
    "each rank reads only its own packs; together all of them once, in equal steps",
    key="`data.kind: growing` (`sharded_lazy`)",
    api="`LazyShardedDataset`",
)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 9])
def test_union_once_and_equal_steps(stream: Feed, world: int) -> None:
    steps, seen = set(), []
    for rank in range(world):
        reader = Reader(stream.folder, rank, world, timeout_s=1)
        packs = list(reader)
        assert {pack.chunk % world for pack in packs if not pack.is_filler} <= {rank}
        assert [pack.slot for pack in packs] == [rank + step * world for step in range(len(packs))]
        assert len(packs) == reader.steps == len(reader) // world
        for pack in packs:
            assert pack["lengths"].sum() == len(pack["input_ids"]) == pack["cu_seq_lens"][-1]
            if pack.is_filler:
                assert pack["sample_ids"] == [] and pack["labels"].tolist() == [-100] and pack["filler"]
        steps.add(len(packs))
        seen += ids(packs)
    assert sorted(seen) == list(range(stream.samples)) and len(steps) == 1


def test_no_rank_starts_a_step_that_another_cannot_take(tmp_path: Path) -> None:
    """At every moment every rank has started exactly the steps for which all packs are there."""
    feed = Feed(tmp_path / "out", UNEVEN)
    started: list[int] = []
    readers = []
    for rank in range(3):
        readers.append(Reader(feed.folder, rank, 3, timeout_s=0.1, clock=Ticks()))
    said = r"rank 0 waited .*stream\.json.*no producer has begun: there is no folder"
    with pytest.raises(WaitTimeoutError, match=said):
        next(iter(readers[0]))
    feed.begin()
    passes = [reader.slots() for reader in readers]
    for chunks in range(len(UNEVEN) + 1):
        owned = [sum(UNEVEN[rank:chunks:3]) for rank in range(3)]
        for rank in range(3):
            done = readers[rank]._cursor.step if readers[rank]._cursor else 0
            while True:
                try:
                    next(passes[rank])
                    done += 1
                    readers[rank]._begin().step = done
                except WaitTimeoutError:
                    passes[rank] = _resumed(readers[rank])
                    break
            started.append(done)
            assert done == min(owned)
        if chunks < len(UNEVEN):
            feed.chunk()
    feed.end()
    assert [len(list(one)) + started[-1] for one in passes] == [max(sum(UNEVEN[r::3]) for r in range(3))] * 3


def _resumed(reader: Reader) -> Iterator[int]:
    reader._resumed = True
    return reader.slots()


@pytest.mark.spec(
    "002",
    "chunks that are not there yet are waited for",
    key="`data.timeout_s`, `data.poll_s`",
    api="`LazyShardedDataset(timeout_s=)`",
)
def test_waiting_goes_on_as_chunks_come(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "out", UNEVEN)
    turns = iter([feed.begin, *[feed.chunk] * len(UNEVEN), feed.end])
    reader = Reader(feed.folder, clock=Ticks(lambda: next(turns)()))
    with pytest.raises(LengthUnknownError):
        len(reader)
    assert ids(list(reader)) == list(range(feed.samples))
    assert len(reader) == sum(UNEVEN)


@pytest.mark.spec(
    "002",
    "resume, also on another number of ranks",
    key="`training.resume`",
    api="`LazyShardedDataset.load_state_dict`",
)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("after", [1, 2, 3, 5, 6])
def test_resume_at_every_world_size(stream: Feed, world: int, after: int) -> None:
    """What was read before and what is read behind the state is everything, once, whatever the new world."""
    before = [Reader(stream.folder, rank, world) for rank in range(world)]
    used = [ids([next(packs) for _ in range(after)]) for reader in before for packs in [iter(reader)]]
    whole = [one for many in used for one in many]
    state = before[-1].state_dict()
    for again in (1, 2, 3, 4):
        rest, steps = [], set()
        for rank in range(again):
            reader = Reader(stream.folder, rank, again, start="beginning")
            reader.load_state_dict(state)
            packs = list(reader)
            steps.add(len(packs))
            rest += ids(packs)
            assert ids(list(reader)) == ids(packs) or again == world  # a later pass starts at its start
        assert sorted(whole + rest) == list(range(stream.samples)) and len(steps) == 1


def test_state_of_another_stream_is_refused(stream: Feed, tmp_path: Path) -> None:
    state = Reader(stream.folder).state_dict()
    Feed(tmp_path / "other", [2], "s2").all()
    reader = Reader(tmp_path / "other")
    reader.load_state_dict(state)
    with pytest.raises(ForeignArtefactError, match="of stream s1, the folder holds s2"):
        next(iter(reader))
    with pytest.raises(FormatError, match="not the state of a reader"):
        reader.load_state_dict({"step": 3})
        next(iter(reader))


@pytest.mark.spec(
    "002",
    "used chunks are marked `.completed`, after use and checkpoint",
    key="`data.start`",
    api="`LazyShardedDataset.acknowledge`",
)
def test_completed_only_after_use_and_checkpoint(stream: Feed) -> None:
    def marks() -> list[int]:
        return sorted(int(path.name[6:14]) for path in stream.folder.glob("*.completed"))

    one, two = (Reader(stream.folder, rank, 2) for rank in range(2))
    packs = iter(one)
    for _ in range(7):  # chunks 0 (3 packs) and 2 (4 packs)
        next(packs)
    assert marks() == []
    assert one.acknowledge(2) == [] and marks() == []
    assert one.acknowledge() == [0, 2] and marks() == [0, 2]
    assert one.acknowledge() == []
    assert Reader(stream.folder, 0, 2).state_dict()["step"] == 0, "rank 1 has acknowledged nothing"
    assert two.acknowledge(3) == [1, 3]
    again = Reader(stream.folder, 0, 2)
    assert again.state_dict()["step"] == 3 and next(iter(again)).chunk == 2
    alone = Reader(stream.folder, 0, 1)
    assert alone.state_dict()["start"] == 6, "another world goes on behind what both acknowledged"
    assert ids(list(Reader(stream.folder, start="beginning"))) == list(range(stream.samples))


def test_crash_in_every_write_of_a_reader(tmp_path: Path) -> None:
    """Train two steps, save, acknowledge, stop anywhere: what a checkpoint covers is used once."""
    whole = Feed(tmp_path / "whole", UNEVEN).all()
    path = tmp_path / "used"

    def verb(folder: Path) -> None:
        reader = Reader(folder)
        used: list[int] = []
        if path.exists():  # the checkpoint: samples and state together
            used, state = pickle.loads(path.read_bytes())
            reader.load_state_dict(state)
        for number, pack in enumerate(reader):
            used += pack["sample_ids"]
            if number % 2:
                path.write_bytes(pickle.dumps((used, reader.state_dict())))
                reader.acknowledge()
        path.write_bytes(pickle.dumps((used, reader.state_dict())))
        reader.acknowledge()
        assert used == list(range(whole.samples))

    def prepare(folder: Path) -> None:
        path.unlink(missing_ok=True)
        shutil.copytree(whole.folder, folder)

    assert crash_points(verb, tmp_path / "scratch", prepare=prepare, every=1) > 60


# --------------------------------------------------------------------------------------------
# other people's samplers and loaders
# --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [2, 8])
def test_under_distributed_sampler(stream: Feed, world: int) -> None:
    seen = []
    for rank in range(world):
        reader = Reader(stream.folder, rank, world)
        sampler = DistributedSampler(reader, num_replicas=world, rank=rank, shuffle=False)
        loader = DataLoader(reader, batch_size=None, sampler=sampler)
        packs = list(loader)
        assert {pack.chunk % world for pack in packs if not pack.is_filler} <= {rank}
        seen += ids(packs)
    assert sorted(seen) == list(range(stream.samples))


@pytest.mark.spec(
    "002",
    "under Megatron's samplers: global indices",
    key="`total_steps`",
    api="`LazyShardedDataset(total_steps=)`",
)
@pytest.mark.parametrize("micro", [1, 2])
def test_under_a_megatron_strided_sampler(stream: Feed, micro: int) -> None:
    """Rank r takes r*micro … of every global batch, from a number of consumed samples on."""
    world, seen = 2, []
    total = len(Reader(stream.folder, 0, world))

    def strided(rank: int, consumed: int) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(consumed, total):
            batch.append(index)
            if len(batch) == micro * world:
                yield batch[rank * micro : (rank + 1) * micro]
                batch = []
        if batch:
            yield batch[rank * micro : (rank + 1) * micro]

    for rank in range(world):
        reader = Reader(stream.folder, rank, world)
        taken = list(strided(rank, 0))
        seen += [one for batch in taken for one in ids([reader[index] for index in batch])]
        resumed = list(strided(rank, 4 * micro))
        assert resumed == taken[2:]
    assert sorted(seen) == list(range(stream.samples))
    with pytest.raises(IndexError):
        reader[total]
    with pytest.raises(IndexError):
        reader[-1]


@pytest.mark.parametrize("ended", [True, False])
def test_under_accelerate(tmp_path: Path, ended: bool) -> None:
    """accelerate deals batches to ranks itself; while the stream grows it needs the slots of all ranks."""
    from accelerate.data_loader import prepare_data_loader

    feed = Feed(tmp_path / "out", UNEVEN)
    if ended:
        feed.all()
    seen = []
    for rank in range(2):
        turns = iter([feed.begin, *[feed.chunk] * len(UNEVEN), feed.end])
        reader = Reader(feed.folder, rank, 2, clock=Ticks(lambda turns=turns: next(turns)()))
        sampler = None if ended else reader.sampler(all_ranks=True)
        loader = DataLoader(reader, batch_size=1, collate_fn=lambda packs: packs[0], sampler=sampler)
        prepared = prepare_data_loader(
            loader, num_processes=2, process_index=rank, put_on_device=False, even_batches=ended
        )
        packs = list(prepared)
        assert {pack.chunk % 2 for pack in packs if not pack.is_filler} == {rank}
        seen += ids(packs)
    assert sorted(seen) == list(range(feed.samples))


def test_a_length_that_was_promised(tmp_path: Path) -> None:
    """Samplers that ask for a length before END; a stream that ends earlier is filled up."""
    feed = Feed(tmp_path / "out", UNEVEN)
    turns = iter([feed.begin, *[feed.chunk] * len(UNEVEN), feed.end])
    reader = Reader(feed.folder, 1, 2, total_steps=12, clock=Ticks(lambda: next(turns)()))
    sampler = DistributedSampler(reader, num_replicas=2, rank=1, shuffle=False)
    assert len(reader) == 24 and len(sampler) == 12
    packs = list(DataLoader(reader, batch_size=None, sampler=sampler))
    mine = sum(UNEVEN[1::2])
    assert [pack.is_filler for pack in packs] == [False] * mine + [True] * (12 - mine)
    assert [pack.slot for pack in Reader(feed.folder, 1, 2, total_steps=3)] == [1, 3, 5]
    with pytest.raises(IndexError):
        reader[24]


def test_clocks_of_other_hosts_do_not_matter(stream: Feed) -> None:
    for number, path in enumerate(sorted(stream.folder.iterdir())):
        os.utime(path, ns=(0, (number % 2) * 4_000_000_000_000_000_000))  # 1970 and 2096
    assert ids(list(Reader(stream.folder))) == list(range(stream.samples))


def test_a_row_without_its_samples_is_no_pack(stream: Feed) -> None:
    """Packed data without boundaries are refused, never taken for one sample."""
    pack = Reader(stream.folder)[1]
    with pytest.raises(InputError, match="undeclared field"):
        PaddingFreeCollator()([dict(pack)])


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_share_a_rank(stream: Feed, workers: int) -> None:
    reader = Reader(stream.folder, 1, 2, cache_chunks=1)
    alone = [pack["sample_ids"] for pack in Reader(stream.folder, 1, 2)]
    mapped = DataLoader(reader, batch_size=None, sampler=reader.sampler(), num_workers=workers)
    assert [pack["sample_ids"] for pack in mapped] == alone
    streamed = DataLoader(reader.stream(), batch_size=None, num_workers=workers)
    assert [pack["sample_ids"] for pack in streamed] == alone
    collated = DataLoader(
        reader, batch_size=1, sampler=reader.sampler(), num_workers=workers, collate_fn=PaddingFreeCollator()
    )
    batches = list(collated)
    assert [list(batch.sample_ids) for batch in batches] == alone
    assert reader.at_step(2)["step"] == 2
    if workers:
        with pytest.raises(InputError, match="does not know how far"):
            reader.state_dict()
    else:
        assert reader.state_dict()["step"] == len(batches)


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "out", [1] * 20).all()
    reader = Reader(feed.folder, cache_chunks=3)
    for _ in reader:
        assert len(reader._open) <= 3


# --------------------------------------------------------------------------------------------
# folders that are not as they should be
# --------------------------------------------------------------------------------------------
def test_torn_and_missing_chunks_are_named(stream: Feed) -> None:
    path = stream.folder / chunk_name(2)
    whole, manifest = path.read_bytes(), path.with_suffix(".json").read_bytes()

    def fault() -> str:
        with pytest.raises(FormatError) as caught:
            list(Reader(stream.folder, clock=Ticks()))
        return str(caught.value)

    path.write_bytes(whole[:50])
    assert "chunk_00000002.arrow has 50 bytes" in fault()
    path.unlink()
    assert "chunk_00000002.arrow is missing" in fault()
    path.with_suffix(".json").unlink()
    assert "chunk_00000002.arrow is missing, though later chunks are there" in fault()
    path.write_bytes(whole)
    assert "chunk_00000002.json is missing" in fault()
    path.with_suffix(".json").write_bytes(manifest[:40])
    assert "chunk_00000002.json is torn" in fault()
    path.with_suffix(".json").write_bytes(manifest.replace(b'"s1"', b'"s2"'))
    assert "chunk_00000002.json is torn or was edited" in fault()
    path.with_suffix(".json").write_bytes(manifest)
    assert ids(list(Reader(stream.folder, clock=Ticks()))) == list(range(stream.samples))


def test_changed_bytes_are_named_not_trained(stream: Feed) -> None:
    """One byte of a token, same size: the chunk's digest is checked once, before its first pack."""
    path = stream.folder / chunk_name(2)
    whole = path.read_bytes()
    place = whole.rindex(b"\x07\x08")
    path.write_bytes(whole[:place] + b"\x09" + whole[place + 1 :])
    with pytest.raises(ChecksumError, match="chunk_00000002"):
        list(Reader(stream.folder, clock=Ticks()))
    assert ids(list(Reader(stream.folder, clock=Ticks(), verify=False))) == list(range(stream.samples))


def test_a_late_chunk_is_waited_for(stream: Feed, tmp_path: Path) -> None:
    """A network listing may show END and later chunks before an earlier one."""
    path = stream.folder / chunk_name(2)
    kept = tmp_path / "kept"
    path.rename(kept)
    clock = Ticks(lambda: clock.time > 30 and kept.exists() and kept.rename(path))
    assert ids(list(Reader(stream.folder, clock=clock))) == list(range(stream.samples))


def test_a_network_client_that_caches_absent_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names stay absent to open and stat until their folder is listed anew: every look lists it."""
    feed = Feed(tmp_path / "out", UNEVEN)
    listed: set[str] = set()
    listdir, stat, opened = os.listdir, os.stat, io.open

    def list_folder(folder: Any) -> list[str]:
        names = listdir(folder)
        listed.update(os.path.join(os.fspath(folder), name) for name in names)
        return names

    def guarded(do: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any, *args: Any, **options: Any) -> Any:
            inside = isinstance(path, str | Path) and os.path.dirname(path) == str(feed.folder)
            if inside and os.fspath(path) not in listed:
                raise FileNotFoundError(2, "cached as absent", str(path))
            return do(path, *args, **options)

        return checked

    turns = iter([feed.begin, *[feed.chunk] * len(UNEVEN), feed.end])

    def turn() -> None:
        with monkeypatch.context() as own:  # the producer is on another host
            own.setattr(os, "stat", stat)
            own.setattr(io, "open", opened)
            own.setattr("builtins.open", opened)
            next(turns)()

    monkeypatch.setattr(os, "listdir", list_folder)
    monkeypatch.setattr(os, "stat", guarded(stat))
    monkeypatch.setattr(io, "open", guarded(opened))
    monkeypatch.setattr("builtins.open", guarded(opened))
    clock = Ticks(turn)
    assert ids(list(Reader(feed.folder, clock=clock))) == list(range(feed.samples))
    assert clock.time == len(UNEVEN) + 2, "each chunk is seen at the first look after it came"


def test_two_streams_in_one_folder(stream: Feed) -> None:
    other = Feed(stream.folder, [*UNEVEN, 2], "s2")
    other.next = len(UNEVEN)
    other.chunk()
    with pytest.raises(ForeignArtefactError, match="is of stream s2"):
        list(Reader(stream.folder))


def test_wait_messages_tell_of_the_producer(tmp_path: Path) -> None:
    from packtrain.waiting.claim import Claim

    feed = Feed(tmp_path / "out", [1, 1]).begin()
    with Claim.take(feed.folder / "producer", threaded=False) as claim:
        claim.say("encoding chunk 0")
        claim.pulse()
        with pytest.raises(WaitTimeoutError, match=r"is encoding chunk 0"):
            next(iter(Reader(feed.folder, timeout_s=3, clock=Ticks())))
        claim.fail(InputError("no space"))
    with pytest.raises(WaitTimeoutError, match=r"failed: no space"):
        next(iter(Reader(feed.folder, timeout_s=3, clock=Ticks())))


def test_bad_arguments(tmp_path: Path) -> None:
    for options in (
        {"rank": 2, "world_size": 2},
        {"timeout_s": -1},
        {"poll_s": 0},
        {"start": "x"},
    ):
        with pytest.raises(InputError):
            Reader(tmp_path, **options)


def test_ten_thousand_old_chunks(tmp_path: Path) -> None:
    """A late reader opens the index and a few manifests, not ten thousand."""
    out = tmp_path / "out"
    feed = Feed(out, [2] * 10_003)
    feed.begin()
    feed.next = 10_000
    files.publish_json(out / INDEX, sealed({"stream": "s1", "packs": [2] * 10_000}))
    for _ in range(3):
        feed.chunk()
    files.publish_json(
        out / "acks" / "w00001_r00000.json",
        {
            "stream": "s1",
            "order_world": 1,
            "start": 0,
            "world_size": 1,
            "rank": 0,
            "step": 20_000,
            "slots": 20_000,
        },
    )
    feed.end()
    assert ids(list(Reader(out))) == list(range(feed.samples))


def test_what_cannot_have_been_read_is_not_acknowledged(stream: Feed) -> None:
    """A step that is none would mark chunks as used up that nobody read; nothing is written."""
    reader = Reader(stream.folder, 0, 2)
    state = reader.at_step(2)
    for wrong in (10**6, -1, {**state, "step": -1}, {**state, "stream": "other"}, {}):
        with pytest.raises(InputError):
            reader.acknowledge(wrong)
    assert not list(stream.folder.glob("*.completed")) and not (stream.folder / "acks").exists()
    reader.acknowledge(reader.steps)
    assert len(list(stream.folder.glob("*.completed"))) == 4
    promised = Reader(stream.folder, 0, 2, total_steps=50, start="beginning")
    assert promised.acknowledge(50) == []  # fillers behind the end of a promised length were read


@pytest.mark.parametrize("key", ["order_world", "world_size", "start", "rank", "step"])
def test_a_state_that_is_none(stream: Feed, key: str) -> None:
    reader = Reader(stream.folder, 0, 2)
    for wrong in ({**reader.at_step(1), key: -1}, {}, None):
        with pytest.raises(FormatError, match="is not the state of a reader"):
            reader.load_state_dict(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("torn", ["[]", "{", '{"stream": "s1"}', '{"stream": "s1", "rank": "x"}'])
def test_a_torn_acknowledgement_counts_as_none(stream: Feed, torn: str) -> None:
    for rank in range(2):
        Reader(stream.folder, rank, 2, start="beginning").acknowledge(2)
    (stream.folder / "acks" / "w00002_r00001.json").write_text(torn)
    assert len(list(Reader(stream.folder, 0, 2))) == Reader(stream.folder, 0, 2).steps


def test_folders_and_seconds_that_are_none(stream: Feed) -> None:
    with pytest.raises(InputError, match="is a file"):
        Reader(stream.folder / END)
    for wait, poll in ((float("nan"), 1.0), (0, float("nan"))):
        with pytest.raises(InputError, match="poll_s"):
            Reader(stream.folder, 0, 1, wait, poll)


@pytest.mark.parametrize(("world", "again"), [(1, 1), (2, 2), (3, 2), (2, 5), (1, 4)])
def test_a_state_behind_the_end_is_refused(tmp_path: Path, world: int, again: int) -> None:
    """The folder was produced anew of fewer samples, with the same id: it would read nothing, silently."""
    long, short = Feed(tmp_path / "long", [*UNEVEN, 5, 6, 4]).all(), Feed(tmp_path / "short", [2, 1]).all()
    reader = Reader(long.folder, world_size=world)
    state = reader.at_step(reader.steps - 1)
    opened = Reader(short.folder, world_size=again)
    opened.load_state_dict(state)
    for read in (list, len, lambda one: one[0], lambda one: one.steps, lambda one: one.acknowledge()):
        with pytest.raises(ForeignArtefactError, match=r"behind slot \d+, and the stream in \S+short ended"):
            read(opened)
    feed = Feed(tmp_path / "grows", [2, 1]).begin()  # not ended as yet: it is found when it ends
    turns = iter([feed.chunk, feed.chunk, feed.end])
    opened = Reader(feed.folder, world_size=again, clock=Ticks(lambda: next(turns)()))
    opened.load_state_dict(state)
    with pytest.raises(ForeignArtefactError, match="ended after"):
        list(opened)


@pytest.mark.parametrize("worlds", [(4, 3, 2), (7, 2, 2), (16, 2, 1)])
def test_a_state_at_the_end_is_none_behind_it(stream: Feed, worlds: tuple[int, ...]) -> None:
    """The last step of many ranks stands behind the last pack; whoever resumes there is done, not refused."""
    alone = Reader(stream.folder, start="beginning")
    state = alone.at_step(1)
    for number, world in enumerate(worlds):
        for rank in range(world):
            reader = Reader(stream.folder, rank, world, start="beginning")
            reader.load_state_dict(state)
            packs = list(reader)
            assert (number == 0) == bool(packs)
            reader.acknowledge(-(-(18 - 1) // world) if number == 0 else None)
        state = reader.at_step(reader.steps)
        assert state["slots"] > 18 == state["end"]
    assert list(Reader(stream.folder, world_size=worlds[-1])) == []
    assert list(Reader(stream.folder, world_size=5)) == []
    promised = Reader(stream.folder, 0, 2, total_steps=50, start="beginning")
    promised.load_state_dict(Reader(stream.folder, 0, 2, total_steps=50, start="beginning").at_step(40))
    assert promised.steps == 50 and promised[98].is_filler


def test_an_acknowledgement_never_goes_back(stream: Feed) -> None:
    """Whoever says less later (an older checkpoint, another pass) takes nothing back."""
    two = [Reader(stream.folder, rank, 2, start="beginning") for rank in range(2)]
    for reader in two:
        reader.acknowledge(4)
    held = {path.name: path.read_bytes() for path in (stream.folder / "acks").iterdir()}
    assert two[0].acknowledge(1) == [] and two[1].acknowledge(two[1].at_step(0)) == []
    Reader(stream.folder, 0, 2, start="beginning").acknowledge(3)
    assert {path.name: path.read_bytes() for path in (stream.folder / "acks").iterdir()} == held
    assert Reader(stream.folder, 0, 2).state_dict()["step"] == 4
    older = two[0].at_step(1)
    for rank in range(3):  # three ranks go on behind an older checkpoint: less far, so it does not count
        reader = Reader(stream.folder, rank, 3)
        reader.load_state_dict(older)
        reader.acknowledge(1)
    assert Reader(stream.folder, 0, 2).state_dict()["slots"] == 8
    for reader in two:
        reader.acknowledge(5)
    assert Reader(stream.folder, 0, 2).state_dict()["slots"] == 10


def test_launches_of_one_size_keep_their_own_cursors(stream: Feed) -> None:
    """Ranks of a launch that began at slot 3 take other slots than those of one that began at 0."""
    for rank in range(2):
        Reader(stream.folder, rank, 2, start="beginning").acknowledge(4)
    alone = Reader(stream.folder, start="beginning")
    state = {**alone.at_step(3), "order_world": 2}
    later = []
    for rank in range(2):
        later.append(Reader(stream.folder, rank, 2, start="beginning"))
        later[-1].load_state_dict(state)
    later[0].acknowledge(3)  # slots 3, 5, 7; its neighbour has said nothing
    assert Reader(stream.folder, 0, 2).state_dict()["slots"] == 8
    assert len(list((stream.folder / "acks").iterdir())) == 3
    later[1].acknowledge(3)
    assert Reader(stream.folder, 0, 2).state_dict()["slots"] == 9


@pytest.mark.parametrize("name", ["plan.json", "lengths.json", "run.json", ".packtrain"])
def test_a_folder_of_another_kind_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """No producer will begin there: exported chunks are read by ChunkedPacks, a plan by PackedDataset."""
    (tmp_path / name).touch()
    with pytest.raises(ForeignArtefactError, match=f"is no folder of a stream: it holds {name}"):
        next(iter(Reader(tmp_path, timeout_s=1, clock=Ticks())))
    (tmp_path / name).unlink()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "chunk_00000000.arrow").touch()  # listed before stream.json
    with pytest.raises(WaitTimeoutError):
        next(iter(Reader(tmp_path, timeout_s=1, clock=Ticks())))


def test_a_producer_that_waits_for_readers_who_cannot_begin(tmp_path: Path) -> None:
    """Two chunks may be ahead, and three ranks need three: without an error both wait for ever."""
    from packtrain.waiting.claim import Claim

    feed = Feed(tmp_path / "out", [1, 1, 1]).begin()
    feed.chunk()
    feed.chunk()
    with Claim.take(feed.folder / "producer", threaded=False) as claim:
        claim.say("waiting for readers: 2 chunks ahead")
        claim.pulse()
        with pytest.raises(WaitTimeoutError, match=r"rank 1 cannot begin: .*2 chunks.*larger --max-ahead"):
            next(iter(Reader(feed.folder, 1, 3, clock=Ticks(claim.pulse))))
        two = iter(Reader(feed.folder, 0, 2, timeout_s=70, clock=Ticks(claim.pulse)))
        next(two)  # it has begun: a checkpoint may come, so it waits, and says so
        with pytest.raises(
            WaitTimeoutError, match=r"is waiting for readers.*neither goes on: raise --max-ahead"
        ):
            next(two)
        claim.say("encoding chunk 2")
        claim.pulse()
        turns = iter([*[claim.pulse] * 40, feed.chunk, feed.end])
        assert len(list(Reader(feed.folder, 1, 3, clock=Ticks(lambda: next(turns)())))) == 1


def test_old_keywords_of_waiting_are_taken_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packtrain import moved
    from packtrain.data import LazyShardedDataset

    monkeypatch.setattr(moved, "_told", set())
    with pytest.warns(DeprecationWarning) as told:
        old = LazyShardedDataset(tmp_path, max_wait_time=3, poll_interval=0.5)
    assert [str(one.message).partition(": ")[2] for one in told] == [
        "keyword max_wait_time is timeout_s now",
        "keyword poll_interval is poll_s now",
    ]
    with pytest.raises(InputError, match="max_wait_time and timeout_s are one option"):
        LazyShardedDataset(tmp_path, timeout_s=3, max_wait_time=3)
    for now in (old, LazyShardedDataset(tmp_path, 0, 1, 3, 0.5), LazyShardedDataset(tmp_path, timeout_s=3)):
        assert now.timeout_s == 3
    assert (old.poll_s, LazyShardedDataset(tmp_path, None, None, 0, 0.5).poll_s) == (0.5, 0.5)
