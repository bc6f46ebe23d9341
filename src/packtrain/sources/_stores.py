"""Rows of other libraries' stores as records: opened in each process, read by the library, plain Python.

Files are pinned by their content when the store is opened. Values of numpy and torch become numbers and
lists; media stay the bytes that were stored: nothing is decoded, and no pickle is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import files
from ..errors import SampleError, SourceError
from ..files import StrPath
from ._handles import by_library
from ._index import digest_files, merkle
from ._records import OfFiles, numbered

#: An open store: a row by its number.
Rows = Callable[[int], Any]


class Stored(OfFiles):
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
        cache_dir: StrPath | None = None,
        verify: bool = False,
    ) -> None:
        self._opened = opened
        paths = [os.path.join(folder, name) for name in [*(name for name, _ in held), *also]]
        pinned = digest_files(paths, folder, f".packtrain-{kind}", cache_dir=cache_dir, verify=verify)
        super().__init__(kind, folder, pinned, [rows for _, rows in held], "rows")
        self.fingerprint = files.digest_json({"rows": merkle(kind, self.digests), "chosen": chosen})
        self._open: tuple[int, Rows | None] = (0, None)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = numbered(index, len(self), self.folder)
        try:
            row = self._row(number)
        except SourceError:
            if all(os.path.exists(file.path) for file in self._held):
                raise
            self._open = (0, None)  # a copy was let go since: it is brought again
            row = self._row(number)
        record = plain(row)
        if not isinstance(record, dict):
            told = f"{self.where(number)} holds no fields, but {type(row).__name__}"
            raise SampleError("malformed_record", told)
        return record

    def _row(self, number: int) -> Any:
        """A row, out of the open store of this process."""
        held = self._open[1]
        if self._open[0] != os.getpid() or held is None:
            for file in self._held:
                file.check()
            with by_library(f"{self.folder} cannot be read"):
                held = self._opened(self.folder)
            self._open = (os.getpid(), held)
        with by_library(f"{self.where(number)} cannot be read"):
            return held(number)

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
