"""The producer's journal and its figures: raw shards that were taken, their ids, the state behind each chunk.

    journal/shard_00000007.json    name, first id, records, bytes, SHA-256: written before any of its
                                   samples is used, so that ids never move
    journal/state_00000041.json    what waits and what was counted when chunk 41 was finished; written
                                   before its manifest

A restart goes on from the state of the newest chunk that is whole: all that came after it is planned anew
from the raw shards, which gives the same packs, so nothing is lost or doubled and numbering continues.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import files
from ..checks import number, one_of
from ..errors import FormatError, SourceError, counted
from ..extend import lookup, names
from ..remote.copies import size_of
from ..sources._open import natural
from ..store._folders import sealed
from ..store.chunk_folder import JOURNAL, chunk_name, is_sealed, number_of
from ..waiting.poll import Clock, Watch, fresh_names

# --------------------------------------------------------------------------------------------
# Raw shards in a folder, and which of them are complete
# --------------------------------------------------------------------------------------------
# A shard is a file of records (JSONL, JSON, Parquet, a tar …) or a folder of sound clips with transcripts; a
# folder of clips may also be the input itself. Names that start with a dot or an underscore, and names of
# unfinished copies (`.tmp`, `.part` …), are passed over. A shard counts as complete:
#
#     rename   as soon as it is seen: whoever writes it renames it into place
#     marker   when NAME.done lies beside it (or `_SUCCESS` in it, or in the input folder)
#     stable   when its size and times have not changed for so many seconds of this process's own clock
#
# Times of files are compared for equality only, never with a clock.
logger = logging.getLogger(__name__)

_READY = ("rename", "marker", "stable")

_UNFINISHED = (".tmp", ".part", ".partial", ".crdownload", ".download", ".swp", ".lock", "~")
_DONE = ".done"
_SUCCESS = "_SUCCESS"
#: Kinds of sources that are one file.
_FILE_KINDS = ("jsonl", "json", "parquet", "webdataset")

#: A file in the input folder that says: nothing follows.
_LAST = ("END", "_END")

Signature = tuple[tuple[str | int, ...], ...]


class RawFolder:
    """The input of a producer.

    Args:
        folder: where raw shards appear; or one file.
        ready: see the module.
        stable_s: seconds for `stable`.
    """

    def __init__(self, folder: str | Path, *, ready: str, stable_s: float, clock: Clock) -> None:
        one_of("ready", ready, _READY)
        number("stable_s", stable_s, 0)
        self.folder = Path(folder)
        self._ready, self._stable_s, self._clock = ready, stable_s, clock
        self._watches: dict[str, Watch] = {}
        self._told: set[str] = set()
        clips = lookup("sources", "audio_dir")
        self._tables, self._sounds = tuple(clips.TABLES), tuple(clips.SUFFIXES_OF_CLIPS)
        self._suffixes = tuple(
            suffix
            for kind in _FILE_KINDS
            if kind in names("sources")
            for suffix in lookup("sources", kind).SUFFIXES
        )

    def path(self, name: str) -> Path:
        """Where a shard lies; the input folder itself has the name `.`."""
        return self.folder if name == "." else self.folder / name

    def visible(self) -> list[str]:
        """Names of all shards, complete or not, in natural order."""
        if self.folder.is_file():
            return ["."]
        self.check_link(".")
        if not self.folder.exists():
            raise SourceError(f"{self.folder} does not exist", hint="make the folder that raw shards come to")
        listed = [name for name in fresh_names(self.folder) if not name.startswith((".", "_"))]
        if self._is_audio(self.folder, listed):
            return ["."]
        return sorted((name for name in listed if name not in _LAST and self._is_shard(name)), key=natural)

    def complete(self, names: Iterable[str] | None = None) -> list[str]:
        """Those of `names` (default: of all shards) that are complete, in natural order."""
        listed = set(fresh_names(self.folder)) if self.folder.is_dir() else set()
        names = self.visible() if names is None else names
        return [name for name in names if self._is_complete(name, listed)]

    def expected(self) -> list[str]:
        """Shards that have to be taken before the input counts as read: all that are visible, or are marked.

        A shard whose marker never comes is left out, and named in the log.
        """
        visible = self.visible()
        if self._ready != "marker":
            return visible
        listed = set(fresh_names(self.folder)) if self.folder.is_dir() else set()
        complete = [name for name in visible if self._is_marked(name, listed)]
        for name in sorted(set(visible) - set(complete)):
            logger.warning("%s has no marker %s%s: it is left out", self.path(name), name, _DONE)
        return complete

    def check_link(self, name: str) -> None:
        """SourceError where a shard (or the input itself) is a link to what is not there; names both."""
        path = self.path(name)
        if _is_dangling(path):
            raise SourceError(
                f"{path} is a link to {os.readlink(path)}, which does not exist",
                hint="restore what it points to, or remove the link",
            )

    @property
    def says_last(self) -> bool:
        """Does a marker say that nothing follows?"""
        return any(name in _LAST for name in fresh_names(self.folder))

    def _is_shard(self, name: str) -> bool:
        lower = name.lower()
        if lower.endswith((*_UNFINISHED, _DONE)) or lower in self._tables:
            return False
        path = self.folder / name
        if path.is_dir():
            inner = fresh_names(path)
            if self._is_audio(path, inner):
                return True
            if any(one.lower().endswith(self._suffixes) for one in inner):
                self._tell(name, "holds files of records, and is passed over: folders are not entered")
            return False
        if _is_dangling(path):
            return "." not in name or lower.endswith(self._suffixes)  # without: a folder of clips, perhaps
        if not path.is_file():
            if path.exists():
                self._tell(name, "is no file and no folder, and is passed over")
            return False
        return lower.endswith(self._suffixes)

    def _tell(self, name: str, what: str) -> None:
        """A warning, once for each name."""
        if name not in self._told:
            self._told.add(name)
            logger.warning("%s %s", self.path(name), what)

    def _is_audio(self, path: Path, listed: list[str]) -> bool:
        """A folder of clips: it has a table of them, or transcripts beside them."""
        if not path.is_dir():
            return False
        lower = [name.lower() for name in listed]
        if path == self.folder and any(
            name.endswith(self._suffixes) and name not in self._tables for name in lower
        ):
            return False  # records, whose media may lie beside them
        stems = {os.path.splitext(name)[0] for name in lower if name.endswith((".txt", ".lab"))}
        clips = {os.path.splitext(name)[0] for name in lower if name.endswith(self._sounds)}
        spoken = any(name.endswith(".trans.txt") for name in lower) or bool(stems & clips)
        table = [name for name in lower if name in self._tables]
        if clips or not table or table[0].endswith(".csv"):
            return bool(table) or (spoken and bool(clips))
        return any(name.lower().endswith(self._sounds) for _, _, many in os.walk(path) for name in many)

    def _is_complete(self, name: str, listed: set[str]) -> bool:
        path = self.path(name)
        if _is_dangling(path):
            self._tell(name, f"is a link to {os.readlink(path)}, which does not exist")
            return False
        if self._ready == "rename":
            return True
        if self._ready == "marker":
            return self._is_marked(name, listed)
        watch = self._watches.setdefault(name, Watch(self._clock))
        return watch.quiet(signature(path)) >= self._stable_s and watch.changes >= 0

    def _is_marked(self, name: str, listed: set[str]) -> bool:
        path = self.path(name)
        inner = fresh_names(path) if path.is_dir() else []
        return f"{name}{_DONE}" in listed or _SUCCESS in listed or _SUCCESS in inner


def _is_dangling(path: Path) -> bool:
    """Is this a link to what is not there?"""
    return path.is_symlink() and not path.exists()


def signature(path: Path) -> Signature:
    """Names, sizes and times of a shard's files: equal as long as nobody writes to it."""
    found = []
    for relative, file in _files(path):
        try:
            status = os.stat(file)
        except OSError:
            continue
        found.append((relative, *files.Stamp.of(status)))
    return tuple(found)


