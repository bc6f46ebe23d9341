"""Pack: the encoded samples of one row, in order; the row itself is made when it is asked for.

A `list` of encoded samples, which is what `PaddingFreeCollator` takes. String keys read the collated row:
`pack["input_ids"]`, `"labels" in pack`, `pack.keys()`. A pack is decoded once, where it is read, and collated
once, when a key is first read.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

import numpy as np
import torch

from ..collate import IGNORE, TOKEN_FIELDS, filler_pack, is_filler
from ..collate.pack_batch import FILLER
from ..store._chunk_reader import joined

Sample = dict[str, Any]


class Pack(list[Sample]):
    """The samples of a pack. Picklable.

    Args:
        samples: encoded samples in row order, each a mapping with `input_ids`.
        slot: its place in the global order of consumption; -1: unknown.
        pack_id: its number in the plan, export or chunk directory; -1: a filler; None: it has none.
        chunk, chunk_row: the chunk it was read from, and its number in there; -1: from none.
    """

    def __init__(
        self,
        samples: Iterable[Sample] = (),
        *,
        slot: int = -1,
        pack_id: int | None = None,
        chunk: int = -1,
        chunk_row: int = -1,
    ) -> None:
        super().__init__(samples)
        self.slot, self.pack_id = slot, pack_id
        self.chunk, self.chunk_row = chunk, chunk_row
        self._row: dict[str, Any] | None = None

    @classmethod
    def filler(cls, slot: int = -1, pad_token_id: int = 0) -> Pack:
        """The pack that trains nothing: one untrained token, no sample, to keep a rank in step."""
        return cls(filler_pack(pad_token_id), slot=slot, pack_id=FILLER)

    @property
    def is_filler(self) -> bool:
        """One untrained token without a sample?"""
        return is_filler(self)

    @property
    def ids(self) -> list[Any]:
        """`sample_id` of every sample that has one; a filler has none."""
        return [sample["sample_id"] for sample in self if sample.get("sample_id") is not None]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample, in row order."""
        return [length_of(sample) for sample in self]

    @property
    def row(self) -> dict[str, Any]:
        """The pack as one row, made at first use and kept.

        `input_ids`, `labels`, `position_ids` and every other per-token field [T] (position ids of mRoPE
        families [3,T]); `lengths` int64[segments], `cu_seq_lens` int32[segments + 1], `sample_ids` list;
        media of all samples joined along their first axis. Values of one per sample, and media that do not
        join, are lists with None where one is lacking.
        """
        if self._row is None:
            self._row = _row(self)
        return self._row

    def members(self) -> list[Sample]:
        """The encoded samples, each with its `sample_id`."""
        return list(self)

    def __getitem__(self, key: Any) -> Any:
        """A sample by its number, or a field of the row by its name."""
        return self.row[key] if isinstance(key, str) else super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return key in self.row if isinstance(key, str) else super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """A field of the row, or `default`."""
        return self.row.get(key, default)

    def keys(self) -> KeysView[str]:
        """Fields of the row."""
        return self.row.keys()

    def values(self) -> ValuesView[Any]:
        """Values of the row."""
        return self.row.values()

    def items(self) -> ItemsView[str, Any]:
        """Fields and values of the row."""
        return self.row.items()

    def __getstate__(self) -> dict[str, Any]:
        """The row is made anew where the pack arrives."""
        return {**self.__dict__, "_row": None}


def length_of(sample: Mapping[str, Any]) -> int:
    """Tokens of an encoded sample."""
    return int(np.shape(sample["input_ids"])[-1])


def _row(pack: Pack) -> dict[str, Any]:
    lengths = pack.lengths
    names = dict.fromkeys(name for sample in pack for name in sample if name not in ("sample_id", "filler"))
    row = {}
    for name in dict.fromkeys(("input_ids", "labels", "position_ids", *names)):
        values = [_tensor(name, sample, length) for sample, length in zip(pack, lengths, strict=True)]
        row[name] = joined(name, values, lengths)
    row["lengths"] = torch.tensor(lengths, dtype=torch.int64)
    row["cu_seq_lens"] = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    row["sample_ids"] = pack.ids
    if pack.is_filler:
        row["filler"] = True
    return row


def _tensor(name: str, sample: Mapping[str, Any], length: int) -> Any:
    value = sample.get(name)
    if value is None and name == "labels":
        return torch.full((length,), IGNORE)
    if value is None and name == "position_ids":
        return torch.arange(length)
    if isinstance(value, list | tuple) and (name in TOKEN_FIELDS or name == "position_ids"):
        return torch.as_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    return value
