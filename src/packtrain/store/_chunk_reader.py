"""Reading a chunk: its manifest is checked, its file is mapped, and a pack is decoded when it is asked for.

The map is private: a tensor that lies in it may be written to, which changes neither the file nor another
process. Nothing of a chunk is held but the map and the footer, so an open chunk costs next to no memory.
"""

from __future__ import annotations

import json
import mmap
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..errors import ChecksumError, FormatError, counted, optional
from ..remote.copies import present
from . import _chunk_fields as fields
from ._folders import check_seal
from .rows import joined

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
            found, listed = self._file.num_record_batches, self.manifest["packs"]
            if found != listed:
                raise ValueError(f"it holds {counted(found, 'packs')}, its manifest says {listed}")
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            self.check_digest()
            raise FormatError(f"{self.path} is not a chunk: {error}", hint="make it again") from None
        self._fields: dict[str, Any] = told["fields"]
        self._column = {name: place for place, name in enumerate(self._file.schema.names)}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self.path, self.encode, self.failed))

    @property
    def fields(self) -> list[str]:
        """Names of the fields that samples of this chunk have."""
        return [name for name in self._fields if name not in (fields.MEDIA_RECORD, fields.MEDIA_FIELDS)]

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
        if fields.MEDIA_BYTES in self._column:
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
        out: NDArray[np.int64] = np.diff(self._offsets(self._batch(number), "input_ids"))
        return out

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
        ids: list[Any] = batch.column(0).to_pylist()
        return ids

    def _offsets(self, batch: Any, name: str) -> NDArray[np.int64]:
        offsets: NDArray[np.int64] = batch.column(self._column[name]).offsets.to_numpy()
        return offsets

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
            whole = fields.restore(numbers, told["dtypes"][0], (-1,))
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
                flat = fields.from_tail(flat, tails[number].values.to_numpy(), tuple(shape))
            if tables is not None:
                flat = fields.from_palette(flat, tables[number].values.to_numpy(), tuple(shape))
            sample[name] = fields.restore(flat, dtype, tuple(shape))

    def _decode_media(self, number: int, batch: Any, samples: list[dict[str, Any]]) -> None:
        media = batch.column(self._column[fields.MEDIA_BYTES]).to_pylist()
        for sample, held in zip(samples, media, strict=True):
            if held is None:
                continue
            record, wanted = sample.pop(fields.MEDIA_RECORD), sample.pop(fields.MEDIA_FIELDS)
            place = f"pack {number} of {self.path.name}"
            where = f"sample {sample.get('sample_id')} ({place})"
            try:
                sample.update(
                    fields.encode_again(record, held, self.encode, wanted, sample["input_ids"], where)
                )
            except Exception as error:  # what libraries raise on bytes
                if self.failed is None:
                    raise
                instead = self.failed(sample, error, place)
                sample.clear()
                sample.update(instead)


def _reopened(path: Path, encode: Callable[[Any], Mapping[str, Any]] | None, failed: Any) -> ChunkReader:
    return ChunkReader(path, encode=encode, failed=failed)


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
