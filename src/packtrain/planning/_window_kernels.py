"""A small window planned in two passes of compiled code; what `window.py` does in many steps, with its bytes.

For windows of a stream, where a few hundred samples cost less than the steps between the kernels of a large
plan: tokens are the only limit, every sample fits a pack, no seed. The packs are those of `bfd` where they
meet the volume bound and are dealt in one round; else `finished_packs` says so, and nothing is lost but time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..packers._jit import kernel


@kernel
def classes_of(tokens: Any) -> Any:  # pragma: no cover - compiled
    """The sizes that occur, ascending, and how many samples have each (int64)."""
    ordered = tokens.copy()
    ordered.sort()
    n = len(ordered)
    sizes = np.empty(n, dtype=np.int64)
    counts = np.zeros(n, dtype=np.int64)
    found = 0
    for i in range(n):
        if i == 0 or ordered[i] != ordered[i - 1]:
            sizes[found] = ordered[i]
            found += 1
        counts[found - 1] += 1
    return sizes[:found].copy(), counts[:found].copy()


@kernel
def finished_packs(  # noqa: C901 - a kernel is compiled as one function
    repeat: Any, content: Any, node_size: Any, node_number: Any, node_parent: Any, tokens: Any, age: Any,
    sizes: Any, counts: Any, capacity: Any, least_fill: Any, max_age: Any, share: Any
) -> Any:  # fmt: skip  # pragma: no cover - compiled
    """(offsets, samples of the packs that are final, samples that are carried, ascending), int64.

    Args:
        repeat, content, node_size, node_number, node_parent: of `bfd_groups`.
        tokens, age: of the samples, in the order of their ids.
        sizes, counts: their classes.
        capacity: tokens of a pack.
        least_fill: parts per 2**20 of a pack from which on it is final.
        max_age: a pack with a sample of this age is final.
        share: one pack in so many is carried at most; 0 = none.

    Returns:
        Offsets are empty where the packs are not those of the plan: more than the volume bound, equal packs
        enough to be dealt in rounds, or patterns that break a law, which the steps of a plan will name.
    """
    n = len(tokens)
    none = np.empty(0, dtype=np.int64)
    groups = np.int64(0)
    packs = np.int64(0)
    for g in range(len(repeat)):
        if repeat[g] > 0:
            groups += 1
            packs += repeat[g]
    total = np.int64(0)
    for d in range(len(sizes)):
        total += sizes[d] * counts[d]
    if packs != (total + capacity - 1) // capacity or packs >= 4 * groups:
        return none, none, none

    # Every pack has its places in the classes, and every sample, in the order of ids, the next of its class.
    cursor = np.zeros(len(sizes) + 1, dtype=np.int64)
    for d in range(len(sizes)):
        cursor[d + 1] = cursor[d] + counts[d]
    begin = cursor.copy()
    slot = np.empty(n, dtype=np.int64)
    members = np.zeros(packs, dtype=np.int64)
    held = np.zeros(packs, dtype=np.int64)
    pack = np.int64(0)
    for g in range(len(repeat)):
        for _ in range(repeat[g]):
            node = content[g]
            while node >= 0:
                d = np.searchsorted(sizes, node_size[node])
                if d == len(sizes) or sizes[d] != node_size[node] or node_number[node] < 1:
                    return none, none, none
                first = cursor[d]
                if first + node_number[node] > begin[d + 1]:
                    return none, none, none
                for q in range(first, first + node_number[node]):
                    slot[q] = pack
                cursor[d] = first + node_number[node]
                members[pack] += node_number[node]
                held[pack] += node_number[node] * node_size[node]
                node = node_parent[node]
            if held[pack] > capacity or members[pack] == 0:
                return none, none, none
            pack += 1
    for d in range(len(sizes)):
        if cursor[d] != begin[d + 1]:
            return none, none, none

    # Packs are numbered as their first samples come.
    at = np.full(packs, -1, dtype=np.int64)  # where the next sample of a pack goes
    number = np.empty(packs, dtype=np.int64)
    offsets = np.zeros(packs + 1, dtype=np.int64)
    oldest = np.zeros(packs, dtype=np.int64)
    samples = np.empty(n, dtype=np.int64)
    opened = np.int64(0)
    for i in range(n):
        d = np.searchsorted(sizes, tokens[i])
        b = slot[begin[d]]
        begin[d] += 1
        if at[b] < 0:
            at[b] = offsets[opened]
            number[b] = opened
            opened += 1
            offsets[opened] = at[b] + members[b]
        samples[at[b]] = i
        at[b] += 1
        oldest[number[b]] = max(oldest[number[b]], age[i])

    # The emptiest are carried, by (fill, number).
    keys = np.empty(packs, dtype=np.int64)
    able = np.int64(0)
    for b in range(packs):
        fill = (held[b] << 20) // capacity
        if fill < least_fill and oldest[number[b]] < max_age:
            keys[able] = fill * packs + number[b]
            able += 1
    most = np.int64(0)
    if share > 0:
        most = min(able, (packs + share - 1) // share)
    keys = keys[:able].copy()  # no two are equal
    keys.sort()
    carried = np.zeros(packs, dtype=np.bool_)
    kept = n
    for k in range(most):
        p = keys[k] % packs
        carried[p] = True
        kept -= offsets[p + 1] - offsets[p]
    ends = np.zeros(packs - most + 1, dtype=np.int64)
    final = np.empty(kept, dtype=np.int64)
    back = np.empty(n - kept, dtype=np.int64)
    n_final = np.int64(0)
    n_back = np.int64(0)
    n_packs = np.int64(0)
    for p in range(packs):
        for q in range(offsets[p], offsets[p + 1]):
            if carried[p]:
                back[n_back] = samples[q]
                n_back += 1
            else:
                final[n_final] = samples[q]
                n_final += 1
        if not carried[p]:
            n_packs += 1
            ends[n_packs] = n_final
    back.sort()
    return ends, final, back
