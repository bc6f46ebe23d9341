"""The folder of an export: packs as files, the manifests that vouch for them, and packs read by number.

    OUT/pack-000000-000.tar           shards (webdataset, energon); ps_00000000.json … (raw); chunks
        pack-000000-000.tar.idx       energon: where its samples start
        .packtrain/key.json           what is exported: plan, source, format and its settings; first
                   part-000000.json   packs [first, stop) are there: the files with size, SHA-256, first and
                                      last key, and per pack its place and CRC-32; last of its part
                   plan/              the plan itself, so that the folder stands alone
                   origin.json        where plan and source were; outside every digest
                   export.json        marker: the counts of all parts; last of all

Our own files lie in a hidden folder because readers of such folders take every `.json` they see. A part holds
`maxcount` packs whoever writes it, so its bytes do not depend on workers, stops or the order of parts.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import operator
import os
import re
import tarfile
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import extend, files
from ..errors import ChecksumError, FormatError, InputError, PacktrainError, UnknownNameError, one_line
from ..remote.copies import bring, entries, present, size_of
from ..remote.places import url_of
from ._folders import check_seal, sealed
from .pack_records import MEMBER, crc32, members_of_row, pack_key, restore

SCHEMA_EXPORT = "packtrain-export-1"
FOLDER, EXPORT = ".packtrain", "export.json"

#: What readers of a format take for its data, and what an export names its files.
_TAR = (re.compile(r".*\.tar(\.idx)?"), re.compile(r"pack-\d{6,}-\d{3,}\.tar(\.idx)?"))
_FILES = {
    "raw": (re.compile(r".*"), re.compile(r"ps_\d{8,}\.\w+(\.\w+)?")),
    "webdataset": _TAR,
    "energon": _TAR,
    "chunks": (re.compile(r"chunk_.*|.*\.arrow"), re.compile(r"chunk_\d{8,}\.(arrow|json)")),
}

#: Files that come when they are opened: packs, and what comes and goes while others write.
_LATER = re.compile(r"(pack-\d+-\d+\.tar|chunk_\d+\.arrow|ps_\d+\.[^/]*|(.*/)?(claim|producer)/.*)$")


def hidden(out: Path, *names: str) -> Path:
    """A file of ours in an export."""
    return Path(out).joinpath(FOLDER, *names)


def key_path(out: Path) -> Path:
    return hidden(out, "key.json")


def part_path(out: Path, number: int) -> Path:
    return hidden(out, f"part-{number:06d}.json")


def at(out: str | Path) -> Path:
    """The folder that an export, or another artefact, is read from.

    One behind a URL: the copies of its manifests and plan; those of its packs come when they are opened.
    """
    return Path(bring(out, later=_LATER.match))


def look_again(out: Path) -> None:
    """Bring what others have written since to an export behind a URL."""
    if url_of(out) is not None:
        bring(out, later=_LATER.match, writing=True)


def is_export(folder: Path) -> bool:
    """Is this an export, finished or not?"""
    return key_path(folder).is_file()


def export_of(out: Path) -> dict[str, Any]:
    """The marker of a finished export.

    Raises:
        FormatError: there is none, or it is not finished. ChecksumError: it was edited.
    """
    path = hidden(out, EXPORT)
    if not path.is_file():
        begun = is_export(out)
        raise FormatError(
            f"{out} {'is an unfinished' if begun else 'holds no'} export",
            hint="run the same command again; after a share of it: packtrain merge OUT"
            if begun
            else "name the OUT of packtrain export",
        )
    return check_seal(path.parent, path.name, SCHEMA_EXPORT)


def publish_part(out: Path, number: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest of a part whose files are all there."""
    marker = sealed({"schema": SCHEMA_EXPORT, "part": number, **told})
    files.publish_json(part_path(out, number), marker)
    return marker


def publish_export(out: Path, told: Mapping[str, Any]) -> None:
    """Write the marker of an export whose parts are all there."""
    files.publish_json(hidden(out, EXPORT), sealed({"schema": SCHEMA_EXPORT, **told}))


