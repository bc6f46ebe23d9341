"""Packs of an export by number: where their files are, and the samples restored from them.

Nothing is held but the manifests' places of packs (three numbers each), or the digests of loose records.
A format that is a store of another library (`mds`, `litdata`, `lance`, `datasets`) is read through it; each
of its files is hashed once in a process, before its first pack is read. Picklable; a worker opens files anew.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import operator
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import extend
from ..errors import ChecksumError, FormatError, PacktrainError, one_line
from ..remote.copies import present
from . import shards
from .pack_records import MEMBER, crc32, members_of_row, pack_key, restore

_BLOCK = 512


class PackFiles:
    """The packs of a finished export of any format but `chunks`.

    Args:
        out: the export.

    Attributes:
        marker: of the export. task, format: as exported.
    """

    def __init__(self, out: str | Path) -> None:
        self.out = shards.at(out).absolute()
        self.marker = shards.export_of(self.out)
        self.format = str(self.marker["key"]["format"])
        self.task = str(self.marker["key"]["task"])
        if self.format == "chunks":
            raise FormatError(f"{out} holds chunks", hint="packtrain.data.open_packs reads every format")
        self._starts: list[int] = []
        self._shards: list[tuple[str, int, list[list[int]]]] = []
        self._digests: list[bytes] = []  # of the records of packs, where they are loose files
        self._stored: list[dict[str, Any]] = []  # files of another library's store
        for part in shards.read_parts(self.out, int(self.marker["parts"])):
            for row in part["files"]:
                if self.format == "raw" and row["name"].endswith(".json"):
                    self._digests.append(bytes.fromhex(row["sha256"]))
                if row.get("packs"):
                    self._starts.append(row["packs"][0][0])
                    self._shards.append((row["name"], row["end"], row["packs"]))
                elif "first_pack" in row:
                    self._starts.append(row["first_pack"])
                    self._stored.append({name: row[name] for name in ("name", "bytes", "sha256")})
        if self._stored and not hasattr(extend.lookup("export", self.format), "open_rows"):
            raise FormatError(
                f"{out} holds {self.format}: rows for another reader, without samples",
                hint="train on the plan, or export it in another format too",
            )
        self._rows: tuple[int, Any] = (0, None)  # process, open store
        self._hashed: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": (0, None), "_hashed": set()}

    def __len__(self) -> int:
        return int(self.marker["packs"])

    def where(self, number: int) -> str:
        """Shard and key of a pack, for messages."""
        file = self._file(number)["name"] if self._stored else self._place(number)[0] if self._shards else ""
        return f"{pack_key(number)} in {self.out / file}"

    def members(self, number: int) -> dict[str, bytes]:
        """Name behind the key -> bytes, in the order they lie in.

        Raises:
            ChecksumError: the shard was cut or edited here; names shard and key.
        """
        number = operator.index(number)
        if not 0 <= number < len(self):
            raise IndexError(f"pack {number} of {len(self)} ({self.out})")
        if self._stored:
            return self._of_store(number)
        return self._of_tar(number) if self._shards else self._of_folder(number)

    def record(self, number: int, members: dict[str, bytes] | None = None) -> dict[str, Any]:
        """The JSON record of a pack."""
        held = self.members(number) if members is None else members
        with self._as_written(number):
            return dict(json.loads(held["json"]))

    def samples(self, number: int, members: dict[str, bytes] | None = None) -> list[dict[str, Any]]:
        """The samples of a pack as they were planned, media as bytes, each with its `sample_id`.

        Args:
            members: of this pack, where they were read already.
        """
        members = self.members(number) if members is None else members
        record = self.record(number, members)
        with self._as_written(number):
            return restore(record, members.__getitem__, self.where(number), check=not self._shards)

    def stream(self) -> Iterator[tuple[int, dict[str, bytes]]]:
        """(number, members) of all packs, in order."""
        for number in range(len(self)):
            yield number, self.members(number)

    # ----------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _as_written(self, number: int) -> Iterator[None]:
        """Around code that takes a record apart: what an edited or torn one leads to is one ChecksumError."""
        try:
            yield
        except PacktrainError:
            raise
        except FileNotFoundError as error:
            raise ChecksumError(
                f"{error.filename} is missing ({pack_key(number)})", hint="copy it again, or export again"
            ) from None
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ChecksumError(
                f"{self.where(number)}: its record is not what was written: {error!r}", hint="export again"
            ) from None

    def _place(self, number: int) -> tuple[str, int, int, int]:
        """(shard, start, stop, CRC-32) of a pack."""
        name, end, packs = self._shards[bisect.bisect_right(self._starts, number) - 1]
        row = number - packs[0][0]
        stop = packs[row + 1][1] if row + 1 < len(packs) else end
        return name, packs[row][1], stop, packs[row][2]

    def _of_tar(self, number: int) -> dict[str, bytes]:
        name, start, stop, crc = self._place(number)
        present(self.out / name)
        with self._as_written(number), open(self.out / name, "rb") as handle:
            handle.seek(start)
            data = handle.read(stop - start)
        held = split_members(data, pack_key(number)) if len(data) == stop - start else None
        if held is None or held[1] != crc or not media_hold(held[0]):
            raise ChecksumError(
                f"{self.where(number)} was cut or edited: {len(data):,} of {stop - start:,} bytes, "
                "or not those that were exported",
                hint="copy the shard again, or remove it and export again",
            )
        return held[0]

    def _file(self, number: int) -> dict[str, Any]:
        return self._stored[bisect.bisect_right(self._starts, number) - 1]

    def _of_store(self, number: int) -> dict[str, bytes]:
        if self._rows[0] != os.getpid():  # a forked child opens the store anew
            self._rows = (os.getpid(), None)
        index = [] if self._hashed else self.marker["files"]
        for row in [*index, self._file(number)]:
            if row["name"] not in self._hashed:
                present(self.out / row["name"])  # a copy of a remote file
                shards.check_file(self.out, row)
                self._hashed.add(row["name"])
        try:
            if self._rows[1] is None:
                self._rows = (os.getpid(), extend.lookup("export", self.format).open_rows(self.out))
            row = self._rows[1][number]
            if row["key"] != pack_key(number):
                raise ValueError(f"it holds {row['key']!r:.40}")
            return members_of_row(row)
        except (PacktrainError, ImportError, MemoryError):
            raise
        except Exception as error:  # whatever the library says of an index that is torn
            raise ChecksumError(
                f"{self.where(number)} cannot be read: {one_line(error, 200)}",
                hint="copy it again, or export again",
            ) from error

    def _of_folder(self, number: int) -> dict[str, bytes]:
        key = pack_key(number)
        with self._as_written(number):
            record = _bytes(self.out / f"{key}.json")
            if hashlib.sha256(record).digest() != self._digests[number]:
                raise ChecksumError(
                    f"{self.out / key}.json was cut or edited: {len(record):,} bytes, exported were others",
                    hint="copy it again, or export again",
                )
            media = json.loads(record)["packtrain"]["media"]
            names = [one["member"] for held in media for one in held]
            return {name: _bytes(self.out / f"{key}.{name}") for name in names} | {"json": record}


def _bytes(path: Path) -> bytes:
    present(path)  # a copy of a remote file
    return path.read_bytes()


def split_members(data: bytes, key: str) -> tuple[dict[str, bytes], int] | None:
    """Name behind the key -> bytes of the tar members in a range, and the CRC-32 of all but the media.

    None where the range is no whole members of this key.
    """
    members: dict[str, bytes] = {}
    crc = place = 0
    while place < len(data):
        header = data[place : place + _BLOCK]
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            return None
        stem, _, name = info.name.partition(".")
        body = data[place + _BLOCK : place + _BLOCK + info.size]
        if stem != key or name in members or len(body) != info.size:
            return None
        members[name] = body
        after = place + _BLOCK + -(-info.size // _BLOCK) * _BLOCK
        crc = crc32(header, crc)
        if name == "json":
            crc = crc32(body, crc)
        crc = crc32(data[place + _BLOCK + info.size : after], crc)
        place = after
    return members, crc


def media_hold(members: Mapping[str, bytes]) -> bool:
    """Do the media of a pack have the sizes and CRC-32 that its record says?"""
    try:
        told = json.loads(members["json"])[MEMBER]["media"]
        listed = {one["member"]: one for held in told for one in held}
    except (KeyError, TypeError, ValueError):
        return False
    if set(listed) != set(members) - {"json"}:
        return False
    return all(
        len(members[name]) == one["bytes"] and crc32(members[name]) == one["crc32"]
        for name, one in listed.items()
    )
