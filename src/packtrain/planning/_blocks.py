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
from ..packers._jit import kernel, over_blocks, threads_for
from . import _sweep


# --------------------------------------------------------------------------------------------
# Compiled loops of the threaded materialiser; `_blocks.py` puts them together
# --------------------------------------------------------------------------------------------
# Each works on a block of its own (rounds of the deal, or samples by id). What runs at the same time shares
# only arrays in which blocks own different places.
@kernel
def deal_rounds(
    repeat: Any, offsets: Any, key: Any, number: Any, cursor: Any, dealt: Any, rounds: Any, span: Any,
    slot: Any, sizes: Any
) -> Any:  # fmt: skip  # pragma: no cover
    """Deal rounds span[0]+1..span[1]: raw pack number of every place, minus the size of every raw pack.

    `cursor` and `dealt` hold what the rounds before have dealt, and are used up.
    """
    n_groups = len(repeat)
    pack = np.int64(0)
    for g in range(n_groups):
        pack += dealt[g]
    for t in range(span[0] + 1, span[1] + 1):
        for g in range(n_groups):
            if t == rounds:
                target = repeat[g]
            else:
                offset = ((g * 2654435761) & 0xFFFFFFFF) % rounds
                target = min(repeat[g], (t * repeat[g] + offset) // rounds)
            while dealt[g] < target:
                size = 0
                for j in range(offsets[g], offsets[g + 1]):
                    c = key[j]
                    p = cursor[c]
                    for q in range(p, p + number[j]):
                        slot[q] = pack
                    cursor[c] = p + number[j]
                    size += number[j]
                sizes[pack] = -size
                pack += 1
                dealt[g] += 1
    return pack


@kernel
def place_block(keys: Any, start: Any, stop: Any, top: Any, cursor: Any, slot: Any, bins: Any) -> Any:
    """bins[i - start] = raw pack of sample i; -1: left out, -2: alone. First half of `_sweep.by_class`."""
    for low in range(start, stop, 512):
        width = min(512, stop - low)
        at = low - start
        for k in range(width):
            c = keys[low + k]
            if c == 0:
                bins[at + k] = -1
            elif c > top:
                bins[at + k] = -2
            else:
                p = cursor[c]
                cursor[c] = p + 1
                bins[at + k] = p
        for k in range(width):
            if bins[at + k] >= 0:
                bins[at + k] = slot[bins[at + k]]
    return 0


@kernel
def open_block(bins: Any, count: Any, sizes: Any, offsets: Any, opened: Any) -> Any:
    """Turn the first `count` bins into places of the ids, -1 for none; returns how many packs are open now.

    Blocks come in order: packs are opened as they occur. `sizes` as in `_sweep.by_class`.
    """
    total = offsets[opened]
    for k in range(count):
        b = bins[k]
        if b >= 0:
            w = np.int64(sizes[b])
            if w < 0:
                size = -w
                w = total
                total += size
                opened += 1
                offsets[opened] = total
            sizes[b] = w + 1
            bins[k] = w
        elif b == -2:
            bins[k] = total
            total += 1
            opened += 1
            offsets[opened] = total
    return opened


@kernel
def write_block(start: Any, stop: Any, places: Any, out: Any) -> Any:
    """Write the ids start..stop-1 to their places."""
    for k in range(stop - start):
        w = places[k]
        if w >= 0:
            out[w] = start + k
    return 0


# --------------------------------------------------------------------------------------------
# Materialising on threads, in blocks; the bytes do not depend on their number
# --------------------------------------------------------------------------------------------
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
        return deal_rounds(repeat, offsets, item_key, number, cursor, dealt, rounds, span, slot, sizes)

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
        place_block(keys, low, high, top, cursor, slot, bins)

    def write(low: int, high: int, bins: NDArray[Any]) -> None:
        write_block(low, high, bins, out)

    opened = 0
    for low, high, bins in _line(threads, n, starts.dtype, place, write):
        opened = open_block(bins, high - low, sizes, offsets, opened)
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
