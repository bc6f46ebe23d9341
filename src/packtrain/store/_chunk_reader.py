"""What a chunk holds of encoded samples: values as flat arrays, media as source bytes, and back, bit for bit.

    value                           type in the chunk        stored as
    torch tensor                    torch.int64, …           its numbers; bfloat16 by its bits, bool as uint8
    numpy array                     int64, …                 its numbers
    list of numbers                 list.int64, list.float64 its numbers
    anything else that is JSON      json                     UTF-8 text

Integers are narrowed to the smallest type that holds all values of a field in the chunk and come back in
their own. `palette` is the lossless form of decoded pictures: a pixel tensor that was normalised from bytes
has at most 256 values in each colour channel, so one byte and a table of values give every bit back. A
tensor with more values (sound features, pictures scaled in floating point) has none and stays as it is.

A *tail* is what padding leaves: sound features have 3,000 or 30,000 frames whatever the clip's length, and
from its end on one and the same value. Frames behind the last one that differs are not stored, only their
value.
"""

from __future__ import annotations

import json
import mmap
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..errors import ChecksumError, DriftError, FormatError, InputError, counted, optional
from ..media.location import read_bytes, with_media
from ..remote.copies import present
from ._folders import check_seal

JSON = "json"

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64)


@dataclass(frozen=True, slots=True)
class Value:
    """A field of one sample: `array` is flat and C-ordered, `shape` what it is folded to."""

    dtype: str
    shape: tuple[int, ...]
    array: NDArray[Any]


def read_value(value: Any, name: str) -> Value:
    """A value as numbers, with what is needed to restore it.

    Raises:
        InputError: the value is neither an array of numbers nor JSON.
    """
    if type(value).__module__.startswith("torch"):
        return _of_tensor(value, name)
    if isinstance(value, np.ndarray | np.generic):
        return _of_array(np.asarray(value), str(np.asarray(value).dtype), name)
    if isinstance(value, list) and value and all(type(item) in (int, float) for item in value):
        whole = all(type(item) is int for item in value)
        array = np.array(value, dtype=np.int64 if whole else np.float64)
        return _of_array(array, f"list.{array.dtype}", name)
    try:
        text = files.canonical_json(value)
        same = json.loads(text) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise InputError(
            f"{name} is a {type(value).__name__} that a chunk cannot hold",
            hint="give numbers as tensors, arrays or lists, and anything else as JSON values",
        )
    return Value(JSON, (), np.frombuffer(text, dtype=np.uint8))


def _of_tensor(tensor: Any, name: str) -> Value:
    import torch

    flat = tensor.detach().cpu().contiguous()
    dtype, shape = str(tensor.dtype), tuple(int(size) for size in tensor.shape)
    if flat.dtype is torch.bfloat16:
        return Value(dtype, shape, flat.reshape(-1).view(torch.int16).numpy().view(np.uint16))
    try:
        array = flat.numpy()
    except (TypeError, RuntimeError):
        raise InputError(
            f"{name} is a tensor of {dtype} on {tensor.device}", hint="use a dense number type"
        ) from None
    return Value(dtype, shape, _of_array(array, dtype, name).array)


def _of_array(array: NDArray[Any], dtype: str, name: str) -> Value:
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise InputError(f"{name} is an array of {array.dtype}", hint="use integers, floats or booleans")
    shape = array.shape
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.byteorder == ">":
        flat = flat.astype(flat.dtype.newbyteorder("<"))
        dtype = str(flat.dtype)
    return Value(dtype, shape, flat.view(np.uint8) if flat.dtype.kind == "b" else flat)


