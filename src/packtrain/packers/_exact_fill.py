"""Compiled form of `refine`; its plain twin stands in `refine.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._jit import kernel

__all__ = ["exact_fill"]


@kernel
def exact_fill(
    sizes: Any, counts: Any, capacity: Any, probes: Any, dead_ends: Any, evens: Any, budget: Any
) -> Any:  # pragma: no cover
    """Patterns (repeat, offsets, size, number) of exact fill on counts; see `refine.py` for the rule."""
    one = np.uint64(1)
    zero = np.uint64(0)
    count = np.zeros(capacity + 1, dtype=np.int64)
    words = np.zeros((capacity >> 6) + 2, dtype=np.uint64)
    for d in range(len(sizes)):
        count[sizes[d]] = counts[d]
        words[sizes[d] >> 6] |= one << np.uint64(sizes[d] & 63)
    largest = np.int64(0)
    if len(sizes) > 0:
        largest = sizes[-1]
    stack = np.empty(1024, dtype=np.int64)
    best = np.empty(1024, dtype=np.int64)
    out_repeat = np.empty(1024, dtype=np.int64)
    out_end = np.empty(1024, dtype=np.int64)
    out_size = np.empty(4096, dtype=np.int64)
    out_number = np.empty(4096, dtype=np.int64)
    n_out = 0
    n_items = 0
    work = np.int64(0)

    while True:
        while largest > 0 and count[largest] == 0:
            largest -= 1
        if largest == 0:
            break
        depth = 1
        stack[0] = largest
        count[largest] -= 1
        if count[largest] == 0:
            words[largest >> 6] &= ~(one << np.uint64(largest & 63))
        room = capacity - largest
        last = largest
        n_best = 0
        best_room = capacity + 1
        dead = 0
        even = np.int64(0)  # samples that an even fill still takes; 0 = backtracking
        tried = 0
        descend = True
        while True:
            if depth + 3 > len(stack):
                stack = np.concatenate((stack, np.empty_like(stack)))
                best = np.concatenate((best, np.empty_like(best)))
            if descend:
                if room == 0:
                    best_room = 0
                    n_best = depth
                    best[:depth] = stack[:depth]
                    break
                if count[room] > 0:
                    best_room = 0
                    n_best = depth + 1
                    best[:depth] = stack[:depth]
                    best[depth] = room
                    break
                # the most equal pair a >= b with a + b == room
                a = (room + 1) >> 1
                found = False
                probe = probes if even > 3 else 0
                w = a >> 6
                bits = words[w] & (~zero << np.uint64(a & 63))
                stop_word = room >> 6
                while probe < probes:
                    while bits == zero and w < stop_word:
                        w += 1
                        bits = words[w]
                    if bits == zero:
                        break
                    low = bits & (~bits + one)
                    bits ^= low
                    # position of the single bit
                    shift = 0
                    if low >= (one << np.uint64(32)):
                        low >>= np.uint64(32)
                        shift += 32
                    if low >= (one << np.uint64(16)):
                        low >>= np.uint64(16)
                        shift += 16
                    if low >= (one << np.uint64(8)):
                        low >>= np.uint64(8)
                        shift += 8
                    if low >= (one << np.uint64(4)):
                        low >>= np.uint64(4)
                        shift += 4
                    if low >= (one << np.uint64(2)):
                        low >>= np.uint64(2)
                        shift += 2
                    if low >= (one << np.uint64(1)):
                        shift += 1
                    a = (w << 6) + shift
                    if a >= room:
                        break
                    probe += 1
                    b = room - a
                    if (a != b and count[b] > 0) or (a == b and count[a] > 1):
                        found = True
                        break
                work += 1 if even > 3 else probe + 1
                if found:
                    best_room = 0
                    n_best = depth + 2
                    best[:depth] = stack[:depth]
                    best[depth] = a
                    best[depth + 1] = b
                    break
                bound = min(room, last)
                if even > 0:
                    bound = min(room // even, last)
            # largest available size <= bound
            x = np.int64(0)
            if bound > 0:
                w = bound >> 6
                bits = words[w] & (~zero >> np.uint64(63 - (bound & 63)))
                while bits == zero and w > 0:
                    w -= 1
                    bits = words[w]
                if bits != zero:
                    shift = 0
                    if bits >= (one << np.uint64(32)):
                        bits >>= np.uint64(32)
                        shift += 32
                    if bits >= (one << np.uint64(16)):
                        bits >>= np.uint64(16)
                        shift += 16
                    if bits >= (one << np.uint64(8)):
                        bits >>= np.uint64(8)
                        shift += 8
                    if bits >= (one << np.uint64(4)):
                        bits >>= np.uint64(4)
                        shift += 4
                    if bits >= (one << np.uint64(2)):
                        bits >>= np.uint64(2)
                        shift += 2
                    if bits >= (one << np.uint64(1)):
                        shift += 1
                    x = (w << 6) + shift
            if x > 0 and even != 1:
                stack[depth] = x
                depth += 1
                count[x] -= 1
                if count[x] == 0:
                    words[x >> 6] &= ~(one << np.uint64(x & 63))
                room -= x
                last = x
                if even > 0:
                    even -= 1
                descend = True
                continue
            if descend:  # nothing fits: a dead end
                dead += 1
                if room < best_room:
                    best_room = room
                    n_best = depth
                    best[:depth] = stack[:depth]
            if even == 0 and depth > 1 and not (descend and (dead >= dead_ends or work > budget)):
                depth -= 1
                y = stack[depth]
                if count[y] == 0:
                    words[y >> 6] |= one << np.uint64(y & 63)
                count[y] += 1
                room += y
                bound = min(room, y - 1)
                descend = False
                continue
            # backtracking is over, or an even fill failed: the next even fill
            if tried >= evens or work > budget:
                break
            while depth > 1:
                depth -= 1
                y = stack[depth]
                if count[y] == 0:
                    words[y >> 6] |= one << np.uint64(y & 63)
                count[y] += 1
            room = capacity - largest
            last = largest
            even = max(np.int64(3), (room + last - 1) // last) + tried
            if even * sizes[0] > room:
                break
            tried += 1
            descend = True
        for j in range(depth):  # put back what the search took
            y = stack[j]
            if count[y] == 0:
                words[y >> 6] |= one << np.uint64(y & 63)
            count[y] += 1
        # apply: equal sizes together, sizes descending
        items = best[:n_best].copy()
        for j in range(1, n_best):  # all but the last two descend already
            y = items[j]
            i = j
            while i > 0 and items[i - 1] < y:
                items[i] = items[i - 1]
                i -= 1
            items[i] = y
        if n_items + n_best > len(out_size):
            grow = max(len(out_size), n_best)
            out_size = np.concatenate((out_size, np.empty(grow, dtype=np.int64)))
            out_number = np.concatenate((out_number, np.empty(grow, dtype=np.int64)))
        start = n_items
        for j in range(n_best):
            if n_items > start and out_size[n_items - 1] == items[j]:
                out_number[n_items - 1] += 1
            else:
                out_size[n_items] = items[j]
                out_number[n_items] = 1
                n_items += 1
        repeat = count[out_size[start]] // out_number[start]
        for j in range(start + 1, n_items):
            repeat = min(repeat, count[out_size[j]] // out_number[j])
        for j in range(start, n_items):
            y = out_size[j]
            count[y] -= repeat * out_number[j]
            if count[y] == 0:
                words[y >> 6] &= ~(one << np.uint64(y & 63))
        if n_out + 1 > len(out_repeat):
            out_repeat = np.concatenate((out_repeat, np.empty_like(out_repeat)))
            out_end = np.concatenate((out_end, np.empty_like(out_end)))
        out_repeat[n_out] = repeat
        out_end[n_out] = n_items
        n_out += 1
    offsets = np.zeros(n_out + 1, dtype=np.int64)
    offsets[1:] = out_end[:n_out]
    return out_repeat[:n_out].copy(), offsets, out_size[:n_items].copy(), out_number[:n_items].copy()
