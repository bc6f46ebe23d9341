"""Compiled materialisers: one pass, or on threads in blocks; the bytes do not depend on their number.

- Counting: blocks of samples. Shuffling: blocks of classes. Sums: blocks of packs. Nothing is shared.
- Dealing: blocks of rounds. What the rounds before a block have dealt is a formula.
- The sweep over the samples is a line of three: blocks of samples find their packs, then packs are opened in
  order, then ids are written. Each stage works on another block at the same time, so more than three or four
  threads find nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..extend import I64, Patterns
from ..packers import _kernels
from ..packers._jit import kernel, over_blocks, threads_for


# --------------------------------------------------------------------------------------------
# Compiled materialisers; see `_materialise.py` for the rules and the plain forms
# --------------------------------------------------------------------------------------------
# The sweep works in blocks with short loops (place, bin, write) so that cache misses overlap.
# Cursors and slots are int32 below 2**31 samples: 8192 classes stay inside the first-level cache.
@kernel
def shuffle_block(slot: Any, starts: Any, seed: Any) -> Any:  # pragma: no cover - compiled
    """Fisher-Yates inside each class, in place."""
    for key in range(len(starts) - 1):
        low = starts[key]
        for i in range(starts[key + 1] - 1, low, -1):
            x = (seed ^ np.uint64(i)) + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
            j = low + np.int64(x % np.uint64(i - low + 1))
            held = slot[i]
            slot[i] = slot[j]
            slot[j] = held
    return 0


@kernel
def by_bin(bin_of: Any, n_bins: Any, out: Any) -> Any:  # pragma: no cover - compiled
    """Canonical (offsets, indices) of a bin for each sample (-1 = left out)."""
    n = len(bin_of)
    sizes = np.zeros(n_bins, dtype=np.int64)
    for i in range(n):
        if bin_of[i] >= 0:
            sizes[bin_of[i]] += 1
    used = 0
    for b in range(n_bins):
        if sizes[b] > 0:
            used += 1
    offsets = np.zeros(used + 1, dtype=np.int64)
    written = np.full(n_bins, -1, dtype=np.int64)
    opened = 0
    total = np.int64(0)
    for i in range(n):
        b = bin_of[i]
        if b < 0:
            continue
        w = written[b]
        if w < 0:
            w = total
            total += sizes[b]
            opened += 1
            offsets[opened] = total
        out[w] = i
        written[b] = w + 1
    return offsets, out[:total].copy()


@kernel
def _sum_block(values: Any, offsets: Any, indices: Any) -> Any:  # pragma: no cover - compiled
    """Sums and sums of squares of `values` over each pack."""
    n_packs = len(offsets) - 1
    total = np.empty(n_packs, dtype=np.int64)
    squares = np.empty(n_packs, dtype=np.int64)
    for p in range(n_packs):
        a = np.int64(0)
        b = np.int64(0)
        for q in range(offsets[p], offsets[p + 1]):
            v = np.int64(values[indices[q]])
            a += v
            b += v * v
        total[p] = a
        squares[p] = b
    return total, squares


@kernel
def move_packs(offsets: Any, indices: Any, packs: Any, out: Any) -> Any:  # pragma: no cover - compiled
    """Write the ids of the named packs one after the other; returns how many."""
    at = np.int64(0)
    for k in range(len(packs)):
        p = packs[k]
        for q in range(offsets[p], offsets[p + 1]):
            out[at] = indices[q]
            at += 1
    return at


# --------------------------------------------------------------------------------------------
# Compiled loops over one block, for the threads
# --------------------------------------------------------------------------------------------
# Each works on a block of its own (rounds of the deal, or samples by id). What runs at the same time shares
# only arrays in which blocks own different places.
@kernel
def _deal_rounds(
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
def _place_block(keys: Any, start: Any, stop: Any, top: Any, cursor: Any, slot: Any, bins: Any) -> Any:
    """bins[i - start] = raw pack of sample i; -1: left out, -2: alone."""
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
def _open_block(bins: Any, count: Any, sizes: Any, offsets: Any, opened: Any) -> Any:
    """Turn the first `count` bins into places of the ids, -1 for none; returns how many packs are open now.

    Blocks come in order: packs are opened as they occur. `sizes` becomes the write pointers: -size while a
    pack is not open, then where its next id goes.
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
def _write_block(start: Any, stop: Any, places: Any, out: Any) -> Any:
    """Write the ids start..stop-1 to their places."""
    for k in range(stop - start):
        w = places[k]
        if w >= 0:
            out[w] = start + k
    return 0


