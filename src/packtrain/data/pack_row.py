"""PackRow: one pack as one row, ready for a trainer, that still knows its samples.

A mapping with `input_ids`, `labels` and `position_ids` ([T], position ids of mRoPE families [3,T]), `lengths`
int64[segments], `cu_seq_lens` int32[segments + 1], `sample_ids` (a list) and all further fields of its
samples. Boundaries are in it as numbers. `members()` gives the encoded samples, which is what
`PaddingFreeCollator` takes: it accepts a PackRow wherever it takes a pack.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..collate import IGNORE, filler_pack
from ..store.chunks import ChunkReader

__all__ = ["PackRow"]


class PackRow(dict[str, Any]):
    """A pack. Picklable.

    Attributes:
        slot: its place in the global order of consumption.
        chunk, row: where it was read; -1 for a filler.
        is_filler: one untrained token without a sample, to keep a rank in step.
    """

    slot: int = -1
    chunk: int = -1
    row: int = -1
    _reader: ChunkReader | None = None

    @classmethod
    def of(cls, reader: ChunkReader, row: int, slot: int, chunk: int) -> PackRow:
        """Pack `row` of a chunk."""
        pack = cls({name: _as_tensor(value) for name, value in reader.row(row).items()})
        pack.slot, pack.chunk, pack.row, pack._reader = slot, chunk, row, reader
        return pack

    @classmethod
    def filler(cls, slot: int, pad_token_id: int = 0) -> PackRow:
        """The row that trains nothing."""
        pack = cls(
            input_ids=torch.tensor([pad_token_id]),
            labels=torch.tensor([IGNORE]),
            position_ids=torch.tensor([0]),
            lengths=torch.tensor([1]),
            cu_seq_lens=torch.tensor([0, 1], dtype=torch.int32),
            sample_ids=[],
            filler=True,
        )
        pack.slot = slot
        return pack

    @property
    def is_filler(self) -> bool:
        return self._reader is None

    def members(self) -> list[dict[str, Any]]:
        """The encoded samples of the pack, each with its `sample_id`."""
        if self._reader is None:
            return filler_pack(int(self["input_ids"][0]))
        return self._reader[self.row]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, (dict(self), dict(self.__dict__)))


def _rebuilt(values: dict[str, Any], attributes: dict[str, Any]) -> PackRow:
    pack = PackRow(values)
    pack.__dict__.update(attributes)
    return pack


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value
