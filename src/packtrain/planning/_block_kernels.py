"""Compiled loops of the threaded materialiser; `_blocks.py` puts them together.

Each works on a block of its own (rounds of the deal, or samples by id). What runs at the same time shares
only arrays in which blocks own different places.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..packers._jit import kernel

__all__ = ["deal_rounds", "open_block", "place_block", "write_block"]


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