# --------------------------------------------------------------------------------------------
# On threads, in blocks
# --------------------------------------------------------------------------------------------
Block = tuple[int, int, NDArray[Any]]  # samples low..high-1 and what is known of them
Work = Callable[[int, int, NDArray[Any]], None]

#: Samples of a block of the sweep: its bins stay in the cache of a core, and a hand-over costs little.
_BLOCK = 1 << 18
_BLOCKS = 16  # at least, where there are fewer samples


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
    patterns: Patterns, item_key: I64, starts: NDArray[Any], rounds: int, n: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Raw pack number of every place (in class order) and minus the size of every raw pack.

    Args:
        starts: int[top + 2], first place of every class, in the type of the result.
        n: samples in all; decides on threads.
    """
    repeat, offsets, number = patterns.repeat, patterns.offsets, patterns.number
    slot = np.empty(int(starts[-1]), dtype=starts.dtype)
    sizes = np.empty(int(repeat.sum()), dtype=starts.dtype)
    shift = ((np.arange(len(repeat), dtype=np.int64) * 2654435761) & 0xFFFFFFFF) % rounds

    def block(low: int, high: int) -> Any:
        dealt = np.minimum(repeat, (low * repeat + shift) // rounds)
        cursor = starts.copy()
        if low:
            cursor[:-1] += _kernels.tally(item_key, number, dealt, offsets, len(starts) - 1)
        span = np.array([low, high], dtype=np.int64)
        return _deal_rounds(repeat, offsets, item_key, number, cursor, dealt, rounds, span, slot, sizes)

    over_blocks(even_cuts(rounds, min(rounds, threads_for(n))), block)
    return slot, sizes


def shuffle_classes(slot: NDArray[Any], starts: I64, seed: Any) -> None:
    """`shuffle_block` over blocks of classes: the draw of a place depends on seed and place."""
    ends = cuts(np.diff(starts), threads_for(len(slot)))
    over_blocks(ends, lambda low, high: shuffle_block(slot, starts[low : high + 1], seed))


def sum_packs(values: NDArray[Any], offsets: I64, indices: NDArray[Any]) -> tuple[I64, I64]:
    """`_sum_block` over blocks of packs."""
    ends = even_cuts(len(offsets) - 1, threads_for(len(indices)))
    made = over_blocks(ends, lambda low, high: _sum_block(values, offsets[low : high + 1], indices))
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
    offsets = np.zeros(len(sizes) + n_single + 1, dtype=np.int64)
    cursor = starts.copy()

    def place(low: int, high: int, bins: NDArray[Any]) -> None:
        _place_block(keys, low, high, top, cursor, slot, bins)

    def write(low: int, high: int, bins: NDArray[Any]) -> None:
        _write_block(low, high, bins, out)

    opened = 0
    work = (n, starts.dtype, place, write)
    for low, high, bins in _line(threads, *work) if threads > 1 else _in_turn(*work):
        opened = _open_block(bins, high - low, sizes, offsets, opened)
    return offsets, out


def _width(n: int) -> int:
    """Samples of a block."""
    return max(1, min(_BLOCK, n // _BLOCKS))


def _in_turn(n: int, dtype: Any, place: Work, write: Work) -> Iterator[Block]:
    """What `_line` does, on one thread."""
    width = _width(n)
    bins = np.empty(width, dtype=dtype)
    for low in range(0, n, width):
        block = (low, min(n, low + width), bins)
        place(*block)
        yield block
        write(*block)


def _line(threads: int, n: int, dtype: Any, place: Work, write: Work) -> Iterator[Block]:
    """Blocks of samples whose packs `place` has found; what the caller has made of one goes to `write`.

    `place` runs block by block, one ahead of the caller; `write` runs in any order on any thread. A caller
    that would wait writes instead.
    """
    width = _width(n)
    free = [np.empty(width, dtype=dtype) for _ in range(threads + 2)]
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
        for after in range(width, n + width, width):
            while writing and not future.done():
                finish(-1)
            future.result()
            found = block
            if after < n:
                future, block = begin(after)
            yield found
            writing.append((pool.submit(write, *found), found))
        while writing:
            finish(-1)
