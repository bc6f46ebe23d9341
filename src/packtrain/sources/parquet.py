"""Parquet and Arrow tables: files, folders, globs, and folders written by Hugging Face `save_to_disk`.

Rows are read by their group: a row group of Parquet, a record batch of Arrow. The groups used last stay in
memory (`CACHE_BYTES` in all, at least one), Arrow files are memory-mapped. Order the reader by id where you
can: a random order reads a whole group per row, so small groups (100 to 1000 rows) are best for training.

A row comes as plain Python: structs are dicts, so an image column of `{"bytes", "path"}` is a ref that chat
records understand, bytes first. Files of one source must have the same column names; they come in natural
order of their names, those of a `save_to_disk` folder in the order it says. A folder of several splits
needs `split`.

The first read of a group checks it in full (offsets, counts, indices of dictionaries, UTF-8): native code
would believe a damaged file.

Safe between processes: nothing open is pickled or used in a forked child, and no reader threads are started.
The fingerprint is a Merkle root over the files' content and the chosen columns.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from .. import files
from ..checks import one_of
from ..errors import SampleError, SourceError, one_line, optional
from ..files import StrPath
from ._handles import Pinned, by_library
from ._index import digest_files, merkle
from ._open import expand, root_of
from ._records import OfFiles, Parts

SUFFIXES = (".parquet", ".pq", ".arrow", ".ipc", ".feather")
CACHE_BYTES = 1 << 28

Group = tuple[int, int]  # file, group in the file


class Table(OfFiles):
    """Rows of Parquet or Arrow files. Picklable; a worker opens the files itself."""

    def __init__(self, root: str, held: Sequence[Pinned], columns: Sequence[str] | None) -> None:
        self._columns = list(columns) if columns is not None else None
        self._groups: list[Group] = []
        counts: list[int] = []  # rows of each group
        rows: list[int] = []  # rows of each file
        self._reset()
        names: list[str] | None = None
        for number, file in enumerate(held):
            with _reading(file.path):
                reader = _reader(file.path, None)
                sizes = reader.rows
            if names is None:
                names = reader.names
                for column in self._columns or ():
                    one_of("column", column, names)
            elif set(names) != set(reader.names):
                odd = sorted(set(names) ^ set(reader.names))
                raise SourceError(
                    f"{file.path} has other columns than {held[0].path}: {', '.join(odd)}",
                    hint="open them as sources of their own, or choose columns both have",
                )
            rows.append(sum(sizes))
            self._groups += [(number, group) for group, count in enumerate(sizes) if count]
            counts += filter(None, sizes)
        super().__init__("parquet", root, held, rows, "rows", columns=self._columns)
        self._in_groups = Parts(root, counts)
        self.fingerprint = self._identity(len(self._held))

    def _identity(self, count: int) -> str:
        """The fingerprint of the first so many files."""
        rows = merkle("parquet", self.digests[:count])
        return files.digest_json({"rows": rows, "columns": self._columns})

    def beginnings(self, records: int) -> list[str]:
        """As that of `Shards`."""
        return [self._identity(count) for count in self._parts.first(records)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        slot, row = self._in_groups.place(index)
        table = self._group(slot)
        try:
            record: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
        except Exception as error:  # dates beyond Python's, damage that validation passes
            text = isinstance(error, UnicodeDecodeError)
            why = (
                "holds text that is not UTF-8" if text else f"has no value in Python: {one_line(error, 300)}"
            )
            raise SampleError("malformed_record", f"{self.where(index)} {why}") from None
        return record

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_open", "_cache", "_valid", "_owner")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    # ----------------------------------------------------------------------------------------
    def _reset(self) -> None:
        self._owner = os.getpid()
        self._open: OrderedDict[int, _Reader] = OrderedDict()
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._valid: set[int] = set()  # groups whose offsets, indices and texts were checked

    def _group(self, slot: int) -> Any:
        if self._owner != os.getpid():  # a forked child reads through files of its own
            self._reset()
        table = self._cache.get(slot)
        if table is not None:
            self._cache.move_to_end(slot)
            return table
        number, group = self._groups[slot]
        reader = self._open.get(number)
        if reader is None:
            self._held[number].check()
            with _reading(self._held[number].path):
                reader = _reader(self._held[number].path, self._columns)
            self._open[number] = reader
            while len(self._open) > 16:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        with _reading(f"{self._held[number].path} at group {group}"):
            table = reader.read(group)
            if slot not in self._valid:  # native code takes offsets and counts as they are
                table.validate(full=isinstance(reader, _Arrow))
                self._valid.add(slot)
        self._cache[slot] = table
        while len(self._cache) > 1 and sum(t.nbytes for t in self._cache.values()) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return table


def open_source(
    path: StrPath,
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    cache_dir: StrPath | None = None,
    verify_content: bool = False,
) -> Table:
    """Open Parquet or Arrow files.

    Args:
        path: a file, a folder (entered deeply), a glob, braces, or a `save_to_disk` folder.
        split: which split of a `save_to_disk` folder of several.
        columns: read only these; all by default.
        cache_dir: where digests go.
        verify_content: hash every file again instead of trusting sizes and times.

    Raises:
        SourceError: missing, not a table, no rows, files of different columns.
        MissingExtraError: pyarrow is not installed.
    """
    optional("pyarrow", "pyarrow", "arrow")
    folder = _split(os.path.abspath(os.fspath(path)), split)
    listed = _listed(folder)
    paths = listed if listed is not None else expand(folder, SUFFIXES, deep=True)
    root = root_of(folder)
    held = digest_files(paths, root, ".packtrain-tables", cache_dir=cache_dir, verify=verify_content)
    return Table(root, held, columns)


# --------------------------------------------------------------------------------------------
class _Parquet:
    """One open file: its columns, the rows of its groups, and a group as a table."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(path, memory_map=True, pre_buffer=False)
        self._columns = columns
        self.names = list(self._file.schema_arrow.names)
        meta = self._file.metadata
        self.rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]

    def read(self, group: int) -> Any:
        return self._file.read_row_group(group, columns=self._columns, use_threads=False)


