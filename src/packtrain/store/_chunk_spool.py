"""What a chunk will hold, kept until its types are known: an Arrow file has one schema for all its packs.

Small values wait in memory, more than SPOOL bytes in a nameless file beside the chunk, so memory stays flat
and a stopped writer leaves nothing behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..errors import InputError
from ._chunk_fields import JSON, Value, narrowest, read_value, to_palette, to_tail

__all__ = ["SPOOL", "Facts", "Held", "Spool", "is_media"]

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

    def see(self, value: Value, name: str, length: int) -> None:
        if value.dtype not in self.dtypes:
            self.dtypes.append(value.dtype)
        self.ranks.add(len(value.shape))
        self.is_token &= value.shape == (length,)
        kind = value.array.dtype
        whole = kind.kind in "iu" and value.dtype not in (JSON, "torch.bfloat16")
        self.kinds.add("integer" if whole else f"{kind}/{'json' if value.dtype == JSON else ''}")
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
        return narrowest(self.low, self.high) if kind == "integer" else np.dtype(kind.partition("/")[0])


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
            value = read_value(raw, name)
            facts = self.facts.setdefault(name, Facts(palette=self._palettes))
            facts.see(value, name, length)
            media = is_media(name, value.shape, length)
            facts.palette &= media
            coded = to_palette(value) if facts.palette else None
            facts.palette = coded is not None
            cut = to_tail(value) if media and coded is None else None
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
