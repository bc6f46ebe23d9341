"""Kernels that put the samples of a step into its packs. The plain twin is the same function, uncompiled.

Samples of a step come heaviest first. `alone` samples (longer than a pack) take an empty pack and close it.
`need` holds, sample by sample, what a sample takes of each capped quantity.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from ..packers._jit import kernel

__all__ = ["best_fit", "fill_empty", "spread"]


@kernel
def spread(
    weight: Any, need: Any, alone: Any, starts: Any, packs: Any, groups: Any, caps: Any, out: Any, fits: Any
) -> Any:
    """Give every sample to the lightest group of packs, there to the lightest pack, that has room for it.

    Args:
        weight: int64[n], need: int64[n * D], alone: bool[n], in step order.
        starts: int64[S + 1], packs: int64[S], groups: int64[S] (dividing packs), caps: int64[D].
        out: int64[n], filled with the pack in the step.
        fits: bool[S], filled: whether every sample of the step found room.
    """
    dims = len(caps)
    for s in range(len(packs)):
        if not fits[s]:
            continue
        k, g = packs[s], groups[s]
        per = k // g
        load = np.zeros(k, dtype=np.int64)
        used = np.zeros(k * dims, dtype=np.int64)
        heap = [(np.int64(0), np.int64(j)) for j in range(g)]  # equal loads: already a heap
        for i in range(starts[s], starts[s + 1]):
            aside = [heap[0] for _ in range(0)]
            place = -1
            while len(heap) > 0:
                total, j = heapq.heappop(heap)
                for p in range(j * per, (j + 1) * per):
                    if place >= 0 and load[p] >= load[place]:
                        continue
                    room = True
                    if alone[i]:
                        room = load[p] == 0
                    else:
                        for d in range(dims):
                            if used[p * dims + d] + need[i * dims + d] > caps[d]:
                                room = False
                    if room:
                        place = p
                if place >= 0:
                    heapq.heappush(heap, (total + weight[i], j))
                    break
                aside.append((total, j))
            for entry in aside:
                heapq.heappush(heap, entry)
            if place < 0:
                fits[s] = False
                break
            out[i] = place
            load[place] += weight[i]
            for d in range(dims):
                used[place * dims + d] += need[i * dims + d]
                if alone[i]:
                    used[place * dims + d] = caps[d] + 1
    return 0


@kernel
def best_fit(need: Any, alone: Any, starts: Any, steps: Any, caps: Any, out: Any, opened: Any) -> Any:
    """Best fit in the given order for the steps whose numbers are in `steps`; opened[s] = packs it took."""
    dims = len(caps)
    for s in steps:
        n = starts[s + 1] - starts[s]
        used = np.zeros(n * dims, dtype=np.int64)
        count = 0
        for i in range(starts[s], starts[s + 1]):
            place = -1
            if not alone[i]:
                for p in range(count):
                    if place >= 0 and used[p * dims] <= used[place * dims]:
                        continue
                    room = True
                    for d in range(dims):
                        if used[p * dims + d] + need[i * dims + d] > caps[d]:
                            room = False
                    if room:
                        place = p
            if place < 0:
                place = count
                count += 1
            out[i] = place
            for d in range(dims):
                used[place * dims + d] += need[i * dims + d]
                if alone[i]:
                    used[place * dims + d] = caps[d] + 1
        opened[s] = count
    return 0


@kernel
def fill_empty(weight: Any, starts: Any, packs: Any, out: Any) -> Any:
    """No pack stays empty: an empty one takes every second sample of the heaviest pack that can spare one."""
    for s in range(len(packs)):
        k = packs[s]
        count = np.zeros(k, dtype=np.int64)
        load = np.zeros(k, dtype=np.int64)
        for i in range(starts[s], starts[s + 1]):
            count[out[i]] += 1
            load[out[i]] += weight[i]
        for empty in range(k):
            if count[empty] > 0:
                continue
            full = -1
            for p in range(k):
                if count[p] > 1 and (full < 0 or load[p] > load[full]):
                    full = p
            here, there = np.int64(0), np.int64(0)
            for i in range(starts[s], starts[s + 1]):
                if out[i] != full:
                    continue
                if there < here:
                    out[i] = empty
                    there += weight[i]
                    count[empty] += 1
                    count[full] -= 1
                else:
                    here += weight[i]
            load[full], load[empty] = here, there
    return 0
