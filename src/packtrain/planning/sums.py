"""Sums over packs: tokens, squared tokens, further costs. Compiled for many samples, numpy for few."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..packers._jit import use_jit
from .lengths import Lengths

__all__ = ["pack_sums", "sum_over_packs"]

I64 = NDArray[np.int64]


def pack_sums(lengths: Lengths, offsets: I64, indices: NDArray[Any]) -> tuple[I64, I64, dict[str, I64]]:
    """(tokens, squared tokens, further costs by name) of each pack, int64[P]."""
    tokens, squares = sum_over_packs(lengths.tokens, offsets, indices)
    costs = {name: sum_over_packs(array, offsets, indices)[0] for name, array in lengths.costs.items()}
    return tokens, squares, costs


def sum_over_packs(values: NDArray[Any], offsets: I64, indices: NDArray[Any]) -> tuple[I64, I64]:
    """Sum and sum of squares of `values` over each pack; no pack is empty."""
    if len(offsets) == 1:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if use_jit(len(values)):
        from ._blocks import sum_packs

        return sum_packs(values, offsets, indices)
    gathered = values[indices].astype(np.int64)
    return np.add.reduceat(gathered, offsets[:-1]), np.add.reduceat(gathered * gathered, offsets[:-1])
