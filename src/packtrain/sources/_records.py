"""A file of JSON records as a `Source`: random access, content fingerprint, safe between processes."""

from __future__ import annotations

import bisect
import hashlib
import json
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..errors import SampleError, SourceError
from ..files import StrPath, digest_json
from . import _index
from ._handles import Pinned, read
from ._open import below, near
from ._values import json_of
from .keys import FIELDS

_BUILDERS: dict[str, Callable[[Pinned], _index.Built]] = {
    "jsonl": _index.scan_lines,
    "json": _index.scan_array,
    "object": _index.scan_object,
}
_PROBE = 1 << 16
_HASHED = 1 << 24
_ONE_RECORD = 1 << 26  # bytes of a file that may be one record
_OF_RECORD = ("messages", "conversations", "texts", "instruction", "prompt", "response")
_SPACE = b" \t\r\n"


# --------------------------------------------------------------------------------------------
# JSON in which no object gives a key twice: which of the two was meant, nobody can say
# --------------------------------------------------------------------------------------------
MOST_RECORD = 1 << 28  # bytes of one record


class Twice(ValueError):
    """An object gives a key twice."""


def loads(text: str | bytes) -> Any:
    """`json.loads`.

    Raises:
        Twice: an object gives a key twice.
        ValueError: the text is no JSON, larger than a record may be, or nested too deeply.
    """
    if len(text) > MOST_RECORD:
        raise ValueError(f"{len(text):,} bytes, a record has at most {MOST_RECORD:,}")
    text = text if isinstance(text, str) else text.decode("utf-8")
    try:
        held, end = _SCAN(text, 0)
    except StopIteration:  # space ahead of it, or no JSON: the decoder says which
        end = -1
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return held if end == len(text) else _DECODER.decode(text)


def record_of(data: bytes, what: str) -> dict[str, Any]:
    """A record of JSON, as UTF-8.

    Raises:
        SampleError: malformed_record; `what` says of what.
    """
    record: dict[str, Any] = {}
    try:
        record = loads(data.decode("utf-8-sig"))
        fault = None if isinstance(record, dict) else f"is {type(record).__name__}, not an object"
    except (ValueError, RecursionError) as error:
        fault = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"is not valid JSON: {error}"
    if fault is not None:
        raise SampleError("malformed_record", f"{what} {fault}")
    return record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) != len(pairs):
        raise Twice(f"the key {twice(name for name, _ in pairs)!r} twice")
    return held


def twice(names: Iterable[str]) -> str | None:
    """The first name that comes again."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
_SCAN: Any = vars(_DECODER)["scan_once"]


# --------------------------------------------------------------------------------------------
# Sources of one file or several, and where each of their records stands
# --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a source: its records have the ids start .. stop - 1."""

    name: str
    start: int
    stop: int
    fingerprint: str


def numbered(index: int, count: int, where: str) -> int:
    """A record's number; IndexError outside of 0 .. count - 1, so that a source can be iterated."""
    number = operator.index(index)
    if not 0 <= number < count:
        raise IndexError(f"record {number} of {count} ({where})")
    return number


class Parts:
    """The parts of a source in order (files, packs, other sources): where each of its records stands.

    Args:
        name: of the source, for messages.
        counts: records of each part.
        what: they are: there has to be one. None: the caller sees to it.

    Raises:
        SourceError: there is none.
    """

    __slots__ = ("name", "stops")

    def __init__(self, name: str, counts: Iterable[int], what: str | None = None) -> None:
        self.name, self.stops = name, [*accumulate(counts)]
        if what is not None and not len(self):
            raise SourceError(f"{name} holds no {what}", hint="a source needs at least one record")

    def __len__(self) -> int:
        return self.stops[-1] if self.stops else 0

    def of(self, number: int) -> tuple[int, int]:
        """(part, number in it) of a record."""
        part = bisect.bisect_right(self.stops, number)
        return part, number - (self.stops[part - 1] if part else 0)

    def place(self, index: int) -> tuple[int, int]:
        """As `of`; IndexError outside of the source."""
        return self.of(numbered(index, len(self), self.name))

    def first(self, records: int) -> range:
        """How many parts hold the first `records` records and no other; several where parts are empty."""
        low, high = bisect.bisect_left(self.stops, records), bisect.bisect_right(self.stops, records)
        return range(low + 1, high + 1)

    def shards(self, names: Iterable[str], digests: Iterable[str]) -> list[Shard]:
        """The parts with their id ranges."""
        return [Shard(*row) for row in zip(names, [0, *self.stops], self.stops, digests, strict=False)]


