"""Several JSONL or JSON-array files as one source: a folder, a glob or braces; compressed files too.

Shards come in natural order of their names (`_open.natural`: `part-9` before `part-10`); the record after
the last of one shard is the first of the next. The fingerprint is a Merkle root over the shards' content,
so renaming a file without changing the order, or compressing it, changes nothing.

Appending: a new shard whose name sorts last leaves all earlier ids as they were. Where it does not, pass
`known`: the names an earlier measurement saw (`fields()["shards"]`); they keep their places and new ones
follow. `shards` gives the id range and the digest of each, so what is new or has changed can be told.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..errors import SourceError
from ..files import StrPath
from . import json as json_source
from . import jsonl as jsonl_source
from ._derived import PACKED
from ._handles import Pinned
from ._index import BOM, KEEP, Index, merkle, rows_of, scan_lines
from ._open import below, expand, ordered, root_of
from ._records import InParts, Parts, RecordFile, Shard

# --------------------------------------------------------------------------------------------
# Small JSONL files of a source of very many: each is read once when it is opened, one table knows all
# --------------------------------------------------------------------------------------------
# A file of some kilobytes needs no index of its own: its lines are found again whenever it is read, and the
# files read last stay found. The table (`_index.rows_of`) holds stamp, digest and number of records of each.
MANY = 1000  # files of a source from which on it is read this way
SMALL = 1 << 16  # bytes of a file
_KEPT = 64

_OTHER = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xfe", b"\xfe\xff")  # compressed, or UTF-16
_SPACE = b" \t\r\n"


class SmallFile:
    """Records of one small file, as `RecordFile` gives them."""

    __slots__ = ("_count", "_file")

    def __init__(self, file: Pinned, count: int) -> None:
        self._file, self._count = file, count

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def fingerprint(self) -> str:
        canonical = f'{{"kind":"jsonl","sha256":"{self._file.sha256}"}}'  # a hundred thousand times
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _opened(self._file, self._count)[index]

    def where(self, index: int) -> str:
        """As `RecordFile.where`."""
        return _opened(self._file, self._count).where(index)


@lru_cache(_KEPT)
def _opened(file: Pinned, count: int) -> RecordFile:
    file.check()
    built = scan_lines(file)
    if built.sha256 != file.sha256:
        raise file.changed(os.stat(file.path))
    return RecordFile(file, "jsonl", Index(count, built.sha256, built.starts, built.gaps, None, 0))


def small_files(
    paths: Sequence[str], root: str, *, cache_dir: StrPath | None = None, verify: bool = False
) -> dict[str, SmallFile]:
    """Those of many plain JSONL files that are small, by path; none where the files are few.

    Raises:
        SourceError: one is gone, or changes while it is read.
    """
    if len(paths) < MANY:
        return {}
    try:
        small = [path for path in paths if os.stat(path).st_size <= SMALL]
    except OSError as error:
        raise SourceError(f"{error.filename} cannot be opened: {error.strerror}") from None
    rows = rows_of(small, root, ".packtrain-shards", _counted, cache_dir=cache_dir, verify=verify)
    return {file.path: SmallFile(file, count) for file, (_, count) in rows if count}


def _counted(path: str) -> tuple[str, int]:
    """(digest, records); 0 records: the file is empty, compressed, an array, or not UTF-8 text."""
    with open(path, "rb", buffering=0) as handle:
        data = handle.read()
    digest = hashlib.sha256(data).hexdigest()
    text = data.removeprefix(BOM)
    if data.startswith(_OTHER) or text.lstrip(_SPACE).startswith(b"["):
        return digest, 0
    return digest, sum(1 for line in text.split(b"\n") if line.strip(_SPACE))


# --------------------------------------------------------------------------------------------
# Several JSONL or JSON-array files as one source: a folder, a glob or braces; compressed files too
# --------------------------------------------------------------------------------------------
#: Files that count in a folder. A folder of `.json` files is one of pairs: name those with a glob.
FILES = jsonl_source.SUFFIXES
SUFFIXES: tuple[str, ...] = ()

_PLAIN = tuple(name for name in FILES if not name.endswith(PACKED))


class Shards(InParts):
    """Records of several files. Picklable; items as `RecordFile` gives them."""

    kind = "shards"

    def __init__(self, folder: str, files: Sequence[RecordFile | SmallFile]) -> None:
        self.folder, self._files = folder, list(files)
        self._parts = Parts(folder, map(len, self._files))
        self._names = below(folder, [file.path for file in self._files])
        self.fingerprint = self._identity(len(self._files))

    def _identity(self, files: int) -> str:
        """The fingerprint of the first so many files."""
        return merkle("shards", [file.fingerprint for file in self._files[:files]])

    def beginnings(self, records: int) -> list[str]:
        """Fingerprints that this source had with so many records, of files that more were added behind."""
        return [self._identity(count) for count in self._parts.first(records)]

    @property
    def shards(self) -> list[Shard]:
        """The files in order, with their id ranges."""
        return self._parts.shards(self._names, [file.fingerprint for file in self._files])

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON, and the names."""
        shards = self.shards
        told = [{"name": s.name, "records": s.stop - s.start, "fingerprint": s.fingerprint} for s in shards]
        return {"kind": self.kind, "records": len(self), "shards": told}

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, row = self._parts.place(index)
        return self._files[shard][row]

    def where(self, index: int) -> str:
        """`part-003.jsonl:17`, with the folders below the source's."""
        shard, row = self._parts.place(index)
        told = self._files[shard].where(row)
        return os.path.join(os.path.dirname(self._names[shard]), told).replace(os.sep, "/")


def open_source(
    path: StrPath,
    *,
    known: Sequence[str] = (),
    cache_dir: StrPath | None = None,
    verify_content: bool = False,
) -> Shards:
    """Open several files as one source.

    Args:
        path: a folder (its JSONL files, not those of folders inside it), a glob or braces. A glob may name
            `.json` files too, each one an array.
        known: names of shards that keep their place in front, in this order, as `Shard.name` gives them.
        cache_dir: where indexes go.
        verify_content: hash every file again instead of trusting sizes and times.

    Raises:
        SourceError: no such files; a shard that cannot be read, is empty or is missing though known.
    """
    text = os.fspath(path)
    paths = expand(text, FILES)
    folder = root_of(text)
    names = dict(zip(below(folder, paths), paths, strict=True))
    gone = [name for name in known if name not in names]
    if gone:
        raise SourceError(
            f"{text} lacks the shard {gone[0]!r} that was there before ({len(gone)} in all)",
            hint="ids of later shards would move: put it back, or measure the source anew",
        )
    keep = KEEP // max(1, len(paths) // 16)
    opened: list[RecordFile | SmallFile] = []
    plain = [path for path in paths if path.lower().endswith(_PLAIN)]
    small = small_files(plain, folder, cache_dir=cache_dir, verify=verify_content)
    for name in ordered(names, known) if known else names:
        if names[name] in small:
            opened.append(small[names[name]])
            continue
        module = json_source if names[name].lower().endswith(json_source.SUFFIXES) else jsonl_source
        file = module.open_source(names[name], cache_dir=cache_dir, verify_content=verify_content, keep=keep)
        opened.append(file)
    return Shards(folder, opened)
