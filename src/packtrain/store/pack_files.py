"""Packs of an export by number: where their files are, and the samples restored from them.

Nothing is held but the manifests' places of packs (three numbers each). Picklable; a worker opens files anew.
"""

from __future__ import annotations

import bisect
import io
import json
import operator
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ChecksumError, FormatError
from . import shards
from .pack_records import pack_key, restore

__all__ = ["PackFiles"]


class PackFiles:
    """The packs of a finished raw, webdataset or energon export.

    Args:
        out: the export.

    Attributes:
        marker: of the export. task, format: as exported.
    """

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out).absolute()
        self.marker = shards.export_of(self.out)
        self.format = str(self.marker["key"]["format"])
        self.task = str(self.marker["key"]["task"])
        if self.format == "chunks":
            raise FormatError(f"{out} holds chunks", hint="packtrain.data.open_packs reads every format")
        self._starts: list[int] = []
        self._shards: list[tuple[str, int, list[list[int]]]] = []
        for part in shards.read_parts(self.out, int(self.marker["parts"])):
            for row in part["files"]:
                if row.get("packs"):
                    self._starts.append(row["packs"][0][0])
                    self._shards.append((row["name"], row["end"], row["packs"]))

    def __len__(self) -> int:
        return int(self.marker["packs"])

    def where(self, number: int) -> str:
        """Shard and key of a pack, for messages."""
        if not self._shards:
            return f"{pack_key(number)} in {self.out}"
        return f"{pack_key(number)} in {self.out / self._place(number)[0]}"

    def members(self, number: int) -> dict[str, bytes]:
        """Name behind the key -> bytes, in the order they lie in.

        Raises:
            ChecksumError: the shard was cut or edited here; names shard and key.
        """
        number = operator.index(number)
        if not 0 <= number < len(self):
            raise IndexError(f"pack {number} of {len(self)} ({self.out})")
        return self._of_tar(number) if self._shards else self._of_folder(number)

    def record(self, number: int, members: dict[str, bytes] | None = None) -> dict[str, Any]:
        """The JSON record of a pack."""
        held = self.members(number) if members is None else members
        try:
            record = json.loads(held["json"])
        except KeyError:
            raise ChecksumError(f"{self.where(number)} lacks its record", hint="export again") from None
        except ValueError as error:
            raise ChecksumError(f"{self.where(number)}: its record is torn: {error}") from None
        if not isinstance(record, dict):
            raise ChecksumError(f"{self.where(number)}: its record is no object")
        return record

    def samples(self, number: int) -> list[dict[str, Any]]:
        """The samples of a pack as they were planned, media as bytes, each with its `sample_id`."""
        members = self.members(number)
        record = self.record(number, members)
        try:
            return restore(record, members.__getitem__, self.where(number))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ChecksumError(
                f"{self.where(number)}: its record is not what was written: {error}"
            ) from None

    def stream(self) -> Iterator[tuple[int, dict[str, bytes]]]:
        """(number, members) of all packs, in order."""
        for number in range(len(self)):
            yield number, self.members(number)

    # ----------------------------------------------------------------------------------------
    def _place(self, number: int) -> tuple[str, int, int, int]:
        """(shard, start, stop, CRC-32) of a pack."""
        name, end, packs = self._shards[bisect.bisect_right(self._starts, number) - 1]
        row = number - packs[0][0]
        stop = packs[row + 1][1] if row + 1 < len(packs) else end
        return name, packs[row][1], stop, packs[row][2]

    def _of_tar(self, number: int) -> dict[str, bytes]:
        name, start, stop, crc = self._place(number)
        try:
            with open(self.out / name, "rb") as handle:
                handle.seek(start)
                data = handle.read(stop - start)
        except FileNotFoundError:
            raise ChecksumError(
                f"{self.out / name} is missing ({pack_key(number)})", hint="copy the shard again"
            ) from None
        if len(data) != stop - start or zlib.crc32(data) != crc:
            raise ChecksumError(
                f"{self.where(number)} was cut or edited: {len(data):,} of {stop - start:,} bytes, "
                "and not those that were exported",
                hint="copy the shard again, or remove it and export again",
            )
        return dict(split_members(data, pack_key(number)))

    def _of_folder(self, number: int) -> dict[str, bytes]:
        key = pack_key(number)
        try:
            record = (self.out / f"{key}.json").read_bytes()
            media = json.loads(record)["packtrain"]["media"]
            names = [one["member"] for held in media for one in held]
            return {name: (self.out / f"{key}.{name}").read_bytes() for name in names} | {"json": record}
        except FileNotFoundError as error:
            raise ChecksumError(f"{error.filename} is missing", hint="export again") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ChecksumError(f"{key}.json in {self.out} is torn: {error}", hint="export again") from None


def split_members(data: bytes, key: str) -> Iterator[tuple[str, bytes]]:
    """(name behind the key, bytes) of the tar members in a range of bytes."""
    with tarfile.open(fileobj=io.BytesIO(data + bytes(1024)), mode="r:") as tar:
        for info in tar:
            stem, _, name = info.name.partition(".")
            held = tar.extractfile(info)
            if stem != key or held is None:
                raise ChecksumError(f"{info.name} lies among the members of {key}")
            yield name, held.read()
