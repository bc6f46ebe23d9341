"""Tars of packs, written as a stream: hashed while written, member by member, media bytes as they are."""

from __future__ import annotations

import hashlib
import queue
import tarfile
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .. import files
from ._job import Job, drop_unlisted

__all__ = ["Hashed", "TarShard", "write_tars"]

_BLOCK = 512
_HANDED = 1 << 18  # bytes handed to the hashing thread at once


class Hashed:
    """SHA-256 of a stream, taken on a thread beside the writing one (hashing leaves the interpreter free)."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._todo: queue.Queue[list[bytes] | None] = queue.Queue(maxsize=8)
        self._thread = threading.Thread(target=self._run, name="packtrain-sha256", daemon=True)
        self._thread.start()
        self._small: list[bytes] = []
        self._held = 0

    def update(self, data: bytes) -> None:
        """Small pieces are gathered: a hand-over costs more than hashing them."""
        self._small.append(data)
        self._held += len(data)
        if self._held >= _HANDED:
            self._hand_over()

    def hexdigest(self) -> str:
        self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the thread; also after an error."""
        if self._thread.is_alive():
            self._hand_over()
            self._todo.put(None)
            self._thread.join()

    def _hand_over(self) -> None:
        self._todo.put(self._small)
        self._small, self._held = [], 0

    def _run(self) -> None:
        while (pieces := self._todo.get()) is not None:
            for data in pieces:
                self._digest.update(data)


class TarShard:
    """One open shard. `packs` holds per pack its number, the offset of its first header and a CRC-32 of all
    its bytes but those of the media, whose own CRC-32 stand in its record."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._digest = Hashed()
        self._flush = files.FlushAhead(handle)
        self._crc = 0
        self.size = 0
        self.end = 0
        self.packs: list[list[int]] = []

    def add(self, number: int, key: str, members: Iterator[tuple[str, bytes]]) -> None:
        """Add the members of one pack next to each other."""
        start, self._crc = self.size, 0
        for name, data in members:
            self._put(_header(f"{key}.{name}", len(data)))
            self._put(data, frame=name == "json")
            self._put(bytes(-len(data) % _BLOCK))
        self.packs.append([number, start, self._crc])
        self.end = self.size

    def close(self) -> str:
        """Write the end of the tar; returns the SHA-256."""
        self._put(bytes(2 * _BLOCK))
        self._put(bytes(-self.size % tarfile.RECORDSIZE))
        return self._digest.hexdigest()

    def stop(self) -> None:
        """End the threads beside the writing one, also of a shard that is given up."""
        self._digest.close()
        self._flush.close()

    def _put(self, data: bytes, *, frame: bool = True) -> None:
        if data:
            self._handle.write(data)
            self._digest.update(data)
            self._flush.wrote(len(data))
            self.size += len(data)
            if frame:
                self._crc = zlib.crc32(data, self._crc)


def write_tars(job: Job, part: int, *, index: bool = False, **spelling: Any) -> list[dict[str, Any]]:
    """The shards of a part: `pack-PART-NUMBER.tar`, a new one behind `maxsize` bytes.

    Args:
        index: also write `<shard>.tar.idx` (uint64 little-endian: where each sample starts, and where the
            last one ends).
        spelling: of the records, see `PackRecord`.

    Returns:
        What the manifest says about each file.
    """
    told: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="packtrain-read") as reader:
        _write_all(job, part, told, reader, spelling)
    rows = list(told)
    if index:
        rows += [_index(job.out, row) for row in told]
    drop_unlisted(job.out, f"pack-{part:06d}-*.tar*", {row["name"] for row in rows})
    return rows


def _write_all(
    job: Job, part: int, told: list[dict[str, Any]], reader: ThreadPoolExecutor, spelling: dict[str, Any]
) -> None:
    """The shards of a part; the records of the next pack are read while one is written."""
    todo = list(job.packs_of(part))
    following = reader.submit(job.read, todo[0])
    done = 0
    while done < len(todo):
        name = f"pack-{part:06d}-{len(told):03d}.tar"
        with _shard(job.out / name) as (shard, about):
            while done < len(todo):
                if shard.packs and shard.size >= job.maxsize:
                    break
                pack = following.result()
                if done + 1 < len(todo):
                    following = reader.submit(job.read, todo[done + 1])
                shard.add(pack.number, pack.key, job.members(pack, **spelling))
                done += 1
        told.append({"name": name, **about})


@contextmanager
def _shard(path: Path) -> Iterator[tuple[TarShard, dict[str, Any]]]:
    about: dict[str, Any] = {}
    with files.publish(path) as handle:
        shard = TarShard(handle)
        try:
            yield shard, about
            digest = shard.close()
        finally:
            shard.stop()
    about.update(
        bytes=shard.size,
        sha256=digest,
        count=len(shard.packs),
        first_key=f"ps_{shard.packs[0][0]:08d}",
        last_key=f"ps_{shard.packs[-1][0]:08d}",
        end=shard.end,
        packs=shard.packs,
    )


def _index(out: Path, row: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    offsets = [start for _, start, _ in row["packs"]] + [row["end"]]
    data = np.asarray(offsets, dtype="<u8").tobytes()
    name = f"{row['name']}.idx"
    with files.publish(out / name) as handle:
        handle.write(data)
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)
