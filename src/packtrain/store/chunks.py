"""A chunk: packs that are already encoded, in one Arrow IPC file with a manifest, read through a memory map.

    with ChunkWriter("out/chunk_00000000.arrow", media="tensor") as writer:
        writer.add(pack)                 # a pack: encoded samples, each with its `sample_id`
    writer.manifest                      # what chunk_00000000.json holds

    reader = ChunkReader("out/chunk_00000000.arrow")
    reader[7]                            # list of encoded samples: goes into PaddingFreeCollator
    reader.row(7)                        # the same as one row: input_ids … cu_seq_lens lengths sample_ids

One record batch is one pack, one row one sample (segment). Columns: `sample_id` (int64, else text), and for
each field `<name>` (`large_list`, the numbers of the sample one after the other), `<name>.shape` and
`<name>.dtype` (what they are folded to and restored as), `<name>.palette` where pictures are kept as `uint8`,
`<name>.tail` where the padding of a media tensor is cut off (exact: one value stands for all of it);
`media.record`, `media.fields` and `media.bytes` where they are kept as bytes. A field that a sample lacks
is null. All integers take the smallest type that holds every value of the field in the chunk (ids of a
vocabulary under 65,536: uint16) and come back in their own, bit for bit, as do all other values.

`media` says how tensors that are neither per token nor per sample are kept:

    source   the bytes of the media and the record; reading encodes them again (needs `records`)
    uint8    tensors; pixels that were normalised from bytes as those bytes and a table (exact, a quarter; the
             default of everything that writes chunks: it needs nothing beside the tensors, and loses nothing)
    tensor   tensors as they are: read without any copy, where no padding was cut off

A chunk is absent or whole: the file is renamed to its name when it is complete, and the manifest (size,
SHA-256, counts, and what the caller gives as `meta`) comes last. The same packs give the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..checks import one_of
from ..errors import InputError, optional
from . import _chunk_reader as fields
from ._chunk_reader import CHUNK_SCHEMA, ChunkReader, manifest_of
from ._folders import sealed

__all__ = [
    "CHUNK_SCHEMA",
    "DEFAULT_MEDIA",
    "MEDIA",
    "ChunkReader",
    "ChunkWriter",
    "OpenChunks",
    "manifest_of",
]


# --------------------------------------------------------------------------------------------
# What a chunk will hold, kept until its types are known: an Arrow file has one schema for all its packs
# --------------------------------------------------------------------------------------------
# Small values wait in memory, more than SPOOL bytes in a nameless file beside the chunk, so memory stays flat
# and a stopped writer leaves nothing behind.
SPOOL = 1 << 26

#: Fields that come first in a chunk, in this order; the others follow by name.
FIRST = ("input_ids", "labels", "position_ids")


@dataclass(slots=True)
class Held:
    """One value in the spool: where its numbers are, those of its palette, and the value of its tail."""

    dtype: str
    shape: tuple[int, ...]
    kind: np.dtype[Any]
    offset: int
    count: int
    table: NDArray[Any] | None = None
    tail: NDArray[Any] | None = None


@dataclass(slots=True)
class Facts:
    """What all values of a field have in common.

    Attributes:
        kinds: stored types seen; more than one only among integers.
        low, high: range of its integers.
        palette: every value so far has a palette.
        tail: some value has a tail.
    """

    kinds: set[str] = field(default_factory=set)
    dtypes: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    low: int = 0
    high: int = 0
    palette: bool = False
    tail: bool = False
    is_token: bool = True

    def see(self, value: fields.Value, name: str, length: int) -> None:
        if value.dtype not in self.dtypes:
            self.dtypes.append(value.dtype)
        self.ranks.add(len(value.shape))
        self.is_token &= value.shape == (length,)
        kind = value.array.dtype
        whole = kind.kind in "iu" and value.dtype not in (fields.JSON, "torch.bfloat16")
        self.kinds.add("integer" if whole else f"{kind}/{'json' if value.dtype == fields.JSON else ''}")
        if len(self.kinds) > 1:
            raise InputError(
                f"{name} is {' here and '.join(self.dtypes)} there in one chunk",
                hint="encode all samples of a chunk alike",
            )
        if whole and len(value.array):
            self.low = min(self.low, int(value.array.min()))
            self.high = max(self.high, int(value.array.max()))

    def stored(self) -> np.dtype[Any]:
        """The type in the file."""
        if self.palette:
            return np.dtype(np.uint8)
        (kind,) = self.kinds
        return (
            fields.narrowest(self.low, self.high) if kind == "integer" else np.dtype(kind.partition("/")[0])
        )


def is_media(name: str, shape: tuple[int, ...], length: int) -> bool:
    """Not one value per token, not one per sample: what the media of a sample were encoded to."""
    per_token = shape == (length,) or (name == "position_ids" and shape[-1:] == (length,))
    return not per_token and len(shape) > 0


class Spool:
    """Packs as they come. `packs[p][s]` is segment s of pack p: field -> `Held`."""

    def __init__(self, folder: Path, *, palettes: bool) -> None:
        files.make_folder(folder)
        self._file = tempfile.SpooledTemporaryFile(max_size=SPOOL, dir=str(folder))  # noqa: SIM115
        self._folder, self._palettes = folder, palettes
        self._end = 0
        self.facts: dict[str, Facts] = {}
        self.packs: list[list[dict[str, Held]]] = []
        self.ids: list[list[Any]] = []

    def add(self, samples: list[Mapping[str, Any]], ids: list[Any]) -> int:
        """Take a pack; returns the bytes of its values."""
        began = self._end
        self.packs.append([self._hold(sample) for sample in samples])
        self.ids.append(ids)
        return self._end - began

    def _hold(self, sample: Mapping[str, Any]) -> dict[str, Held]:
        length = int(np.shape(sample["input_ids"])[-1])
        out = {}
        for name, raw in sample.items():
            value = fields.read_value(raw, name)
            facts = self.facts.setdefault(name, Facts(palette=self._palettes))
            facts.see(value, name, length)
            media = is_media(name, value.shape, length)
            facts.palette &= media
            coded = fields.to_palette(value) if facts.palette else None
            facts.palette = coded is not None
            cut = fields.to_tail(value) if media and coded is None else None
            facts.tail |= cut is not None
            array, table = coded or (cut[0] if cut else value.array, None)
            tail = cut[1] if cut else None
            out[name] = Held(value.dtype, value.shape, array.dtype, self._end, len(array), table, tail)
            self._write(array)
        return out

    def _write(self, array: NDArray[Any]) -> None:
        try:
            self._file.write(array.data if len(array) else b"")
        except OSError as error:
            error.filename = error.filename or str(self._folder)  # a nameless file in it
            raise
        self._end += array.nbytes

    def names(self) -> list[str]:
        """Fields in the order of the file."""
        first = [name for name in FIRST if name in self.facts]
        return first + sorted(set(self.facts) - set(first))

    def read(self, held: Held) -> NDArray[Any]:
        """The flat numbers of a value, or the codes of its palette."""
        self._file.seek(held.offset)
        return np.frombuffer(self._file.read(held.count * held.kind.itemsize), dtype=held.kind)

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


# --------------------------------------------------------------------------------------------
# A chunk: packs that are already encoded, in one Arrow IPC file with a manifest, read through a memory map
# --------------------------------------------------------------------------------------------
_arrow = functools.partial(optional, "pyarrow.ipc", "pyarrow", "arrow")

#: How media may be kept.
MEDIA = ("source", "uint8", "tensor")
#: How they are kept where nobody says: by exports, producers and encode caches.
DEFAULT_MEDIA = "uint8"


class ChunkWriter:
    """Collects packs and publishes them as one chunk.

    Args:
        path: the chunk's file (`.arrow`); the manifest goes beside it (`.json`).
        media: see the module.
        meta: plain JSON for the manifest. More may be put into `self.meta` until `close`.

    Attributes:
        packs, segments, tokens, bytes: what was added so far.
        sizes: tokens of each pack.
        manifest: as published; empty before `close`.

    Raises:
        MissingExtraError: pyarrow is not installed.
        InputError: a sample that a chunk cannot hold; names pack, member and field.
    """

    def __init__(
        self, path: str | Path, *, media: str = DEFAULT_MEDIA, meta: Mapping[str, Any] | None = None
    ) -> None:
        one_of("media", media, MEDIA)
        _arrow()
        self.path = Path(path)
        self.media = media
        self.meta = dict(meta or {})
        self.manifest: dict[str, Any] = {}
        self.packs = self.segments = self.tokens = self.bytes = 0
        self.sizes: list[int] = []
        self._spool: Spool | None = Spool(self.path.parent, palettes=media == "uint8")
        self._sources: list[list[list[bytes] | None]] = []

    def add(
        self, pack: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Add one pack.

        Args:
            pack: encoded samples; `sample_id` is an int, a text or absent (a filler).
            records: the chat samples they were encoded from; needed by `media="source"` where samples have
                media.
        """
        assert self._spool is not None, "the writer is closed"
        if not len(pack):
            raise InputError("a pack without samples", hint="leave empty packs out")
        sources: list[list[bytes] | None] = []
        samples: list[Mapping[str, Any]] = []
        for number, sample in enumerate(pack):
            if "input_ids" not in sample or not np.shape(sample["input_ids"])[-1]:
                raise InputError(f"member {number} of pack {self.packs} has no input_ids")
            record = None if records is None else records[number]
            kept, media = self._without_media(dict(sample), record)
            kept.pop("sample_id", None)
            samples.append(kept)
            sources.append(media)
        try:
            self.bytes += self._spool.add(samples, [_id_of(sample.get("sample_id")) for sample in pack])
        except InputError as error:
            raise InputError(f"pack {self.packs}: {error.message}", hint=error.hint) from None
        self._sources.append(sources)
        self.packs += 1
        self.segments += len(pack)
        self.sizes.append(sum(int(np.shape(sample["input_ids"])[-1]) for sample in pack))
        self.tokens += self.sizes[-1]

    def _without_media(
        self, sample: dict[str, Any], record: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], list[bytes] | None]:
        """The sample as it is stored, and its media where they go by their bytes."""
        if self.media != "source":
            return sample, None
        length = int(np.shape(sample["input_ids"])[-1])
        shapes = {name: tuple(value.shape) for name, value in sample.items() if hasattr(value, "shape")}
        shapes.pop("sample_id", None)
        names = sorted(name for name, shape in shapes.items() if is_media(name, shape, length))
        if not names:
            return sample, None
        if record is None:
            raise InputError(
                f"sample {sample.get('sample_id')} of pack {self.packs} has media ({names[0]}) but no record",
                hint="pass records, or keep tensors: media='tensor'",
            )
        plain, media = fields.pull_media(record)
        self.bytes += sum(map(len, media))
        kept = {name: value for name, value in sample.items() if name not in names}
        return {**kept, fields.MEDIA_RECORD: plain, fields.MEDIA_FIELDS: names}, media

    def close(self) -> dict[str, Any]:
        """Publish the chunk, then its manifest; returns the manifest."""
        spool, self._spool = self._spool, None
        if spool is None:
            return self.manifest
        try:
            if not self.packs:
                raise InputError(f"{self.path} would hold no pack", hint="a chunk has at least one")
            for path in (manifest_of(self.path), self.path):
                files.remove_leftovers(path.parent, path.name)
            files.remove(manifest_of(self.path))
            with files.publish(self.path) as handle:
                hashed = _Hashed(handle)
                described = _write(hashed, spool, self._sources, self.media)
        finally:
            spool.close()
        ids = [one for many in spool.ids for one in many if one is not None]
        file = {"file": self.path.name, "bytes": hashed.size, "sha256": hashed.digest.hexdigest()}
        counts = {name: getattr(self, name) for name in ("packs", "segments", "tokens")}
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        told = {"schema": CHUNK_SCHEMA, "samples": len(ids), "media": self.media, "meta": self.meta}
        self.manifest = sealed({**told, **file, **counts, **ends, "fields": described})
        files.publish_json(manifest_of(self.path), self.manifest)
        return self.manifest

    def discard(self) -> None:
        """Drop what was added; nothing was published."""
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.discard()


