"""What every format writes from: packs of a plan, one at a time, with the samples read from their source.

A `Job` is plain data and goes to worker processes. Part k holds the packs [k * maxcount, (k + 1) * maxcount);
nothing else decides its content, so any number of workers in any order gives the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from .. import files
from ..errors import DriftError, InputError, SampleError
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..store.pack_records import PackRecord, pack_key

# --------------------------------------------------------------------------------------------
# The members of a part, read by a thread ahead of the one that writes them
# --------------------------------------------------------------------------------------------
# Reading, summing and building records overlap with writing. Members are handed over many at once, for a
# hand-over costs more than a small member; what is read and not yet written is bounded in bytes, whatever the
# size of a medium.
#: Pack, name behind its key, bytes; the last member of a pack is its record, `json`.
Member = tuple[int, str, bytes]

_BATCH = 1 << 20  # bytes handed over at once
_AHEAD = 1 << 23  # bytes read and not yet written

T = TypeVar("T")


class Lane(Generic[T]):
    """A queue from one thread to another, bounded in bytes; one item always has room."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._items: deque[tuple[T, int]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: T, size: int) -> bool:
        """Wait for room; False when the lane was closed: nobody wants the item."""
        with self._changed:
            while not self._closed and self._items and self._held + size > self._limit:
                self._changed.wait()
            if self._closed:
                return False
            self._items.append((item, size))
            self._held += size
            self._changed.notify_all()
            return True

    def get(self) -> T:
        """Wait for the next item."""
        with self._changed:
            while not self._items:
                self._changed.wait()
            item, size = self._items.popleft()
            self._held -= size
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Let go of what is in it; every `put` from now on is refused."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


@contextlib.contextmanager
def members_ahead(job: Job, part: int, **spelling: Any) -> Iterator[Iterator[Member]]:
    """The members of all packs of a part, in order.

    Raises:
        Exception: what reading a pack raised, where its members would have come.
    """
    lane: Lane[list[Member] | BaseException | None] = Lane(_AHEAD)
    thread = threading.Thread(
        target=_read, args=(lane, job, part, spelling), name="packtrain-read", daemon=True
    )
    thread.start()
    try:
        yield _handed(lane)
    finally:
        lane.close()
        thread.join()


def _handed(lane: Lane[list[Member] | BaseException | None]) -> Iterator[Member]:
    while (batch := lane.get()) is not None:
        if isinstance(batch, BaseException):
            raise batch
        yield from batch


def _read(
    lane: Lane[list[Member] | BaseException | None], job: Job, part: int, spelling: dict[str, Any]
) -> None:
    batch: list[Member] = []
    held = 0
    try:
        for number in job.packs_of(part):
            for name, data in job.members(job.read(number), **spelling):
                batch.append((number, name, data))
                held += len(data)
                if held >= _BATCH:
                    if not lane.put(batch, held):
                        return
                    batch, held = [], 0
        lane.put(batch, held)
        lane.put(None, 0)
    except BaseException as error:  # raised again by the thread that writes
        lane.put(error, 0)


# --------------------------------------------------------------------------------------------
# What every format writes from: packs of a plan, one at a time, with the samples read from their source
# --------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Pack:
    """One pack of the plan with its samples."""

    number: int
    ids: list[int]
    samples: list[Mapping[str, Any]]
    tokens: list[int] | None

    @property
    def key(self) -> str:
        return pack_key(self.number)


