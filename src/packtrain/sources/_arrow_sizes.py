"""What compressed batches of Arrow say they unpack to, before pyarrow takes the memory for it.

A message is its metadata (a flatbuffer, https://arrow.apache.org/docs/format/Columnar.html) and a body of
buffers; a compressed buffer begins with the number of its bytes as they were.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import SourceError

#: Bytes that a batch may unpack to, or so many times what it takes.
MOST, TIMES = 1 << 30, 16

_DICTIONARY, _BATCH = 2, 3  # values of MessageHeader
_TYPE, _HEADER = 1, 2  # fields of Message
_DATA = 1  # of DictionaryBatch: a RecordBatch
_BUFFERS, _COMPRESSION = 2, 3  # of RecordBatch
_DICTIONARIES, _BATCHES = 2, 3  # of Footer


def check_file(mapped: Any, path: str) -> None:
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


def check_stream(mapped: Any, path: str) -> None:
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