class _Hashed:
    """A file that is hashed as it is written."""

    closed = False

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.digest.update(view)
        self.size += view.nbytes
        self._handle.write(view)
        return view.nbytes

    def flush(self) -> None:
        self._handle.flush()


def _write(handle: _Hashed, spool: Spool, sources: list[list[Any]], media: str) -> dict[str, dict[str, Any]]:
    """All packs as record batches; what is to be said about the fields."""
    pa = _arrow()
    ids = [one for many in spool.ids for one in many if one is not None]
    id_type = pa.int64() if all(isinstance(one, int) for one in ids) else pa.large_string()
    names = spool.names()
    described: dict[str, dict[str, Any]] = {}
    types = {name: _types(pa, name, spool.facts[name]) for name in names}
    columns = {"sample_id": id_type}
    for name in names:
        facts = spool.facts[name]
        whole = all(name in segment for pack in spool.packs for segment in pack)
        columns |= types[name]
        described[name] = {
            "dtypes": facts.dtypes,
            "stored": str(facts.stored()),
            "palette": facts.palette,
            "tail": facts.tail,
            # A field that every sample has, with one value per token: read a pack at a time.
            "per_token": facts.is_token and whole and len(facts.dtypes) == 1,
        }
    has_media = any(one is not None for many in sources for one in many)
    if has_media:
        columns[fields.MEDIA_BYTES] = pa.list_(pa.large_binary())
    told = {"schema": CHUNK_SCHEMA, "media": media, "fields": described}
    schema = pa.schema(list(columns.items()), metadata={"packtrain": json.dumps(told, sort_keys=True)})
    with pa.ipc.new_file(pa.PythonFile(handle, mode="w"), schema) as out:
        for number, pack in enumerate(spool.packs):
            row_ids = [one if one is None or id_type == pa.int64() else str(one) for one in spool.ids[number]]
            arrays = [pa.array(row_ids, type=id_type)]
            for name in names:
                held = [segment.get(name) for segment in pack]
                arrays += _arrays(pa, spool, spool.facts[name], types[name].values(), held)
            if has_media:
                arrays.append(pa.array(sources[number], type=columns[fields.MEDIA_BYTES]))
            out.write_batch(pa.record_batch(arrays, schema=schema))
    return described


