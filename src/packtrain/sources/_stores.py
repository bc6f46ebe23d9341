"""Rows of other libraries' stores as records: opened in each process, read by the library, plain Python.

Files are pinned by their content when the store is opened. Values of numpy and torch become numbers and
lists; media stay the bytes that were stored: nothing is decoded, and no pickle is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import files
from ..errors import PacktrainError, SampleError, SourceError, one_line
from ._handles import Pinned
from ._records import Parts, Shard, numbered
from ._table import digest_files, merkle

#: An open store: a row by its number.
Rows = Callable[[int], Any]


class Stored:
    """Rows of a store. Picklable; a worker or a forked child opens it anew.

    Args:
        kind: of the source. folder: of the store.
        held: its data files with the number of rows of each, by path below the folder, in order.
        opened: folder -> rows; a function of a module.
        also: files that say what the rows are (an index): they are part of the fingerprint.
        chosen: what of them is read; a part of the fingerprint too.
    """

    def __init__(
        self,
        kind: str,
        folder: str,
        held: Sequence[tuple[str, int]],
        opened: Callable[[str], Rows],
        *,
        also: Sequence[str] = (),
        chosen: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        verify: bool = False,
    ) -> None:
        self.folder, self._kind, self._opened = folder, kind, opened
        self._parts = Parts(folder, [rows for _, rows in held], "rows")
        names = [name for name, _ in held]
        paths = [os.path.join(folder, name) for name in [*names, *also]]
        table = f".packtrain-{kind}"
        pinned = digest_files(paths, folder, table, cache_dir=cache_dir, verify=verify)
        self._files: list[Pinned] = pinned
        self._names = names
        root = merkle(kind, [one.sha256 for one in pinned])
        self.fingerprint = files.digest_json({"rows": root, "chosen": chosen})
        self._open: tuple[int, Rows | None] = (0, None)

    @property
    def shards(self) -> list[Shard]:
        """The data files in order, with their id ranges."""
        return self._parts.shards(self._names, [file.sha256 for file in self._files])

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON."""
        told = [{"size": file.size, "sha256": file.sha256} for file in self._files]
        return {"kind": self._kind, "files": told, "records": len(self)}

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = numbered(index, len(self), self.folder)
        try:
            row = self._rows()(number)
        except PacktrainError:
            raise
        except Exception as error:
            if all(os.path.exists(file.path) for file in self._files):
                raise _unreadable(self.where(number), error) from None
            self._open = (0, None)  # a copy was let go since: it is brought again
            try:
                row = self._rows()(number)
            except PacktrainError:
                raise
            except Exception as again:
                raise _unreadable(self.where(number), again) from None
        record = plain(row)
        if not isinstance(record, dict):
            told = f"{self.where(number)} holds no fields, but {type(row).__name__}"
            raise SampleError("malformed_record", told)
        return record

    def _rows(self) -> Rows:
        """The open store of this process."""
        held = self._open[1]
        if self._open[0] != os.getpid() or held is None:
            for file in self._files:
                file.check()
            try:
                held = self._opened(self.folder)
            except PacktrainError:
                raise
            except Exception as error:  # whatever the library says of an index that is torn
                raise _unreadable(self.folder, error) from None
            self._open = (os.getpid(), held)
        return held

    def where(self, index: int) -> str:
        """`shard.00000.mds[17]`: the row of its file, from 0."""
        shard, row = self._parts.place(index)
        return f"{self._names[shard]}[{row}]"

    def __repr__(self) -> str:
        return f"<{self._kind} source {self.folder}: {len(self)} records, {self.fingerprint[:7]}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": (0, None)}


def index_of(folder: str) -> dict[str, Any]:
    """The `index.json` of a store.

    Raises:
        SourceError: there is none, or it is torn.
    """
    path = os.path.join(folder, "index.json")
    if not os.path.isfile(path):
        raise SourceError(f"{path} is missing", hint="name the folder that the store was written to")
    with files.reading(path, "an index of a store", "copy it again"):
        return dict(files.read_json(path))


def plain(value: Any) -> Any:
    """A value without types of numpy and torch; bytes, texts and numbers as they are."""
    if isinstance(value, Mapping):
        return {str(key): plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [plain(held) for held in value]
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if hasattr(value, "tolist"):  # arrays, tensors and their numbers
        return value.tolist()
    return value


def _unreadable(what: str, error: Exception) -> SourceError:
    return SourceError(
        f"{what} cannot be read: {one_line(error, 300)}", hint="it may have been cut short or damaged"
    )
