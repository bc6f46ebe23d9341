"""Compiled materialisers; see `_materialise.py` for the rules and the plain forms.

The sweep works in blocks with three short loops (place, bin, write) so that cache misses overlap.
Cursors and slots are int32 below 2**31 samples: 8192 classes stay inside the first-level cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..packers._jit import kernel


@kernel
def shuffle_classes(slot: Any, starts: Any, seed: Any) -> Any:  # pragma: no cover - compiled
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
def by_class(
    keys: Any, top: Any, cursor: Any, slot: Any, sizes: Any, n_single: Any, out: Any
) -> Any:  # pragma: no cover
    """Canonical (offsets, indices): one pass over the samples, each takes the next place of its class.

    `sizes` becomes the write pointers: -size while a pack is not open, then where its next id goes.
    """
    n = len(keys)
    offsets = np.empty(len(sizes) + n_single + 1, dtype=np.int64)
    offsets[0] = 0
    opened = np.int64(0)
    total = np.int64(0)
    bins = np.empty(512, dtype=cursor.dtype)
    for start in range(0, n, 512):
        width = min(512, n - start)
        for k in range(width):
            c = keys[start + k]
            if c == 0:
                bins[k] = -1
            elif c > top:
                bins[k] = -2
            else:
                p = cursor[c]
                cursor[c] = p + 1
                bins[k] = p
        for k in range(width):
            if bins[k] >= 0:
                bins[k] = slot[bins[k]]
        for k in range(width):
            b = bins[k]
            if b >= 0:
                w = np.int64(sizes[b])
                if w < 0:
                    size = -w
                    w = total
                    total += size
                    opened += 1
                    offsets[opened] = total
                out[w] = start + k
                sizes[b] = w + 1
            elif b == -2:
                out[total] = start + k
                total += 1
                opened += 1
                offsets[opened] = total
    return offsets, out


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
def sum_packs(values: Any, offsets: Any, indices: Any) -> Any:  # pragma: no cover - compiled
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
def copy_packs(
    offsets: Any, indices: Any, packs: Any, ids: Any, out: Any
) -> Any:  # pragma: no cover - compiled
    """Write `ids[i]` for the ids i of the named packs one after the other; returns how many."""
    at = np.int64(0)
    for k in range(len(packs)):
        p = packs[k]
        for q in range(offsets[p], offsets[p + 1]):
            out[at] = ids[indices[q]]
            at += 1
    return at


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