def _types(pa: Any, name: str, facts: Facts) -> dict[str, Any]:
    """The columns of one field, with their types."""
    stored = pa.from_numpy_dtype(facts.stored())
    types = {
        name: pa.large_list(pa.field("item", stored, nullable=False)),
        f"{name}.shape": pa.list_(pa.int64()),
        f"{name}.dtype": pa.dictionary(pa.int8(), pa.string()),
    }
    if facts.palette:
        table = next(iter(facts.kinds)).partition("/")[0]
        types[f"{name}.palette"] = pa.large_list(pa.from_numpy_dtype(table))
    if facts.tail:
        types[f"{name}.tail"] = pa.large_list(stored)
    return types


def _arrays(
    pa: Any, spool: Spool, facts: Facts, types: Iterable[Any], held: list[Held | None]
) -> Iterator[Any]:
    """The columns of one field in one pack."""
    stored, kinds = facts.stored(), iter(types)
    flats = [np.zeros(0, stored) if one is None else _flat(spool, one, facts.palette) for one in held]
    absent = pa.array([one is None for one in held])
    offsets = np.concatenate([[0], np.cumsum([len(flat) for flat in flats])]).astype(np.int64)
    whole = np.concatenate([flat.astype(stored, copy=False) for flat in flats])
    codes = pa.array([None if one is None else facts.dtypes.index(one.dtype) for one in held], pa.int8())
    yield pa.LargeListArray.from_arrays(offsets, pa.array(whole), type=next(kinds), mask=absent)
    yield pa.array([None if one is None else list(one.shape) for one in held], next(kinds))
    next(kinds)
    yield pa.DictionaryArray.from_arrays(codes, pa.array(facts.dtypes, pa.string()))
    if facts.palette:
        tables = [None if one is None or one.table is None else one.table.reshape(-1) for one in held]
        yield pa.array(tables, next(kinds))
    if facts.tail:
        tails = [None if one is None or one.tail is None else one.tail.astype(stored) for one in held]
        yield pa.array(tails, next(kinds))