def part_of(out: Path, number: int) -> dict[str, Any] | None:
    """The manifest of a part that is whole (its files have their sizes), or None."""
    path = part_path(out, number)
    try:
        told = check_seal(path.parent, path.name)
        whole = all(size_of(Path(out) / f["name"]) == f["bytes"] for f in told["files"])
    except (InputError, AssertionError, OSError, KeyError, TypeError):
        return None
    return told if whole else None


def read_parts(out: Path, count: int) -> list[dict[str, Any]]:
    """The manifests of all parts of a finished export.

    Raises:
        FormatError: one is missing. ChecksumError: one was edited.
    """
    return [check_seal(hidden(out), part_path(out, number).name) for number in range(count)]


def check_file(out: Path, row: Mapping[str, Any]) -> None:
    """A file of an export against its row in a manifest.

    Raises:
        ChecksumError: it is missing, was cut or edited.
    """
    path = Path(out) / row["name"]
    if not path.is_file():
        first = f" ({row['first_key']} to {row['last_key']})" if "first_key" in row else ""
        raise ChecksumError(f"{path} is missing{first}", hint="copy it again, or export again")
    size = path.stat().st_size
    if size != row["bytes"] or files.sha256_file(path) != row["sha256"]:
        raise ChecksumError(
            f"{path} was cut or edited: {size:,} of {row['bytes']:,} bytes, or not those exported",
            hint="copy it again, or export again",
        )


def patterns(format: str) -> tuple[re.Pattern[str], re.Pattern[str]] | None:
    """What readers of a format take for its data, and how an export names its files; None: nobody says.

    A format that is a plug-in of its own says it as `FILES`, two patterns.
    """
    if format in _FILES:
        return _FILES[format]
    try:
        taken, ours = extend.lookup("export", format).FILES
    except (UnknownNameError, AttributeError):
        return None
    return re.compile(taken), re.compile(ours)


def strays(out: Path, format: str, listed: Container[str] | None = None) -> list[str]:
    """Files that a reader would take for data of the export, but that are not of it; hidden ones are none.

    Args:
        listed: the names of its files; None: whatever is named as its files are.
    """
    known_as = patterns(format)
    if known_as is None:
        return []
    taken, ours = known_as
    names = [name for name in entries(out) if taken.fullmatch(name) and not name.startswith(".")]
    known = ours.fullmatch if listed is None else listed.__contains__
    return sorted(name for name in names if not known(name) and not (Path(out) / name).is_dir())


# --------------------------------------------------------------------------------------------
# Packs of an export by number: where their files are, and the samples restored from them
# --------------------------------------------------------------------------------------------
# Nothing is held but the manifests' places of packs (three numbers each), or the digests of loose records.
# A format that is a store of another library (`mds`, `litdata`, `lance`, `datasets`) is read through it; each
# of its files is hashed once in a process, before its first pack is read. Picklable; a worker opens its own.
_BLOCK = 512


class PackFiles:
    """The packs of a finished export of any format but `chunks`.

    Args:
        out: the export.

    Attributes:
        marker: of the export. task, format: as exported.
    """

    def __init__(self, out: str | Path) -> None:
        self.out = at(out).absolute()
        self.marker = export_of(self.out)
        self.format = str(self.marker["key"]["format"])
        self.task = str(self.marker["key"]["task"])
        if self.format == "chunks":
            raise FormatError(f"{out} holds chunks", hint="packtrain.data.open_packs reads every format")
        self._starts: list[int] = []
        self._shards: list[tuple[str, int, list[list[int]]]] = []
        self._digests: list[bytes] = []  # of the records of packs, where they are loose files
        self._stored: list[dict[str, Any]] = []  # files of another library's store
        for part in read_parts(self.out, int(self.marker["parts"])):
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
            self._rows, self._hashed = (os.getpid(), None), set()
        index = [] if self._hashed else self.marker["files"]
        for row in [*index, self._file(number)]:
            if row["name"] not in self._hashed:
                present(self.out / row["name"])  # a copy of a remote file
                check_file(self.out, row)
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
            names = [one["member"] for held in json.loads(record)[MEMBER]["media"] for one in held]
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