def restore(flat: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> Any:
    """The value that `read_value` saw. Only narrowed integers, lists and JSON are copied."""
    if dtype == JSON:
        return json.loads(flat.tobytes())
    if dtype.startswith("list."):
        return flat.tolist()
    if not dtype.startswith("torch."):
        return _as(flat, np.dtype(dtype)).reshape(shape)
    import torch

    name = dtype.removeprefix("torch.")
    if name == "bfloat16":
        return torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(_as(flat, np.dtype(name))).reshape(shape)


def _as(flat: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind == "b":
        return flat.view(np.bool_)
    return flat if flat.dtype == dtype else flat.astype(dtype)


def narrowest(low: int, high: int) -> np.dtype[Any]:
    """The smallest integer type that holds low..high; unsigned before signed of one size."""
    for kind in _INTEGERS:
        held = np.iinfo(kind)
        if held.min <= low and high <= held.max:
            return np.dtype(kind)
    raise InputError(f"integers from {low} to {high} fit no 64-bit type")


# --------------------------------------------------------------------------------------------
# palettes
# --------------------------------------------------------------------------------------------
def to_palette(value: Value) -> tuple[NDArray[np.uint8], NDArray[Any]] | None:
    """(uint8 codes in the order of the value, table [channels, values]); None when it has no palette."""
    if value.array.dtype.kind != "f" and value.dtype != "torch.bfloat16":
        return None
    outer, channels, inner = _channels(value.shape)
    bits = value.array.view(_BITS[value.array.dtype.itemsize]).reshape(outer, channels, inner)
    codes = np.empty((outer, channels, inner), dtype=np.uint8)
    tables = []
    for channel in range(channels):
        plane = bits[:, channel]
        if len(np.unique(plane[: max(1, 4096 // max(1, inner))])) > 256:
            return None
        values, places = np.unique(plane, return_inverse=True)
        if len(values) > 256:
            return None
        tables.append(values)
        codes[:, channel] = places.reshape(plane.shape)
    width = max((len(table) for table in tables), default=0)
    whole = np.zeros((channels, width), dtype=bits.dtype)
    for channel, table in enumerate(tables):
        whole[channel, : len(table)] = table
    return codes.reshape(-1), whole.view(value.array.dtype)


def from_palette(codes: NDArray[np.uint8], table: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The flat values of a palette, in their own type."""
    outer, channels, inner = _channels(shape)
    planes = codes.reshape(outer, channels, inner)
    out = np.empty(planes.shape, dtype=table.dtype)
    for channel in range(channels):
        out[:, channel] = table.reshape(channels, -1)[channel][planes[:, channel]]
    return out.reshape(-1)


# --------------------------------------------------------------------------------------------
# tails
# --------------------------------------------------------------------------------------------
def to_tail(value: Value) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """(flat values of the first places of the last axis, [the value of all behind]); None: not worth it."""
    size = value.shape[-1] if len(value.shape) > 1 else 0
    if size < 64 or not len(value.array):
        return None
    rows = value.array.reshape(-1, size)
    bits = rows.view(_BITS[rows.dtype.itemsize])
    differs = np.flatnonzero((bits != bits[-1, -1]).any(axis=0))
    kept = int(differs[-1]) + 1 if len(differs) else 1
    if kept > size * 3 // 4:
        return None
    return np.ascontiguousarray(rows[:, :kept]).reshape(-1), value.array[-1:].copy()


def from_tail(flat: NDArray[Any], tail: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The flat values with their tail."""
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    out = np.full((rows, shape[-1]), tail[0], dtype=flat.dtype)
    out[:, : len(flat) // rows] = flat.reshape(rows, -1)
    return out.reshape(-1)


def _channels(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A shape as (outer, colour channels, inner): pixels [.., 3, h, w], or patches [n, 3 * pixels]."""
    size = int(np.prod(shape, dtype=np.int64))
    for axis in range(len(shape) - 3, -1, -1):
        if shape[axis] == 3:
            outer = int(np.prod(shape[:axis], dtype=np.int64))
            return outer, 3, size // max(1, outer * 3)
    if len(shape) == 2 and shape[1] % 3 == 0 and shape[1]:
        return shape[0], 3, shape[1] // 3
    return 1, 1, size


# --------------------------------------------------------------------------------------------
# Media of a chunk as their source bytes: the record without its media, and the media beside it
# --------------------------------------------------------------------------------------------
# `media: source` keeps a chunk as small as the files it was made from. Reading encodes the record again, with
# the bytes put back, and takes only the media tensors from it: the token ids have to be those in the chunk.
#: Columns of a chunk that holds media as their bytes: the record, the tensors it encodes to, and the bytes.
MEDIA_RECORD, MEDIA_FIELDS, MEDIA_BYTES = "media.record", "media.fields", "media.bytes"

_PLACE = "packtrain_media"


def pull_media(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """(the record as plain JSON with a number for each medium, the bytes of the media).

    Args:
        record: a chat sample, as `sources.chat.ChatSource` gives it.
    """
    media: list[bytes] = []

    def pulled(ref: Any) -> dict[str, Any]:
        first, several = len(media), isinstance(ref, list)  # the frames of a video
        media.extend(read_bytes(one) for one in (ref if several else [ref]))
        return {_PLACE: list(range(first, len(media))) if several else first}

    return with_media(record, pulled), media


def put_back(record: Mapping[str, Any], media: list[bytes]) -> dict[str, Any]:
    """The inverse of `pull_media`; media are refs by their bytes."""

    def put(held: Any) -> Any:
        places = held[_PLACE]
        return [media[place] for place in places] if isinstance(places, list) else media[places]

    return with_media(record, put)


def encode_again(
    record: Mapping[str, Any],
    media: list[bytes],
    encode: Callable[[Any], Mapping[str, Any]] | None,
    wanted: list[str],
    ids: Any,
    where: str,
) -> dict[str, Any]:
    """The media tensors of a sample whose chunk holds the media's bytes.

    Raises:
        InputError: no encode was given.
        DriftError: encoding does not give the chunk's token ids, or lacks a tensor it had.
    """
    if encode is None:
        raise InputError(
            f"{where} holds media as their bytes",
            hint="pass encode=HFTemplate(processor).encode, or write the chunk with media='tensor'",
        )
    again = encode(put_back(record, media))
    if not np.array_equal(np.asarray(again["input_ids"]), np.asarray(ids)):
        raise DriftError(
            f"{where} encodes to other token ids than the chunk holds",
            hint="read the chunk with the processor that it was written with",
        )
    lacking = [name for name in wanted if name not in again]
    if lacking:
        raise DriftError(f"{where} no longer encodes to {lacking[0]}", hint="use the same processor")
    return {name: again[name] for name in wanted}


# --------------------------------------------------------------------------------------------
# Reading a chunk: its manifest is checked, its file is mapped, and a pack is decoded when it is asked for
# --------------------------------------------------------------------------------------------
# The map is private: a tensor that lies in it may be written to, which changes neither the file nor another
# process. Nothing of a chunk is held but the map and the footer, so an open chunk costs next to no memory.
CHUNK_SCHEMA = "packtrain-chunk-1"

Failed = Callable[[Mapping[str, Any], Exception, str], Mapping[str, Any]]


def manifest_of(path: str | Path) -> Path:
    """Where the manifest of a chunk lies."""
    return Path(path).with_suffix(".json")


class ChunkReader:
    """The packs of one chunk. Picklable; a worker process maps the file anew.

    Args:
        path: the chunk's `.arrow` file.
        encode: makes media tensors of a sample again; needed where the chunk holds media as their bytes.
        failed: (sample, what encoding it raised, where) -> what stands in its place; None: it is raised.

    Raises:
        FormatError: no manifest, or a file that is not as long as the manifest says.
        ChecksumError: the manifest was edited.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        encode: Callable[[Any], Mapping[str, Any]] | None = None,
        failed: Failed | None = None,
    ) -> None:
        self.path = Path(path)
        self.encode, self.failed = encode, failed
        self.manifest = _manifest(self.path)
        self._map = _mapped(self.path, int(self.manifest["bytes"]))
        self._open()

    def _open(self) -> None:
        pa = optional("pyarrow.ipc", "pyarrow", "arrow")
        whole = pa.py_buffer(self._map)
        self._start = whole.address
        try:
            self._file = pa.ipc.open_file(whole)
            told = json.loads(self._file.schema.metadata[b"packtrain"])
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            self.check_digest()
            raise FormatError(f"{self.path} is not a chunk: {error}", hint="make it again") from None
        self._fields: dict[str, Any] = told["fields"]
        self._column = {name: place for place, name in enumerate(self._file.schema.names)}
        found, listed = self._file.num_record_batches, self.manifest["packs"]
        if found != listed:
            raise FormatError(
                f"{self.path} holds {counted(found, 'packs')}, its manifest says {listed}",
                hint="the files belong to different chunks; make it again",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ChunkReader, encode=self.encode, failed=self.failed), (self.path,)

    @property
    def fields(self) -> list[str]:
        """Names of the fields that samples of this chunk have."""
        return [name for name in self._fields if name not in (MEDIA_RECORD, MEDIA_FIELDS)]

    def __len__(self) -> int:
        return int(self.manifest["packs"])

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> list[dict[str, Any]]:
        """The encoded samples of a pack, each with its `sample_id`, as they were added."""
        batch = self._batch(number)
        samples: list[dict[str, Any]] = [
            {} if one is None else {"sample_id": one} for one in self._ids(batch)
        ]
        for name in self._fields:
            self._fill(batch, name, samples)
        if MEDIA_BYTES in self._column:
            self._decode_media(number, batch, samples)
        return samples

    def row(self, number: int) -> dict[str, Any]:
        """A pack as one row.

        Returns:
            `input_ids`, `labels`, `position_ids` and every other per-token field [T] (position ids of mRoPE
            families [3,T]); `lengths` int64[segments], `cu_seq_lens` int32[segments + 1], `sample_ids` list;
            media tensors of all samples joined along their first axis. Values of one per sample
            (`weight`, `channel`, …), and media that do not join, are lists with None where one is lacking.
        """
        samples, lengths = self[number], self.lengths(number)
        names = dict.fromkeys(name for sample in samples for name in sample if name != "sample_id")
        row = {name: joined(name, [s.get(name) for s in samples], lengths.tolist()) for name in names}
        row["lengths"] = lengths
        row["cu_seq_lens"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        row["sample_ids"] = [one for one in self.sample_ids(number) if one is not None]
        return row

    def lengths(self, number: int) -> NDArray[np.int64]:
        """Tokens of each sample of a pack, without reading them."""
        return np.diff(self._offsets(self._batch(number), "input_ids"))

    def sample_ids(self, number: int) -> list[int | str | None]:
        """Ids of the samples of a pack, without reading them; None for a filler."""
        return list(self._ids(self._batch(number)))

    def verify(self) -> None:
        """Hash the file and count what it holds.

        Raises:
            ChecksumError: the bytes are not those that were written.
        """
        self.check_digest()
        segments = tokens = 0
        for number in range(len(self)):
            lengths = self.lengths(number)
            segments, tokens = segments + len(lengths), tokens + int(lengths.sum())
        if (segments, tokens) != (self.manifest["segments"], self.manifest["tokens"]):
            raise ChecksumError(
                f"{self.path} holds {counted(segments, 'samples')} of {tokens} tokens, its manifest says "
                f"{self.manifest['segments']} of {self.manifest['tokens']}"
            )

    def check_digest(self) -> None:
        """Hash the file; ChecksumError where the bytes are not those that were written."""
        if files.sha256_file(self.path) != self.manifest["sha256"]:
            raise ChecksumError(
                f"{self.path} differs from its digest", hint="copy it again, or make it again"
            )

    # ------------------------------------------------------------------------------------ columns
    def _batch(self, number: int) -> Any:
        place = operator.index(number)
        if not 0 <= place < len(self):
            raise IndexError(f"pack {place} of {len(self)} in {self.path}")
        try:
            return self._file.get_batch(place)
        except OSError as error:
            self.check_digest()
            raise FormatError(f"pack {place} of {self.path}: {error}", hint="make it again") from None

    def _ids(self, batch: Any) -> list[Any]:
        return batch.column(0).to_pylist()  # type: ignore[no-any-return]

    def _offsets(self, batch: Any, name: str) -> NDArray[np.int64]:
        return batch.column(self._column[name]).offsets.to_numpy()  # type: ignore[no-any-return]

    def _numbers(self, batch: Any, name: str) -> NDArray[Any]:
        """The numbers of all samples of a pack as a view of the map."""
        values = batch.column(self._column[name]).values
        dtype = np.dtype(self._fields[name]["stored"])
        buffer = values.buffers()[1]
        if buffer is None or not len(values):
            return np.zeros(0, dtype)
        start = buffer.address - self._start + values.offset * dtype.itemsize
        return np.frombuffer(self._map, dtype, len(values), start)

    def _fill(self, batch: Any, name: str, samples: list[dict[str, Any]]) -> None:
        """Put a field into the samples that have it."""
        told = self._fields[name]
        numbers, offsets = self._numbers(batch, name), self._offsets(batch, name).tolist()
        if told["per_token"]:
            whole = restore(numbers, told["dtypes"][0], (-1,))
            for number, sample in enumerate(samples):
                sample[name] = whole[offsets[number] : offsets[number + 1]]
            return
        shapes = batch.column(self._column[f"{name}.shape"]).to_pylist()
        dtypes = batch.column(self._column[f"{name}.dtype"]).to_pylist()
        tables = batch.column(self._column[f"{name}.palette"]) if told["palette"] else None
        tails = batch.column(self._column[f"{name}.tail"]) if told["tail"] else None
        for number, (sample, dtype, shape) in enumerate(zip(samples, dtypes, shapes, strict=True)):
            if dtype is None:
                continue
            flat = numbers[offsets[number] : offsets[number + 1]]
            if tails is not None and tails[number].is_valid:
                flat = from_tail(flat, tails[number].values.to_numpy(), tuple(shape))
            if tables is not None:
                flat = from_palette(flat, tables[number].values.to_numpy(), tuple(shape))
            sample[name] = restore(flat, dtype, tuple(shape))

    def _decode_media(self, number: int, batch: Any, samples: list[dict[str, Any]]) -> None:
        media = batch.column(self._column[MEDIA_BYTES]).to_pylist()
        for sample, held in zip(samples, media, strict=True):
            if held is None:
                continue
            record, wanted = sample.pop(MEDIA_RECORD), sample.pop(MEDIA_FIELDS)
            place = f"pack {number} of {self.path.name}"
            where = f"sample {sample.get('sample_id')} ({place})"
            try:
                sample.update(encode_again(record, held, self.encode, wanted, sample["input_ids"], where))
            except Exception as error:  # what libraries raise on bytes
                if self.failed is None:
                    raise
                instead = self.failed(sample, error, place)
                sample.clear()
                sample.update(instead)


def _manifest(path: Path) -> dict[str, Any]:
    manifest = manifest_of(path)
    if not present(manifest) and not manifest.is_file():
        raise FormatError(
            f"{manifest} is missing", hint="its writer was stopped before the chunk was whole: run it again"
        )
    return check_seal(manifest.parent, manifest.name, CHUNK_SCHEMA)


def _mapped(path: Path, size: int) -> mmap.mmap:
    present(path)
    hint = "a torn copy, though its manifest is there: copy it again, or make it again"
    with files.reading(path, "a chunk", hint), open(path, "rb") as handle:
        found = handle.seek(0, 2)
        if found != size:
            raise ValueError(f"it has {found:,} bytes, its manifest says {size:,}")
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)


def joined(name: str, values: list[Any], lengths: Sequence[int]) -> Any:
    """One value of a row.

    Args:
        name: of the field.
        values: one per sample, None where a sample lacks it.
        lengths: tokens of each sample.

    Returns:
        Arrays or tensors joined along the tokens (a value per token, and `position_ids` [3,T]) or along their
        first axis (media); `values` as they are where they do not join.
    """
    given = [value for value in values if value is not None]
    shaped = bool(given) and all(hasattr(value, "shape") and len(value.shape) for value in given)
    if not shaped or len({type(value) for value in given}) > 1 or len({v.dtype for v in given}) > 1:
        return values
    per_token = len(given) == len(values) and all(
        value.shape[-1] == length for value, length in zip(values, lengths, strict=True)
    )
    axis = -1 if per_token and (name == "position_ids" or given[0].ndim == 1) else 0
    rest = {value.shape[:-1] if axis == -1 else value.shape[1:] for value in given}
    if len(rest) > 1:
        return values
    if isinstance(given[0], np.ndarray):
        return np.concatenate(given, axis=axis)
    import torch

    return torch.cat(given, dim=axis)
