"""Materialising on threads, in blocks; the bytes do not depend on their number.

- Counting: blocks of samples. Shuffling: blocks of classes. Sums: blocks of packs. Nothing is shared.
- Dealing: blocks of rounds. What the rounds before a block have dealt is a formula.
- The sweep over the samples is a line of three: blocks of samples find their packs, then packs are opened in
  order, then ids are written. Each stage works on another block at the same time, so more than three or four
  threads find nothing to do.

One thread uses the single pass of `_sweep.by_class`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..extend import Patterns
from ..packers import _kernels
from ..packers._jit import over_blocks, threads_for
from . import _block_kernels as kernels
from . import _sweep

__all__ = ["count_costs", "cuts", "deal", "shuffle_classes", "sum_packs", "sweep"]

I64 = NDArray[np.int64]
Block = tuple[int, int, NDArray[Any]]  # samples low..high-1 and what is known of them
Work = Callable[[int, int, NDArray[Any]], None]

#: Samples of a block of the sweep: its bins stay in the cache of a core, and a hand-over costs little.
_BLOCK = 1 << 18
_BLOCKS = 16  # at least, where there are fewer samples

#: From so many samples on one thread does the stages one after the other: waiting for memory then overlaps.
_STAGED = 1 << 25


def cuts(weights: I64, parts: int) -> list[int]:
    """Ends of `parts` runs of about equal weight: entry k is where run k begins, the last where all end."""
    ends = np.cumsum(weights)
    total = int(ends[-1]) if len(ends) else 0
    wanted = [total * k // parts for k in range(1, parts)]
    return [0, *np.searchsorted(ends, wanted, side="left").tolist(), len(weights)]


def even_cuts(n: int, parts: int) -> list[int]:
    """Ends of `parts` runs of about equal length."""
    return [n * k // parts for k in range(parts + 1)]


def count_costs(costs: NDArray[Any], top: int) -> tuple[I64, int, int]:
    """`_kernels.histogram` over blocks of samples."""
    ends = even_cuts(len(costs), threads_for(len(costs)))
    made = over_blocks(ends, lambda low, high: _kernels.histogram(costs[low:high], top))
    counts = made[0][0]
    for part in made[1:]:
        counts += part[0]
    return counts, sum(int(part[1]) for part in made), sum(int(part[2]) for part in made)


def deal(
    patterns: Patterns, item_key: I64, starts: NDArray[Any], n_packed: int, rounds: int, n: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Raw pack number of every place (in class order) and minus the size of every raw pack.

    Args:
        starts: int[top + 2], first place of every class, in the type of the result.
        n: samples in all; decides on threads.
    """
    repeat, offsets, number = patterns.repeat, patterns.offsets, patterns.number
    slot = np.empty(n_packed, dtype=starts.dtype)
    sizes = np.empty(int(repeat.sum()), dtype=starts.dtype)
    shift = ((np.arange(len(repeat), dtype=np.int64) * 2654435761) & 0xFFFFFFFF) % rounds

    def block(low: int, high: int) -> Any:
        dealt = np.minimum(repeat, (low * repeat + shift) // rounds)
        cursor = starts.copy()
        if low:
            cursor[:-1] += _kernels.tally(item_key, number, dealt, offsets, len(starts) - 1)
        span = np.array([low, high], dtype=np.int64)
        return kernels.deal_rounds(
            repeat, offsets, item_key, number, cursor, dealt, rounds, span, slot, sizes
        )

    over_blocks(even_cuts(rounds, min(rounds, threads_for(n))), block)
    return slot, sizes


def shuffle_classes(slot: NDArray[Any], starts: I64, seed: Any) -> None:
    """`_sweep.shuffle_classes` over blocks of classes: the draw of a place depends on seed and place."""
    ends = cuts(np.diff(starts), threads_for(len(slot)))
    over_blocks(ends, lambda low, high: _sweep.shuffle_classes(slot, starts[low : high + 1], seed))


def sum_packs(values: NDArray[Any], offsets: I64, indices: NDArray[Any]) -> tuple[I64, I64]:
    """`_sweep.sum_packs` over blocks of packs."""
    ends = even_cuts(len(offsets) - 1, threads_for(len(indices)))
    made = over_blocks(ends, lambda low, high: _sweep.sum_packs(values, offsets[low : high + 1], indices))
    if len(made) == 1:
        return made[0][0], made[0][1]
    return np.concatenate([part[0] for part in made]), np.concatenate([part[1] for part in made])


def sweep(
    keys: NDArray[Any],
    top: int,
    starts: NDArray[Any],
    slot: NDArray[Any],
    sizes: NDArray[Any],
    n_single: int,
    dtype: Any,
) -> tuple[I64, NDArray[Any]]:
    """Canonical (offsets, indices).

    Args:
        starts: int[top + 2], first place of every class.
        slot: raw pack number of every place.
        sizes: int[P], minus the size of every raw pack; used up.
        dtype: type of the ids.
    """
    n = len(keys)
    out = np.empty(len(slot) + n_single, dtype)
    threads = threads_for(n)
    if threads == 1 and n < _STAGED:
        offsets, ids = _sweep.by_class(keys, top, starts.copy(), slot, sizes, n_single, out)
        return offsets, ids
    offsets = np.zeros(len(sizes) + n_single + 1, dtype=np.int64)
    cursor = starts.copy()

    def place(low: int, high: int, bins: NDArray[Any]) -> None:
        kernels.place_block(keys, low, high, top, cursor, slot, bins)

    def write(low: int, high: int, bins: NDArray[Any]) -> None:
        kernels.write_block(low, high, bins, out)

    opened = 0
    for low, high, bins in _line(threads, n, starts.dtype, place, write):
        opened = kernels.open_block(bins, high - low, sizes, offsets, opened)
    return offsets, out


def _line(threads: int, n: int, dtype: Any, place: Work, write: Work) -> Iterator[Block]:
    """Blocks of samples whose packs `place` has found; what the caller has made of one goes to `write`.

    `place` runs block by block, one ahead of the caller; `write` runs in any order on any thread. A caller
    that would wait writes instead.
    """
    width = max(1, min(_BLOCK, n // _BLOCKS))
    free = [np.empty(width, dtype=dtype) for _ in range(threads + 2)]
    if threads == 1:
        for low in range(0, n, width):
            block = (low, min(n, low + width), free[0])
            place(*block)
            yield block
            write(*block)
        return
    writing: list[tuple[Future[None], Block]] = []

    def finish(which: int) -> None:
        future, block = writing.pop(which)
        if future.cancel():
            write(*block)
        else:
            future.result()
        free.append(block[2])

    def begin(low: int) -> tuple[Future[None], Block]:
        if not free:
            finish(0)
        block = (low, min(n, low + width), free.pop())
        return pool.submit(place, *block), block

    with ThreadPoolExecutor(threads - 1) as pool:
        future, block = begin(0)
        while True:
            while writing and not future.done():
                finish(-1)
            future.result()
            found = block
            if found[1] < n:
                future, block = begin(found[1])
            yield found
            writing.append((pool.submit(write, *found), found))
            if found[1] == n:
                break
        while writing:
            finish(-1)
