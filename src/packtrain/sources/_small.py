"""Small JSONL files of a source of very many: each is read once when it is opened, one table knows all.

A file of some kilobytes needs no index of its own: its lines are found again whenever it is read, and the
files read last stay found. The table (`_table.rows_of`) holds stamp, digest and number of records of each.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ..errors import SourceError
from ._handles import Pinned
from ._index import Index
from ._records import RecordFile
from ._scan import BOM, scan_lines
from ._table import rows_of

__all__ = ["MANY", "SMALL", "SmallFile", "small_files"]

MANY = 1000  # files of a source from which on it is read this way
SMALL = 1 << 16  # bytes of a file
KEEP = 64

_OTHER = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xfe", b"\xfe\xff")  # compressed, or UTF-16
_SPACE = b" \t\r\n"
_open: OrderedDict[Pinned, RecordFile] = OrderedDict()


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
        return self._records()[index]

    def where(self, index: int) -> str:
        """As `RecordFile.where`."""
        return self._records().where(index)

    def _records(self) -> RecordFile:
        held = _open.get(self._file)
        if held is None:
            self._file.check()
            built = scan_lines(self._file)
            if built.sha256 != self._file.sha256:
                raise self._file.changed(os.stat(self.path))
            index = Index(self._count, built.sha256, built.starts, built.gaps, None, 0)
            held = _open[self._file] = RecordFile(self._file, "jsonl", index)
            if len(_open) > KEEP:
                _open.popitem(last=False)
        return held


def small_files(
    paths: Sequence[str],
    root: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    verify: bool = False,
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
    with open(path, "rb") as handle:
        data = handle.read()
    digest = hashlib.sha256(data).hexdigest()
    text = data.removeprefix(BOM)
    if data.startswith(_OTHER) or text.lstrip(_SPACE).startswith(b"["):
        return digest, 0
    return digest, sum(1 for line in text.split(b"\n") if line.strip(_SPACE))
