"""Compiled kernels of the histogram packers. Their plain twins stand beside the packers.

Groups: g is `repeat[g]` open packs of one content with `room[g]` tokens left; the content is a
persistent list of nodes (size, number, parent). `head[r]` chains the groups with room r, newest first;
a two-level bitset over rooms answers "smallest room >= l" in O(1) words.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._jit import BIT, DE_BRUIJN, SIX_BITS, kernel


@kernel
def bfd_groups(  # noqa: C901 - a kernel is compiled as one function
    sizes: Any, counts: Any, capacity: Any
) -> Any:  # pragma: no cover - compiled
    """Best fit decreasing on counts; see `packers/bfd.py` for the rule.

    Returns (repeat, content, node_size, node_number, node_parent) with unused groups at repeat 0.
    """
    one = np.uint64(1)
    n_words = (capacity >> 6) + 1
    words = np.zeros(n_words, dtype=np.uint64)
    top = np.zeros((n_words >> 6) + 1, dtype=np.uint64)
    head = np.full(capacity + 1, -1, dtype=np.int64)

    repeat = np.empty(1024, dtype=np.int64)
    content = np.empty(1024, dtype=np.int64)
    chain = np.empty(1024, dtype=np.int64)
    n_groups = 0
    node_size = np.empty(1024, dtype=np.int64)
    node_number = np.empty(1024, dtype=np.int64)
    node_parent = np.empty(1024, dtype=np.int64)
    n_nodes = 0
    new_repeat = np.empty(3, dtype=np.int64)
    new_take = np.empty(3, dtype=np.int64)

    for d in range(len(sizes) - 1, -1, -1):
        size = sizes[d]
        left = counts[d]
        while left > 0:
            # smallest room >= size
            room = -1
            w = size >> 6
            bits = words[w] >> np.uint64(size & 63)
            if bits != 0:
                low = bits & (~bits + one)
                room = size + BIT[(low * DE_BRUIJN) >> SIX_BITS]
            else:
                t = (w + 1) >> 6
                if t < len(top):
                    tops = (top[t] >> np.uint64((w + 1) & 63)) << np.uint64((w + 1) & 63)
                    while tops == 0 and t + 1 < len(top):
                        t += 1
                        tops = top[t]
                    if tops != 0:
                        low = tops & (~tops + one)
                        w = (t << 6) + BIT[(low * DE_BRUIJN) >> SIX_BITS]
                        bits = words[w]
                        low = bits & (~bits + one)
                        room = (w << 6) + BIT[(low * DE_BRUIJN) >> SIX_BITS]

            if n_groups + 4 > len(repeat):
                repeat = np.concatenate((repeat, np.empty_like(repeat)))
                content = np.concatenate((content, np.empty_like(content)))
                chain = np.concatenate((chain, np.empty_like(chain)))
            if n_nodes + 4 > len(node_size):
                node_size = np.concatenate((node_size, np.empty_like(node_size)))
                node_number = np.concatenate((node_number, np.empty_like(node_number)))
                node_parent = np.concatenate((node_parent, np.empty_like(node_parent)))

            # New packs, or the group of that room: up to 3 groups of (repeat, items of this size) come of it.
            if room < 0:
                base = -1
                room = capacity
                m = (left + capacity // size - 1) // (capacity // size)
            else:
                g = head[room]
                head[room] = chain[g]
                base = content[g]
                m = repeat[g]
                repeat[g] = 0
                if head[room] < 0:
                    words[room >> 6] &= ~(one << np.uint64(room & 63))
                    if words[room >> 6] == 0:
                        top[room >> 12] &= ~(one << np.uint64((room >> 6) & 63))
            new_repeat[0] = min(m, left // (room // size))
            new_take[0] = room // size
            left -= new_repeat[0] * new_take[0]
            new_repeat[1] = 0
            new_take[1] = left
            if new_repeat[0] < m and left > 0:
                new_repeat[1] = 1
                left = 0
            new_repeat[2] = m - new_repeat[0] - new_repeat[1]
            new_take[2] = 0
            for j in range(3):
                if new_repeat[j] == 0:
                    continue
                rest = room - new_take[j] * size
                repeat[n_groups] = new_repeat[j]
                content[n_groups] = base
                if new_take[j] > 0:
                    node_size[n_nodes] = size
                    node_number[n_nodes] = new_take[j]
                    node_parent[n_nodes] = base
                    content[n_groups] = n_nodes
                    n_nodes += 1
                if rest > 0:
                    chain[n_groups] = head[rest]
                    head[rest] = n_groups
                    words[rest >> 6] |= one << np.uint64(rest & 63)
                    top[rest >> 12] |= one << np.uint64((rest >> 6) & 63)
                n_groups += 1
    return repeat[:n_groups], content[:n_groups], node_size, node_number, node_parent


@kernel
def emit_patterns(
    repeat: Any, content: Any, node_size: Any, node_number: Any, node_parent: Any
) -> Any:  # pragma: no cover
    """Flatten the groups with repeat > 0, in index order, to (repeat, offsets, size, number)."""
    n_kept = 0
    n_items = 0
    for g in range(len(repeat)):
        if repeat[g] > 0:
            n_kept += 1
            node = content[g]
            while node >= 0:
                n_items += 1
                node = node_parent[node]
    out_repeat = np.empty(n_kept, dtype=np.int64)
    offsets = np.zeros(n_kept + 1, dtype=np.int64)
    size = np.empty(n_items, dtype=np.int64)
    number = np.empty(n_items, dtype=np.int64)
    kept = 0
    item = 0
    for g in range(len(repeat)):
        if repeat[g] > 0:
            out_repeat[kept] = repeat[g]
            node = content[g]
            while node >= 0:
                size[item] = node_size[node]
                number[item] = node_number[node]
                item += 1
                node = node_parent[node]
            kept += 1
            offsets[kept] = item
    return out_repeat, offsets, size, number


@kernel
def tally(place: Any, number: Any, repeat: Any, offsets: Any, size: Any) -> Any:  # pragma: no cover
    """Samples that patterns hold, by place 0..size-1 (int64[size])."""
    out = np.zeros(size, dtype=np.int64)
    for g in range(len(repeat)):
        for j in range(offsets[g], offsets[g + 1]):
            out[place[j]] += number[j] * repeat[g]
    return out


@kernel
def next_fit(need: Any, caps: Any) -> Any:  # pragma: no cover - compiled
    """Bin of each sample (row of `need`, one column a capacity) under next fit in id order."""
    n, dims = need.shape
    out = np.empty(n, dtype=np.int64)
    room = np.zeros(dims, dtype=np.int64)
    current = np.int64(-1)
    for i in range(n):
        fits: Any = current >= 0
        for d in range(dims):
            if need[i, d] > room[d]:
                fits = False
        if not fits:
            current += 1
            room[:] = caps
        for d in range(dims):
            room[d] -= need[i, d]
        out[i] = current
    return out


@kernel
def histogram(costs: Any, top: Any) -> Any:  # pragma: no cover - compiled
    """Counts of costs 0..top (int64[top+1]), the number of costs above top, and their sum.

    Four partial histograms, so that runs of one cost don't wait for each other.
    """
    part = np.zeros((4, top + 1), dtype=np.int64)
    singles = np.int64(0)
    slots = np.int64(0)
    n = len(costs)
    for i in range(n):
        c = costs[i]
        if c <= top:
            part[i & 3, c] += 1
        else:
            singles += 1
            slots += c
    return part[0] + part[1] + part[2] + part[3], singles, slots