class InParts:
    """What sources of several parts have in common.

    Attributes:
        folder: where relative media paths start by default.
    """

    kind: str
    folder: str
    fingerprint: str
    _parts: Parts

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"<{self.kind} source {self.folder}: {len(self)} records, {self.fingerprint[:7]}>"


class OfFiles(InParts):
    """A source of pinned files, the records of one behind those of the other.

    Args:
        kind: of the source.
        held: the files in order; behind those of records there may be others (an index).
        counts: records of each.
        what: they are.
        chosen: what of them is read, as plain JSON.
    """

    def __init__(
        self, kind: str, folder: str, held: Sequence[Pinned], counts: Iterable[int], what: str, **chosen: Any
    ) -> None:
        self.folder, self.kind, self._held, self._chosen = folder, kind, list(held), chosen
        self._parts = Parts(folder, counts, what)
        self._names = below(folder, [file.path for file in self._held])

    @property
    def shards(self) -> list[Shard]:
        """The files in order, with their id ranges."""
        return self._parts.shards(self._names, self.digests)

    @property
    def digests(self) -> list[str]:
        """Of the files."""
        return [file.sha256 for file in self._held]

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON."""
        told = [{"size": file.size, "sha256": file.sha256} for file in self._held]
        return {"kind": self.kind, **self._chosen, "files": told, "records": len(self)}

    def where(self, index: int) -> str:
        """`train-00000.parquet[17]`: the row of its file, from 0."""
        number, row = self._parts.place(index)
        return f"{self._names[number]}[{row}]"


class RecordFile:
    """Records of one JSONL or JSON-array file.

    `source[i]` is the object as it stands in the file, parsed anew at each call: callers own it. The
    fingerprint covers the kind and the bytes, never name or place. Picklable: a worker reopens the file by
    path and refuses when it is not the same file any more.

    Attributes:
        path: absolute path of the file.
        folder: of the file: where relative media paths start by default.
    """

    def __init__(
        self, file: Pinned, kind: str, index: _index.Index, cache_dir: StrPath | None = None
    ) -> None:
        self._file = replace(file, sha256=index.sha256)
        self._cache_dir, self._kind, self._index = cache_dir, kind, index
        self.path = file.path
        self.folder, self._name = os.path.split(file.path)

    @property
    def fingerprint(self) -> str:
        return digest_json({"kind": self._kind, "sha256": self._index.sha256})

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON."""
        files = [{"size": self._file.size, "sha256": self._index.sha256}]
        return {"kind": self._kind, "files": files, "records": self._index.count}

    @property
    def shards(self) -> list[Shard]:
        """The one file, as sources of several files tell theirs."""
        return [Shard(self._name, 0, len(self), self.fingerprint)]

    def begins_with(self, size: int, sha256: str, records: int) -> bool:
        """Whether this file is an earlier one with more lines.

        Args:
            size: bytes of the earlier file.
            sha256: its digest.
            records: how many records it held.
        """
        if self._kind != "jsonl" or not 0 < size <= self._file.size or not 0 < records <= len(self):
            return False
        ended = read(self._file, size - 1, 1) == b"\n" or size == self._file.size
        if not ended and not read(self._file, size, min(2, self._file.size - size)).startswith(
            (b"\n", b"\r\n")
        ):
            return False  # its last line goes on
        if self._span(records - 1)[0] >= size or (records < len(self) and self._span(records)[0] < size):
            return False
        digest = hashlib.sha256()
        for offset in range(0, size, _HASHED):
            digest.update(read(self._file, offset, min(_HASHED, size - offset)))
        return digest.hexdigest() == sha256

    def __len__(self) -> int:
        return self._index.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = numbered(index, len(self), self._name)
        start, stop = self._span(number)
        if stop - start > MOST_RECORD:
            told = f"{self.where(number)} has {stop - start:,} bytes, a record has at most {MOST_RECORD:,}"
            raise SampleError("malformed_record", told)
        data = read(self._file, start, stop - start).strip(_SPACE)
        if self._kind == "json":
            data = data.removesuffix(b",").rstrip(_SPACE)
        record: dict[str, Any] = {}
        hint = None
        try:
            record = loads(data.decode("utf-8"))
            fault = None if isinstance(record, dict) else f"is {type(record).__name__}, not an object"
        except UnicodeDecodeError as error:
            fault = f"is not UTF-8 (byte {start + error.start} of the file)"
            hint = "convert the file to UTF-8"
        except Twice as error:
            fault = f"gives {error}"
        except ValueError as error:
            fault = f"is not valid JSON: {error}" if data else "is empty"
        if fault is not None:
            raise SampleError("malformed_record", f"{self.where(number)} {fault}", hint=hint)
        return record

    def where(self, index: int) -> str:
        """`train.jsonl:17` (line from 1) or `train.json[16]` (element from 0)."""
        if self._kind == "jsonl":
            return f"{self._name}:{self._index.line(operator.index(index))}"
        return f"{self._name}[{operator.index(index)}]"

    def __repr__(self) -> str:
        return f"<{self._kind} source {self._name}: {len(self)} records, {self.fingerprint[:7]}>"

    def _span(self, index: int) -> tuple[int, int]:
        """Where record `index` is. An index replaced or removed by another process is loaded again."""
        try:
            return self._index.span(index)
        except SourceError:
            again = _index.load(self._file, self._kind, _BUILDERS[self._kind], cache_dir=self._cache_dir)
            if again.sha256 != self._index.sha256:
                raise
            self._index = again
            return again.span(index)


