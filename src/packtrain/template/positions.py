"""Positions of one sample alone, starting at 0.

Text counts 0, 1, 2 … on every row. An image takes a grid: all its tokens share the time index, and
height and width count from the current position; the text after it goes on at the largest of them
plus one. Positions are made per sample and concatenated, never computed on a packed row: a row is
not one sample, and every image after the first would get wrong coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError

__all__ = ["mrope_positions", "text_positions"]

I64 = NDArray[np.int64]


def text_positions(length: int) -> I64:
    """int64[T]: 0 .. T-1."""
    return np.arange(length, dtype=np.int64)


def mrope_positions(is_image: NDArray[np.bool_], grids: Sequence[tuple[int, int]] | I64, merge: int) -> I64:
    """Three-row positions of a sample with images.

    Args:
        is_image: bool[T], which tokens are image tokens.
        grids: patches (height, width) of each image in order of appearance.
        merge: patches per token along each side.

    Returns:
        int64[3,T]: time, height and width rows.

    Raises:
        SampleError: `placeholder_mismatch`, when the image tokens are not those of the grids.
    """
    total = len(is_image)
    rows = np.empty((3, total), dtype=np.int64)
    cursor = 0  # token index
    position = 0
    image_tokens = np.flatnonzero(is_image)
    used = 0
    for high, wide in grids:
        high, wide = int(high) // merge, int(wide) // merge
        count = high * wide
        run = image_tokens[used : used + count]
        if len(run) < count or (count and run[-1] - run[0] != count - 1):
            raise _mismatch(len(image_tokens), grids, merge)
        start = int(run[0])
        rows[:, cursor:start] = position + np.arange(start - cursor)
        position += start - cursor
        block = rows[:, start : start + count]
        block[0] = position
        block[1] = position + np.repeat(np.arange(high), wide)
        block[2] = position + np.tile(np.arange(wide), high)
        position += max(high, wide)
        cursor = start + count
        used += count
    if used != len(image_tokens):
        raise _mismatch(len(image_tokens), grids, merge)
    rows[:, cursor:] = position + np.arange(total - cursor)
    return rows


def _mismatch(found: int, grids: Sequence[tuple[int, int]] | I64, merge: int) -> SampleError:
    wanted = sum(int(h) * int(w) for h, w in grids) // merge**2
    return SampleError(
        "placeholder_mismatch",
        f"the sample has {found} image tokens, its {len(grids)} images take {wanted}",
        hint="each image needs its own run of image tokens",
    )