def _flat(spool: Spool, held: Held, palette: bool) -> Any:
    flat = spool.read(held)
    if held.table is None or palette:
        return flat
    return fields.from_palette(flat, held.table, held.shape)


def _id_of(value: Any) -> int | str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InputError(f"sample_id {value!r} is neither a number nor a text") from None


# --------------------------------------------------------------------------------------------
# Chunks that stay open, at most so many: the one cache of whoever reads packs out of chunks
# --------------------------------------------------------------------------------------------
# An open chunk holds a file descriptor and a map, no packs. The one that was not read for longest is let go.
#: Far below the descriptors that a process may have.
OPEN = 64


class OpenChunks:
    """Chunks by number. Picklable: another process opens its own.

    Args:
        opened: opens the chunk of a number.
        limit: chunks that stay open.
        verify: hash each chunk once, before its first pack is read.
    """

    def __init__(
        self, opened: Callable[[int], ChunkReader], limit: int = OPEN, *, verify: bool = False
    ) -> None:
        self._opened, self.limit, self.verify = opened, limit, verify
        self._open: OrderedDict[int, ChunkReader] = OrderedDict()
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._open

    def __getitem__(self, chunk: int) -> ChunkReader:
        reader = self._open.pop(chunk, None)
        while len(self._open) >= self.limit:
            self._open.popitem(last=False)
        if reader is None:
            reader = self._opened(chunk)
            if self.verify and chunk not in self._verified:
                reader.check_digest()
                self._verified.add(chunk)
        self._open[chunk] = reader
        return reader

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": OrderedDict()}
