"""Positions of one sample alone, starting at 0.

Text counts 0, 1, 2 … on every row. An image takes a grid: all its tokens share the time index, and
height and width count from the current position; the text after it goes on at the largest of them
plus one. The time index of a video grows by the step of its block. Positions are made per sample and
concatenated, never computed on a packed row: a row is not one sample, and every image after the first
would get wrong coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError, counted
from ..measuring.expansion import Block
from .layout import Layout

I64 = NDArray[np.int64]


def text_positions(length: int) -> I64:
    """int64[T]: 0 .. T-1."""
    return np.arange(length, dtype=np.int64)


def layout_positions(layout: Layout, *, behind_time: bool = False) -> I64:
    """Three-row positions of a sample with media.

    Args:
        layout: its tokens, and the block of each run of media tokens.
        behind_time: text after a video starts behind its last time index (Omni), not behind its height
            and width alone (Qwen-VL, as transformers 5.24 counts).

    Returns:
        int64[3,T]: time, height and width rows, T = `layout.total`.
    """
    begins = np.cumsum(layout.width) - layout.width
    total = layout.total
    rows = np.empty((3, total), dtype=np.int64)
    cursor = position = 0  # token index, next position of text
    bases: list[int] = []
    hold = False  # two closing marks share a position

    def text(end: int) -> None:
        nonlocal cursor, position, hold
        count = end - cursor
        if count > 0:
            values = position + np.arange(count)
            if hold:
                values[1:] -= 1
            rows[:, cursor:end] = values
            position, cursor, hold = int(values[-1]) + 1, end, False

    for run, block in zip(layout.runs.tolist(), layout.blocks, strict=True):
        if block is None:
            bases.append(position)
            continue
        begin, width = int(begins[run]), int(layout.width[run])
        text(begin)
        if block.opens:
            position -= 1
            rows[:, begin - 1] = position - 1
        base = bases[-block.anchor] if block.anchor else position
        bases.append(base)
        place = rows[:, begin : begin + width]
        place[:] = base + _inside(block, width)
        cursor = begin + width
        if behind_time:
            position = int(place.max()) + 1
        else:
            position = base + max(block.height, block.width)
        hold = block.closes
    text(total)
    return rows


def _inside(block: Block, width: int) -> I64:
    """int64[3,width]: positions of a run's tokens in its block."""
    place = np.arange(block.start, block.start + width, dtype=np.int64)
    if block.sound:
        return np.broadcast_to(place, (3, width))
    area = block.height * block.width
    # the library multiplies in float32 and cuts off
    time = (np.arange(block.time).astype(np.float32) * np.float32(block.step)).astype(np.int64)
    inside = place % area
    return np.stack([time[place // area], inside // block.width, inside % block.width])


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
    edges = np.diff(is_image.astype(np.int8), prepend=0, append=0)
    starts, lengths = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
    blocks = [Block(1, int(high) // merge, int(wide) // merge) for high, wide in grids]
    runs: list[int] = []
    widths = [block.height * block.width for block in blocks]
    left = iter(zip(starts.tolist(), lengths.tolist(), strict=True))
    begin = length = 0
    for width in widths:  # neighbouring images form one run
        if length == 0:
            begin, length = next(left, (0, 0))
        if width > length:
            raise _mismatch(int(is_image.sum()), grids, merge)
        runs.append(begin)
        begin, length = begin + width, length - width
    if length or next(left, None) is not None:
        raise _mismatch(int(is_image.sum()), grids, merge)
    kept = ~is_image
    kept[runs] = True
    each = np.ones(len(is_image), dtype=np.int64)
    each[runs] = widths
    entries = np.flatnonzero(kept)
    places = np.searchsorted(entries, np.asarray(runs, dtype=np.int64))
    nothing = np.zeros(len(entries), dtype=bool)
    return layout_positions(Layout(entries, each[entries], nothing, nothing, places, tuple(blocks)))


def _mismatch(found: int, grids: Sequence[tuple[int, int]] | I64, merge: int) -> SampleError:
    wanted = sum(int(h) * int(w) for h, w in grids) // merge**2
    return SampleError(
        "placeholder_mismatch",
        f"the sample has {found} image tokens, its {counted(len(grids), 'images')} take {wanted}",
        hint="each image needs its own run of image tokens",
    )