def stamp_of(path: Path) -> str:
    """Digest of `signature`."""
    return files.digest_json(signature(path))


def content_digest(path: Path) -> tuple[str, int]:
    """(SHA-256 over names and bytes of a shard's files, bytes)."""
    whole, size = hashlib.sha256(), 0
    for relative, file in _files(path):
        if file != path and _is_dangling(file):  # a clip that is missing: for the ledger
            whole.update(f"{relative}\0missing\n".encode())
            continue
        with open(file, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256")
            size += handle.tell()
        whole.update(f"{relative if path.is_dir() else ''}\0{digest.hexdigest()}\n".encode())
    return whole.hexdigest(), size


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.is_dir():
        yield path.name, path
        return
    for folder, folders, many in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(many):
            if not name.startswith("."):
                file = Path(folder) / name
                yield os.path.relpath(file, path), file


# --------------------------------------------------------------------------------------------
# What a producer has done so far, in numbers
# --------------------------------------------------------------------------------------------
@dataclass
class ProduceStats:
    """Counts since the beginning of the stream, restarts included.

    Attributes:
        pack_length: cap of a pack in tokens.
        read: samples of all raw shards that were planned.
        packed, packs, chunks, tokens: what was published.
        dropped: samples by reason; read = packed + dropped + waiting, always.
        shards: raw shards that were taken; of these `faulty` could not be read, `duplicates` had been read
            under another name.
        keys: counts of keys that nothing read, and of spellings that were read as a field.
        truncated: samples that are packed without answers that truncation removed, or cut short.
        beyond: tokens of long samples past the cap of their packs, which are slots too.

    >>> stats = ProduceStats(pack_length=1000, read=100, packed=100, packs=10, tokens=8000)
    >>> stats.samples_per_pack, stats.efficiency
    (10.0, 0.8)
    """

    pack_length: int
    read: int = 0
    packed: int = 0
    packs: int = 0
    chunks: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    shards: int = 0
    faulty: int = 0
    duplicates: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    beyond: int = 0

    @property
    def waiting(self) -> int:
        """Samples that were read and are not published yet: the lag of the producer."""
        return self.read - self.packed - sum(self.dropped.values())

    @property
    def samples_per_pack(self) -> float:
        return self.packed / self.packs if self.packs else 0.0

    @property
    def efficiency(self) -> float:
        """Real tokens of all slots."""
        return self.tokens / (self.packs * self.pack_length + self.beyond) if self.packs else 0.0

    def drop(self, reason: str) -> None:
        """One more sample that is in no pack."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain |= {name: dict(sorted(plain[name].items())) for name in ("dropped", "keys")}
        rare = ("keys", "truncated", "beyond")
        return {name: value for name, value in plain.items() if value or name not in rare}

    def tell(self, keys: Mapping[str, int]) -> None:
        """Add counts of keys."""
        self.keys = {**self.keys, **{key: self.keys.get(key, 0) + count for key, count in keys.items()}}

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> ProduceStats:
        counts = {name: dict(values.get(name, {})) for name in ("dropped", "keys")}
        return cls(**{**values, **counts})

    def figures(self, **more: Any) -> dict[str, Any]:
        """For people and machines: the counts and what follows from them."""
        return {
            **self.to_dict(),
            "lag_samples": self.waiting,
            "samples_per_pack": round(self.samples_per_pack, 4),
            "efficiency": round(self.efficiency, 6),
            **more,
        }


# --------------------------------------------------------------------------------------------
# The producer's journal and its figures: raw shards that were taken, their ids, the state behind each chunk
# --------------------------------------------------------------------------------------------
_KEPT_STATES = 2


@dataclass(frozen=True, slots=True)
class RawShard:
    """A raw shard that was taken.

    Attributes:
        start, rows: its samples have the ids start … start + rows - 1.
        stamp: digest of its files' names, sizes and times; while it is the same, nothing is hashed again.
        fault: why it could not be read (rows is 0 then), or None.
        duplicate_of: name of a shard with the same bytes that was taken before (rows is 0 then), or None.
    """

    number: int
    name: str
    start: int
    rows: int
    bytes: int
    sha256: str
    stamp: str
    fault: str | None = None
    duplicate_of: str | None = None


class Journal:
    """Shards and states in `OUT/journal`."""

    def __init__(self, output: Path, raw: RawFolder) -> None:
        self.folder = output / JOURNAL
        self.output = output
        self.raw = raw
        self.shards: list[RawShard] = []
        self._stops: list[int] = []
        self._stamps: dict[str, str] = {}
        self._latest: dict[str, RawShard] = {}
        self._by_digest: dict[str, RawShard] = {}

    @property
    def read(self) -> int:
        """Samples of all shards that were taken."""
        return self._stops[-1] if self._stops else 0

    def load(self) -> None:
        """Read the shards that were taken."""
        files.remove_leftovers(self.folder)
        for name in fresh_names(self.folder):
            if not name.startswith("shard_"):
                continue
            told = files.read_json(self.folder / name)
            if not is_sealed(told):
                raise FormatError(
                    f"{self.folder / name} was edited", hint="produce into a new folder: ids may have moved"
                )
            if told["number"] != len(self.shards):
                raise FormatError(
                    f"{self.folder} lacks raw shard {len(self.shards)}, though later ones are there",
                    hint="copy the journal again, or produce into a new folder: ids may have moved",
                )
            self._take(RawShard(**{key: value for key, value in told.items() if key != "seal"}))

    def admit(
        self, name: str, rows: int, content: tuple[str, int], stamp: str, fault: str | None
    ) -> RawShard:
        """Give a shard its ids, durably.

        Args:
            content: digest of its bytes, and their number.
            stamp: of its files before they were read.
        """
        sha256, size = content
        same = self._by_digest.get(sha256)
        shard = RawShard(
            number=len(self.shards),
            name=name,
            start=self.read,
            rows=rows if same is None else 0,
            bytes=size,
            sha256=sha256,
            stamp=stamp,
            fault=fault,
            duplicate_of=None if same is None else same.name,
        )
        files.publish_json(self.folder / f"shard_{shard.number:08d}.json", sealed(asdict(shard)))
        self._take(shard)
        return shard

    def _take(self, shard: RawShard) -> None:
        self.shards.append(shard)
        self._stops.append(shard.start + shard.rows)
        self._latest[shard.name] = shard
        self._stamps[shard.name] = shard.stamp
        if shard.rows:
            self._by_digest.setdefault(shard.sha256, shard)

    def knows(self, name: str) -> bool:
        """Was a shard of this name taken?"""
        return name in self._latest

    def is_new(self, name: str) -> bool:
        """Has nobody taken this shard as it is now?

        Raises:
            SourceError: it was taken, and has other bytes now.
        """
        known = self._latest.get(name)
        if known is None:
            return True
        path = self.raw.path(name)
        if not path.exists():
            return False  # it was removed, or a link to it is left
        now = stamp_of(path)
        if self._stamps[name] == now:
            return False
        found = content_digest(path)[0]
        if found != known.sha256:
            if not known.rows and known.duplicate_of is None:
                return True  # nothing was read of it: whoever wrote it has repaired it
            raise SourceError(
                f"{path} was written again after it was read: "
                f"{counted(known.rows, 'samples')} came from other bytes",
                hint="put the old file back, and deliver new samples under a new name",
            )
        self._stamps[name] = now
        return False

    def all_taken(self) -> bool:
        """Was every shard that has to be, as it is now?

        Raises:
            SourceError: one that was not is a link to what is not there.
        """
        new = [name for name in self.raw.expected() if self.is_new(name)]
        for name in new:
            self.raw.check_link(name)
        return not new

    def count(self, stats: ProduceStats) -> dict[str, Any]:
        """Put the numbers of shards into the counts; these as plain JSON."""
        stats.shards = len(self.shards)
        stats.faulty = sum(shard.fault is not None for shard in self.shards)
        stats.duplicates = sum(shard.duplicate_of is not None for shard in self.shards)
        return stats.to_dict()

    def shard_of(self, sample_id: int) -> RawShard:
        """The shard that a sample came from."""
        return self.shards[bisect.bisect_right(self._stops, sample_id)]

    # ------------------------------------------------------------------------------------- states
    def newest(self) -> tuple[int, dict[str, Any] | None]:
        """(number of the next chunk, state behind the one before it; None where there is none).

        Chunks behind the newest whole one were never finished, or are torn: they are removed and made anew.

        Raises:
            FormatError: more chunks are torn than there are states.
        """
        numbers = sorted(
            number for name in fresh_names(self.output) if (number := number_of(name)) is not None
        )
        torn = []
        while numbers and not self._is_whole(numbers[-1]):
            torn.append(numbers.pop())
        number = numbers[-1] + 1 if numbers else 0
        state: dict[str, Any] | None = None
        if number:
            state = files.read_json(self._state(number - 1)) if self._state(number - 1).is_file() else {}
        if not (is_sealed(state) if number else not any(map(_state_number, fresh_names(self.folder)))):
            raise FormatError(
                f"{self.output} cannot go on behind chunk {number - 1}: the state behind it is gone"
                + (f" ({len(torn)} later chunks are torn)" if torn else ""),
                hint="produce into a new folder",
            )
        for one in torn:
            files.remove((self.output / chunk_name(one)).with_suffix(".json"))
            files.remove(self.output / chunk_name(one))
        return number, state

    def _is_whole(self, number: int) -> bool:
        path = self.output / chunk_name(number)
        try:
            told = files.read_json(path.with_suffix(".json"))
        except FormatError:
            return False
        try:
            return is_sealed(told) and size_of(path) == told["bytes"]
        except OSError:
            return False

    def _state(self, number: int) -> Path:
        return self.folder / f"state_{number:08d}.json"

    def write_state(
        self, number: int, stats: ProduceStats, packer: Mapping[str, Any], pending: list[list[int]]
    ) -> None:
        """The state behind chunk `number`, before its manifest is written: counts, and what waits."""
        state = {"stats": self.count(stats), "packer": dict(packer), "pending": pending}
        files.publish_json(self._state(number), sealed(state))

    def forget_states(self, number: int) -> None:
        """Drop states that no restart needs once chunk `number` is whole."""
        for name in fresh_names(self.folder):
            mine = _state_number(name)
            if mine is not None and mine <= number - _KEPT_STATES:
                files.remove(self.folder / name)


def _state_number(name: str) -> int | None:
    """Chunk number of a state's file; None for other files."""
    digits = name.removeprefix("state_").removesuffix(".json")
    return int(digits) if name.startswith("state_") and digits.isdecimal() else None
