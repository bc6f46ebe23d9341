"""Compiled form of the fill in `_multi.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._jit import kernel

__all__ = ["fill_types"]


@kernel
def fill_types(
    rows: Any, counts: Any, caps: Any, floor: Any, planes: Any, seconds: Any, shift: Any, tries: Any
) -> Any:  # pragma: no cover
    """Patterns over types (repeat, offsets, type, number); rows in the order in which they are placed."""
    one = np.uint64(1)
    zero = np.uint64(0)
    dims = rows.shape[1]
    n_rooms = (caps[0] >> shift) + 1
    n_words = (n_rooms >> 6) + 1
    words = np.zeros((planes * seconds, n_words), dtype=np.uint64)
    head = np.full((planes * seconds, n_rooms), -1, dtype=np.int64)
    plane_cap = max(np.int64(1), caps[1])
    second = 2 if seconds > 1 else 1  # the dimension of the second planes
    second_cap = max(np.int64(1), caps[second])
    size = 1024
    left = np.empty((size, dims), dtype=np.int64)
    repeat = np.empty(size, dtype=np.int64)
    content = np.empty(size, dtype=np.int64)
    chain = np.empty(size, dtype=np.int64)
    node_kind = np.empty(size, dtype=np.int64)
    node_number = np.empty(size, dtype=np.int64)
    node_parent = np.empty(size, dtype=np.int64)
    n_groups = 0
    n_nodes = 0
    new_repeat = np.empty(3, dtype=np.int64)
    new_take = np.empty(3, dtype=np.int64)
    base_left = np.empty(dims, dtype=np.int64)
    for t in range(len(rows)):
        todo = counts[t]
        while todo > 0:
            found = np.int64(-1)
            before = np.int64(-1)
            found_plane = 0
            found_room = 0
            best = np.int64(-1)
            low_plane = rows[t, 1] * (planes - 1) // plane_cap
            low_second = rows[t, second] * (seconds - 1) // second_cap
            low_room = rows[t, 0] >> shift
            for i in range(low_plane * seconds, planes * seconds):
                if i % seconds < low_second:
                    continue
                tried = 0
                w = low_room >> 6
                bits = words[i, w] & (~zero << np.uint64(low_room & 63))
                searching = True
                while searching:
                    while bits == zero and w + 1 < n_words:
                        w += 1
                        bits = words[i, w]
                    if bits == zero:
                        break
                    low = bits & (~bits + one)
                    bits ^= low
                    place = w << 6
                    if low >= (one << np.uint64(32)):
                        low >>= np.uint64(32)
                        place += 32
                    if low >= (one << np.uint64(16)):
                        low >>= np.uint64(16)
                        place += 16
                    if low >= (one << np.uint64(8)):
                        low >>= np.uint64(8)
                        place += 8
                    if low >= (one << np.uint64(4)):
                        low >>= np.uint64(4)
                        place += 4
                    if low >= (one << np.uint64(2)):
                        low >>= np.uint64(2)
                        place += 2
                    if low >= (one << np.uint64(1)):
                        place += 1
                    previous = np.int64(-1)
                    g = head[i, place]
                    while g >= 0:
                        fits = True
                        for d in range(dims):
                            if left[g, d] < rows[t, d]:
                                fits = False
                        tried += 1
                        if fits:
                            score = 2 * ((left[g, 0] << 20) // caps[0]) + (left[g, 1] << 20) // plane_cap
                            if seconds > 1:
                                score += (left[g, 2] << 20) // second_cap
                            if best < 0 or score < best:
                                best = score
                                found = g
                                before = previous
                                found_plane = i
                                found_room = place
                            searching = False
                            break
                        if tried >= tries:
                            searching = False
                            break
                        previous = g
                        g = chain[g]
            if n_groups + 4 > len(repeat):
                left = np.concatenate((left, np.empty_like(left)))
                repeat = np.concatenate((repeat, np.empty_like(repeat)))
                content = np.concatenate((content, np.empty_like(content)))
                chain = np.concatenate((chain, np.empty_like(chain)))
            if n_nodes + 4 > len(node_kind):
                node_kind = np.concatenate((node_kind, np.empty_like(node_kind)))
                node_number = np.concatenate((node_number, np.empty_like(node_number)))
                node_parent = np.concatenate((node_parent, np.empty_like(node_parent)))
            base = np.int64(-1)
            m = np.int64(0)
            if found >= 0:
                if before < 0:
                    head[found_plane, found_room] = chain[found]
                    if chain[found] < 0:
                        words[found_plane, found_room >> 6] &= ~(one << np.uint64(found_room & 63))
                else:
                    chain[before] = chain[found]
                m = repeat[found]
                repeat[found] = 0
                base = content[found]
                base_left[:] = left[found]
            else:
                base_left[:] = caps
            k = todo
            for d in range(dims):
                if rows[t, d] > 0:
                    k = min(k, base_left[d] // rows[t, d])
            if found < 0:
                m = (todo + k - 1) // k
            new_repeat[0] = min(m, todo // k)
            new_take[0] = k
            todo -= new_repeat[0] * k
            new_repeat[1] = 0
            new_take[1] = todo
            if new_repeat[0] < m and todo > 0:
                new_repeat[1] = 1
                todo = 0
            new_repeat[2] = m - new_repeat[0] - new_repeat[1]
            new_take[2] = 0
            for j in range(3):
                if new_repeat[j] == 0:
                    continue
                repeat[n_groups] = new_repeat[j]
                content[n_groups] = base
                for d in range(dims):
                    left[n_groups, d] = base_left[d] - new_take[j] * rows[t, d]
                if new_take[j] > 0:
                    node_kind[n_nodes] = t
                    node_number[n_nodes] = new_take[j]
                    node_parent[n_nodes] = base
                    content[n_groups] = n_nodes
                    n_nodes += 1
                is_open = True
                for d in range(dims):
                    if left[n_groups, d] < floor[d]:
                        is_open = False
                if is_open:
                    i = left[n_groups, 1] * (planes - 1) // plane_cap * seconds
                    i += left[n_groups, second] * (seconds - 1) // second_cap
                    place = left[n_groups, 0] >> shift
                    chain[n_groups] = head[i, place]
                    head[i, place] = n_groups
                    words[i, place >> 6] |= one << np.uint64(place & 63)
                n_groups += 1
    n_kept = 0
    n_items = 0
    for g in range(n_groups):
        if repeat[g] > 0:
            n_kept += 1
            node = content[g]
            while node >= 0:
                n_items += 1
                node = node_parent[node]
    out_repeat = np.empty(n_kept, dtype=np.int64)
    offsets = np.zeros(n_kept + 1, dtype=np.int64)
    kind = np.empty(n_items, dtype=np.int64)
    number = np.empty(n_items, dtype=np.int64)
    kept = 0
    item = 0
    for g in range(n_groups):
        if repeat[g] > 0:
            out_repeat[kept] = repeat[g]
            node = content[g]
            while node >= 0:
                kind[item] = node_kind[node]
                number[item] = node_number[node]
                item += 1
                node = node_parent[node]
            kept += 1
            offsets[kept] = item
    return out_repeat, offsets, kind, number