def open_records(
    path: StrPath,
    kind: str,
    *,
    cache_dir: StrPath | None = None,
    verify_content: bool = False,
    keep: int = _index.KEEP,
) -> RecordFile:
    """Open a file of records; the content decides between JSONL and a JSON array where `kind` is wrong.

    Args:
        path: the file.
        kind: "jsonl" or "json": what its name promises.
        cache_dir: where the index goes.
        verify_content: hash the file again instead of trusting its size and mtime.
        keep: bytes of its index that may stay in memory.

    Raises:
        SourceError: missing, empty, compressed, not a list of records, unreadable.
    """
    text = os.fspath(path)
    if os.path.isdir(text):
        raise SourceError(f"{text} is a folder, not a file of records", hint="name a file in it")
    if not os.path.exists(text):
        raise SourceError(f"{text} does not exist", hint=near(text))
    file = _index.pin(text)
    kind = find_kind(file, kind)
    index = _index.load(file, kind, _BUILDERS[kind], cache_dir=cache_dir, verify=verify_content, keep=keep)
    if index.count == 0:
        raise SourceError(f"{file.path} holds no records", hint="a source needs at least one record")
    return RecordFile(file, kind, index, cache_dir)


def find_kind(file: Pinned, kind: str) -> str:
    """The layout by content: by the first character, and where that is not enough by the first line."""
    head = read(file, 0, min(4, file.size))
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        raise SourceError(f"{file.path} is compressed", hint="unpack it first (gzip -d, zstd -d)")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SourceError(f"{file.path} is UTF-16", hint="convert it to UTF-8")
    start = _text_from(file, len(_index.BOM) if head.startswith(_index.BOM) else 0)
    if start == file.size:
        raise SourceError(f"{file.path} is empty", hint="a source needs at least one record")
    first = read(file, start, min(12, file.size - start))
    if kind == "jsonl" and not first.startswith(b"["):
        return kind
    alone, more = _first_line(file, start)
    if first.startswith(b"["):
        # an array, unless it is the wrong first line of a JSONL
        return "jsonl" if kind == "jsonl" and more and alone else "json"
    if kind == "json" and first.startswith(b"{") and not (alone and more):
        if _is_record(read(file, start, file.size - start) if file.size <= _ONE_RECORD else b""):
            return "object"
        raise SourceError(
            f"{file.path} is one JSON object, not a list of records",
            hint="give the list of records itself, or one object per line as .jsonl",
        )
    if kind == "json" and not first.startswith(b"{"):
        raise SourceError(f"{file.path} is no JSON array: it starts with {first!r}")
    return "jsonl"


def _is_record(data: bytes) -> bool:
    """Whether a JSON object is one chat record, by the fields it has."""
    held = json_of(data)
    names = {name for field in _OF_RECORD for name in FIELDS[field]}
    return isinstance(held, dict) and not names.isdisjoint(held)


def _first_line(file: Pinned, start: int) -> tuple[bool, bool]:
    """(the line at `start` is JSON by itself, more text follows it)."""
    parts: list[bytes] = []
    stop, size = file.size, 0
    for offset in range(start, file.size, _PROBE):
        block = read(file, offset, min(_PROBE, file.size - offset))
        end = block.find(b"\n")
        size += len(block)
        if size <= _ONE_RECORD:
            parts.append(block if end < 0 else block[:end])
        if end >= 0:
            stop = offset + end
            break
    more = _text_from(file, stop) < file.size
    return size <= _ONE_RECORD and json_of(b"".join(parts)) is not None, more


def _text_from(file: Pinned, start: int) -> int:
    """Offset of the first byte from `start` on that is not white space; the size where there is none."""
    for offset in range(start, file.size, _PROBE):
        block = read(file, offset, min(_PROBE, file.size - offset))
        left = block.lstrip(_SPACE)
        if left:
            return offset + len(block) - len(left)
    return file.size
