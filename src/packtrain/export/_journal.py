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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import files
from ..errors import FormatError, SourceError, counted
from ..remote.copies import size_of
from ..store._folders import sealed
from ..store.growing import JOURNAL, chunk_name, is_sealed, number_of
from ..waiting.poll import fresh_names
from ._raw_shards import RawFolder, content_digest, stamp_of


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
        plain = {**asdict(self), "dropped": dict(sorted(self.dropped.items()))}
        plain["keys"] = dict(sorted(self.keys.items()))
        return {
            name: value
            for name, value in plain.items()
            if value or name not in ("keys", "truncated", "beyond")
        }

    def tell(self, keys: Mapping[str, int]) -> None:
        """Add counts of keys."""
        for name, count in keys.items():
            self.keys[name] = self.keys.get(name, 0) + count

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
        if not is_sealed(state if number else sealed({})) or (not number and self._knows_chunks()):
            raise FormatError(
                f"{self.output} cannot go on behind chunk {number - 1}: the state behind it is gone"
                + (f" ({len(torn)} later chunks are torn)" if torn else ""),
                hint="produce into a new folder",
            )
        for one in torn:
            files.remove((self.output / chunk_name(one)).with_suffix(".json"))
            files.remove(self.output / chunk_name(one))
        return number, state

    def _knows_chunks(self) -> bool:
        """Was any chunk but the first finished here?"""
        return any(_state_number(name) for name in fresh_names(self.folder))

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
