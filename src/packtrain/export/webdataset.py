"""webdataset: packs as plain tars that `webdataset`, Hugging Face `datasets`, `tarfile` and energon read.

    ps_00000000.img000.jpg  ps_00000000.img002.jpg  ps_00000000.json      one pack; members adjacent

The key (text before the first dot) is the pack's number: letters, digits and `_` only, unique over the
export. The record comes last, so a tar that was cut inside a pack has no record there.
"""

from __future__ import annotations

import contextlib
import hashlib
import tarfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

from .. import files
from ..store.pack_records import crc32, pack_key
from ._job import Job, Lane, Member, drop_unlisted, members_ahead, published

OPTIONS = {"prompts": "prompt"}

needs_template = False


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the shards of a part."""
    return write_tars(job, part, prompts=job.options["prompts"])


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nothing beside the shards."""
    return []


# --------------------------------------------------------------------------------------------
# Tars of packs, written as a stream: hashed while written, member by member, media bytes as they are
# --------------------------------------------------------------------------------------------
# Three threads work on a shard: one reads ahead (`_job`), one hashes, and this one writes; each hands over
# about a megabyte at a time, and bytes are copied only into the file.
_BLOCK = 512
_WRITTEN = 1 << 20  # bytes written, and hashed, at once
_UNHASHED = 1 << 23  # bytes written and not yet hashed
_PADDING = bytes(_BLOCK)


class Hashed:
    """SHA-256 of a stream, taken on a thread beside the writing one (hashing leaves the interpreter free)."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._lane: Lane[list[bytes] | None] = Lane(_UNHASHED)
        self._thread = threading.Thread(target=self._run, name="packtrain-sha256", daemon=True)
        self._thread.start()

    def update(self, pieces: list[bytes], size: int) -> None:
        """Hash pieces of `size` bytes in all; the list is not to be changed afterwards."""
        self._lane.put(pieces, size)

    def hexdigest(self) -> str:
        self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the thread; also after an error."""
        if self._thread.is_alive():
            self._lane.put(None, 0)
            self._thread.join()

    def _run(self) -> None:
        while (pieces := self._lane.get()) is not None:
            for data in pieces:
                self._digest.update(data)


class TarShard:
    """One open shard. `packs` holds per pack its number, the offset of its first header and a CRC-32 of all
    its bytes but those of the media, whose own CRC-32 stand in its record."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._digest = Hashed()
        self._flush = files.FlushAhead(handle)
        self._pieces: list[bytes] = []
        self._held = 0
        self._start = 0
        self._crc = 0
        self.size = 0
        self.end = 0
        self.packs: list[list[int]] = []

    def add(self, member: Member) -> None:
        """Add a member; those of a pack come next to each other, and its record ends it."""
        number, name, data = member
        header = _header(f"{pack_key(number)}.{name}", len(data))
        self._crc = crc32(header, self._crc)
        self._put(header)
        self._put(data)
        padding = _PADDING[: -len(data) % _BLOCK]
        self._put(padding)
        if name == "json":
            self._crc = crc32(padding, crc32(data, self._crc))
            self.packs.append([number, self._start, self._crc])
            self._start = self.end = self.size
            self._crc = 0
        else:
            self._crc = crc32(padding, self._crc)

    def close(self) -> str:
        """Write the end of the tar; returns the SHA-256."""
        self._put(bytes(2 * _BLOCK))
        self._put(bytes(-self.size % tarfile.RECORDSIZE))
        self._write()
        return self._digest.hexdigest()

    def stop(self) -> None:
        """End the threads beside the writing one, also of a shard that is given up."""
        self._digest.close()
        self._flush.close()

    def _put(self, data: bytes) -> None:
        if data:
            self._pieces.append(data)
            self.size += len(data)
            self._held += len(data)
            if self._held >= _WRITTEN:
                self._write()

    def _write(self) -> None:
        pieces, held = self._pieces, self._held
        self._pieces, self._held = [], 0
        self._digest.update(pieces, held)
        files.write_pieces(self._handle, pieces)
        self._flush.wrote(held)


def write_tars(job: Job, part: int, *, index: bool = False, **spelling: Any) -> list[dict[str, Any]]:
    """The shards of a part: `pack-PART-NUMBER.tar`, a new one behind `maxsize` bytes.

    Args:
        index: also write `<shard>.tar.idx` (uint64 little-endian: where each sample starts, and where the
            last one ends).
        spelling: of the records, see `PackRecord`.

    Returns:
        What the manifest says about each file.
    """
    rows: list[dict[str, Any]] = []
    with members_ahead(job, part, **spelling) as members:
        member = next(members, None)
        while member is not None:
            name = f"pack-{part:06d}-{len(rows):03d}.tar"
            with _shard(job.out / name) as (shard, about):
                member = _fill(shard, member, members, job.maxsize)
            rows.append({"name": name, **about})
    if index:
        rows += [_index(job.out, row) for row in rows]
    drop_unlisted(job.out, f"pack-{part:06d}-*.tar*", {row["name"] for row in rows})
    return rows


def _fill(shard: TarShard, member: Member | None, members: Iterator[Member], maxsize: int) -> Member | None:
    """Write whole packs until the shard is full; returns the first member of the next shard."""
    while member is not None:
        shard.add(member)
        ended = member[1] == "json"
        member = next(members, None)
        if ended and shard.size >= maxsize:
            break
    return member


@contextlib.contextmanager
def _shard(path: Path) -> Iterator[tuple[TarShard, dict[str, Any]]]:
    about: dict[str, Any] = {}
    with files.publish(path) as handle:
        shard = TarShard(handle)
        try:
            yield shard, about
            digest = shard.close()
        finally:
            shard.stop()
    first, last = (pack_key(shard.packs[place][0]) for place in (0, -1))
    about.update(bytes=shard.size, sha256=digest, count=len(shard.packs), first_key=first, last_key=last)
    about.update(end=shard.end, packs=shard.packs)


def _index(out: Path, row: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    offsets = [start for _, start, _ in row["packs"]] + [row["end"]]
    return published(out, f"{row['name']}.idx", np.asarray(offsets, dtype="<u8").tobytes())


def _header(name: str, size: int) -> bytes:
    """The header that `tarfile` makes of a plain file. Filled in by hand, for that takes it 30 us each."""
    held = name.encode("ascii", "replace")
    if len(held) > 100 or size >= 8**11 or not name.isascii():
        return _made(name, size)
    blank, total = _blank()
    digits = b"%011o" % size
    total += sum(held) + sum(digits)
    return b"".join(
        (held.ljust(100, b"\0"), blank[100:124], digits, blank[135:148], b"%06o\0" % total, blank[155:])
    )


@cache
def _blank() -> tuple[bytes, int]:
    """A header without name and size, and the sum of its bytes with a blank checksum."""
    blank = _made("", 0)
    return blank, sum(blank[:124]) + sum(blank[135:148]) + 8 * 32 + sum(blank[156:])


def _made(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)
