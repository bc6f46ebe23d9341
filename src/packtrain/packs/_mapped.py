"""A memory-mapped array sent to another process as its file's name instead of its bytes.

Loader workers get the dataset pickled; numpy pickles a memory map as a copy. At ten million samples that
is 40 MB for each worker, for an array that all of them could map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["MappedFile", "as_array", "as_file"]


@dataclass(frozen=True)
class MappedFile:
    """Where a mapped array lies."""

    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


def as_file(array: Any) -> Any:
    """The file of an array that maps all of one, read-only; anything else as it is."""
    if not isinstance(array, np.memmap) or array.filename is None or array.flags.writeable:
        return array
    base = array.base
    whole = not isinstance(base, np.memmap) or (base.shape == array.shape and base.dtype == array.dtype)
    if not whole or not array.flags.c_contiguous:
        return array
    return MappedFile(str(array.filename), int(array.offset), array.dtype.str, tuple(array.shape))


def as_array(value: Any) -> Any:
    """The array of `as_file`, mapped again."""
    if not isinstance(value, MappedFile):
        return value
    return np.memmap(value.name, np.dtype(value.dtype), "r", value.offset, value.shape)