@dataclass(frozen=True, kw_only=True)
class Job:
    """An export: what, from where, to where.

    Attributes:
        out: the folder written to.
        format: option name.
        plan_folder, lengths_folder: where plan and lengths are.
        source: samples by id.
        template: encodes samples, for formats that hold them so.
        task: see `store.pack_records`.
        maxcount: packs of a part (and of a shard at most).
        maxsize: bytes after which the next pack opens a new shard.
        options: of the format.
    """

    out: Path
    format: str
    plan_folder: Path
    lengths_folder: Path | None
    source: Any
    template: Any = None
    task: str = "multi_turn"
    maxcount: int = 1000
    maxsize: int = 3_000_000_000
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def plan(self) -> PackPlan:
        return PackPlan.load(self.plan_folder)

    @cached_property
    def tokens(self) -> Any:
        """int[n] of the samples, or None where the lengths are gone."""
        return None if self.lengths_folder is None else Lengths.load(self.lengths_folder).tokens

    @property
    def parts(self) -> int:
        return -(-len(self.plan) // self.maxcount)

    def packs_of(self, part: int) -> range:
        return range(part * self.maxcount, min((part + 1) * self.maxcount, len(self.plan)))

    def read(self, number: int) -> Pack:
        """A pack with its samples.

        Raises:
            SampleError: one of them cannot be read; names it.
        """
        ids = np.asarray(self.plan[number]).tolist()
        samples = []
        for sample_id in ids:
            try:
                samples.append(self.source[sample_id])
            except SampleError as error:
                raise self.fault(error, number, sample_id) from error
        tokens = None if self.tokens is None else self.tokens[ids].tolist()
        return Pack(number=number, ids=ids, samples=samples, tokens=tokens)

    def encoded(self, pack: Pack) -> list[dict[str, Any]]:
        """The samples of a pack as the template gives them, with their ids.

        Raises:
            DriftError: one encodes to another length than it was planned with.
        """
        out = []
        for place, (sample_id, sample) in enumerate(zip(pack.ids, pack.samples, strict=True)):
            try:
                encoded = {**self.template.encode(sample), "sample_id": sample_id}
            except SampleError as error:
                raise self.fault(error, pack.number, sample_id) from error
            length = int(np.shape(encoded["input_ids"])[-1])
            if pack.tokens is not None and length != pack.tokens[place]:
                raise DriftError(
                    f"sample {sample_id} ({self.source.where(sample_id)}) was planned with "
                    f"{pack.tokens[place]} tokens but encodes to {length}",
                    hint="source, template or processor changed since it was measured: measure it again",
                )
            out.append(encoded)
        total = sum(int(np.shape(one["input_ids"])[-1]) for one in out)
        planned = int(self.plan.pack_tokens[pack.number])
        if total != planned:
            raise DriftError(f"pack {pack.number} was planned with {planned} tokens but encodes to {total}")
        return out

    def record(self, pack: Pack, **options: Any) -> PackRecord:
        root = getattr(self.source, "media_root", None)
        return PackRecord(pack.number, pack.ids, pack.samples, pack.tokens, self.task, root=root, **options)

    def members(self, pack: Pack, **options: Any) -> Iterator[tuple[str, bytes]]:
        """(name behind the key, bytes) of every file of a pack: media in order, the record last."""
        record = self.record(pack, **options)
        try:
            yield from record.media()
            yield "json", record.json()
        except SampleError as error:
            raise self.fault(error, pack.number, None) from error

    def fault(self, error: SampleError, number: int, sample_id: int | None) -> InputError:
        """A sample that was planned cannot be exported: nothing is left out, nothing stands in for it."""
        where = f" (sample {sample_id}, {self.source.where(sample_id)})" if sample_id is not None else ""
        return InputError(
            f"pack {number}{where} cannot be exported: {error.reason}: {error.message}",
            hint="restore it and run the command again (it goes on where it was), or leave the sample out: "
            "packtrain plan --skip-samples",
        )

    def __getstate__(self) -> dict[str, Any]:
        """Workers open plan and lengths themselves."""
        return {name: value for name, value in self.__dict__.items() if name not in ("plan", "tokens")}


def listed(path: Path, name: str) -> dict[str, Any]:
    """What the manifest says about a file that is there."""
    return {"name": name, "bytes": path.stat().st_size, "sha256": files.sha256_file(path)}


def published(out: Path, name: str, data: bytes) -> dict[str, Any]:
    """Write a file, and say what the manifest says about it."""
    with files.publish(out / name) as handle:
        handle.write(data)
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def drop_unlisted(out: Path, pattern: str, names: set[str]) -> None:
    """Remove files of a part that its manifest does not list: left by other settings or a stopped run."""
    for path in sorted(Path(out).glob(pattern)):
        if path.name not in names:
            files.remove(path)


# --------------------------------------------------------------------------------------------
# Packs as rows of another library's store: a part becomes files that the library writes by itself
# --------------------------------------------------------------------------------------------
#     key    ps_00000000                                the pack's key
#     json   its record (`store.pack_records`)
#     media  [{"path": "img000.jpg", "bytes": …}, …]    or all bytes one behind the other, as the record says
#
# The library writes into a folder of its own beside the export. Its files are hashed, named by part and
# number, and moved to their place; what its index must say of them is kept in the manifest until `finish`.
Row = dict[str, Any]

#: A file that was written, its number of packs, and what the index says of it.
Made = tuple[Path, int, dict[str, Any]]


def write_files(
    job: Job,
    part: int,
    suffix: str,
    write: Callable[[Path, Iterator[Row]], Iterable[Made]],
    *,
    below: str = "",
    rows: Iterator[Row] | None = None,
) -> list[dict[str, Any]]:
    """The files of a part: `pack-PART-NUMBER` and the suffix.

    Args:
        write: writes all rows into a folder, and says which files they are in, in order.
        below: folder of the export that they go to, with its slash.
        rows: of the part, where a row is none of the above.

    Returns:
        What the manifest says about each file.
    """
    stem = f"pack-{part:06d}"
    first = job.packs_of(part).start
    made: list[dict[str, Any]] = []
    with files.scratch(job.out / stem) as folder, contextlib.ExitStack() as held:
        given = _rows(held.enter_context(members_ahead(job, part))) if rows is None else rows
        for path, packs, told in write(folder, given):
            row = {
                **listed(path, f"{below}{stem}-{len(made):03d}{suffix}"),
                "count": packs,
                "told": told,
                "first_pack": first,
                "first_key": pack_key(first),
                "last_key": pack_key(first + packs - 1),
            }
            files.take(path, job.out / row["name"])
            made.append(row)
            first += packs
    assert first == job.packs_of(part).stop, f"{stem}: {first} rows"
    names = {Path(row["name"]).name for row in made}
    drop_unlisted(job.out / below, f"{stem}-*{suffix}", names)
    return made


def joined(row: Row) -> Row:
    """A row whose media are one value, for stores without lists of bytes."""
    return {**row, "media": b"".join(one["bytes"] for one in row["media"])}


def by_files(
    rows: Iterator[Row], maxsize: int, size: Callable[[Row], int]
) -> Iterator[tuple[int, Iterator[Row]]]:
    """(number, rows) of each file; the next one begins behind `maxsize` bytes."""
    number = held = 0

    def file_of(row: Row) -> int:
        nonlocal number, held
        if held >= maxsize:
            number, held = number + 1, 0
        held += size(row)
        return number

    return itertools.groupby(rows, file_of)


def _rows(members: Iterator[Member]) -> Iterator[Row]:
    media: list[dict[str, Any]] = []
    for number, name, data in members:
        if name != "json":
            media.append({"path": name, "bytes": data})
            continue
        yield {"key": pack_key(number), "json": data.decode("utf-8"), "media": media}
        media = []