class _Arrow:
    """Arrow file or stream format. A stream has no index: its batches are found by walking it, in place."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        import pyarrow as pa

        options = pa.ipc.IpcReadOptions(use_threads=False)
        mapped = pa.memory_map(path)
        self._columns = columns
        self._batches: list[Any] | None = None
        try:
            self._file = pa.ipc.open_file(mapped, options=options)
        except pa.ArrowInvalid:
            mapped.seek(0)
            _check_stream(mapped, path)
            mapped.seek(0)
            stream = pa.ipc.open_stream(mapped, options=options)
            self._batches = list(stream)
            self.names = list(stream.schema.names)
        else:
            _check_file(mapped, path)
            self.names = list(self._file.schema.names)

    @property
    def rows(self) -> list[int]:
        if self._batches is not None:
            return [batch.num_rows for batch in self._batches]
        return [self._file.get_batch(i).num_rows for i in range(self._file.num_record_batches)]

    def read(self, group: int) -> Any:
        batch = self._file.get_batch(group) if self._batches is None else self._batches[group]
        return batch if self._columns is None else batch.select(list(self._columns))


_Reader = _Parquet | _Arrow


def _reader(path: str, columns: Sequence[str] | None) -> _Reader:
    with open(path, "rb") as handle:
        magic = handle.read(4)
    return (_Parquet if magic == b"PAR1" else _Arrow)(path, columns)


def _reading(what: str) -> AbstractContextManager[None]:
    return by_library(f"{what} is no whole Parquet or Arrow file")


def _split(path: str, split: str | None) -> str:
    """The folder of a split, where `path` is a `save_to_disk` folder of several."""
    table = os.path.join(path, "dataset_dict.json")
    if not os.path.isfile(table):
        if split is not None:
            raise SourceError(f"{path} has no splits", hint="leave split out, or name the folder above")
        return path
    with files.reading(table, "a list of splits", "save the dataset again"):
        splits = [str(name) for name in dict(files.read_json(table)).get("splits", [])]
    if split is None and len(splits) == 1:
        split = splits[0]
    if split is None:
        raise SourceError(f"{path} has the splits {', '.join(splits)}", hint="choose one with split=")
    one_of("split", split, splits)
    return os.path.join(path, split)


def _listed(folder: str) -> list[str] | None:
    """The data files of a `save_to_disk` folder, in its own order."""
    state = os.path.join(folder, "state.json")
    if not os.path.isfile(state):
        return None
    with files.reading(state, "a state of a saved dataset", "save the dataset again"):
        held = dict(files.read_json(state))
        names = [os.path.join(folder, entry["filename"]) for entry in held["_data_files"]]
    if held.get("_indices_data_files"):
        raise SourceError(
            f"{folder} was saved with an index over its rows, by an old version of datasets",
            hint="load it, call flatten_indices() and save it again",
        )
    return names


# --------------------------------------------------------------------------------------------
# What compressed batches of Arrow say they unpack to, before pyarrow takes the memory for it
# --------------------------------------------------------------------------------------------
# A message is its metadata (a flatbuffer, https://arrow.apache.org/docs/format/Columnar.html) and a body of
# buffers; a compressed buffer begins with the number of its bytes as they were.
#: Bytes that a batch may unpack to, or so many times what it takes.
MOST, TIMES = 1 << 30, 16

_DICTIONARY, _BATCH = 2, 3  # values of MessageHeader
_TYPE, _HEADER = 1, 2  # fields of Message
_DATA = 1  # of DictionaryBatch: a RecordBatch
_BUFFERS, _COMPRESSION = 2, 3  # of RecordBatch
_DICTIONARIES, _BATCHES = 2, 3  # of Footer


def _check_file(mapped: Any, path: str) -> None:
    """Each batch of a file, by its footer.

    Raises:
        SourceError: it unpacks to too much.
    """
    import pyarrow as pa

    size = mapped.size()
    (length,) = struct.unpack("<i", mapped.read_at(4, size - 10))
    footer = memoryview(mapped.read_at(length, size - 10 - length))
    root = _follow(footer, 0)
    for name in (_DICTIONARIES, _BATCHES):
        for offset, _, _ in _vector(footer, _field(footer, root, name), "<qi4xq"):
            mapped.seek(offset)
            _check([pa.ipc.read_message(mapped)], path)


def _check_stream(mapped: Any, path: str) -> None:
    """All batches of a stream, which are held together. Raises as `check_file`."""
    import pyarrow as pa

    _check(pa.ipc.MessageReader.open_stream(mapped), path)


def _check(messages: Iterable[Any], path: str) -> None:
    stored = unpacked = 0
    for message in messages:
        if message.body is not None:
            stored += message.body.size
            unpacked += sum(_unpacked(memoryview(message.metadata), memoryview(message.body)))
    if unpacked > max(MOST, TIMES * stored):
        raise SourceError(
            f"{path} unpacks {stored:,} bytes of a batch to {unpacked:,}",
            hint="write it with smaller batches, or uncompressed",
        )


def _unpacked(meta: memoryview, body: memoryview) -> Iterator[int]:
    """Bytes of each compressed buffer of a batch as they were; none of another message."""
    root = _follow(meta, 0)
    kind, head = meta[_field(meta, root, _TYPE)], _follow(meta, _field(meta, root, _HEADER))
    if kind == _DICTIONARY:
        head = _follow(meta, _field(meta, head, _DATA))
    if kind not in (_DICTIONARY, _BATCH) or not _field(meta, head, _COMPRESSION):
        return
    for start, length in _vector(meta, _field(meta, head, _BUFFERS), "<qq"):
        if length:
            yield max(length, struct.unpack_from("<q", body, start)[0])


def _follow(data: memoryview, at: int) -> int:
    """Where an offset leads."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a table stands; 0: it is not set."""
    known = table - struct.unpack_from("<i", data, table)[0]
    place = 4 + 2 * number
    (size,) = struct.unpack_from("<H", data, known)
    (offset,) = struct.unpack_from("<H", data, known + place) if place < size else (0,)
    return table + offset if offset else 0


def _vector(data: memoryview, at: int, form: str) -> Iterator[tuple[int, ...]]:
    """The structs of a vector; none of one that is not set."""
    if at:
        start = _follow(data, at)
        (count,) = struct.unpack_from("<I", data, start)
        stop = start + 4 + count * struct.calcsize(form)
        yield from struct.iter_unpack(form, data[start + 4 : stop])
