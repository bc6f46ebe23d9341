"""refine: exact fill on counts. Looks for packs without a gap; mostly reaches the lower bound.

While samples are left: the largest size opens a pack with room R. (1) a size equal to R fills it; (2) else
the most equal pair a >= b with a + b = R does (at most PROBES candidates for a, from ceil(R/2) up);
(3) else the largest size that fits (not larger than the one before) is put in. Where nothing fits, the last
size put in is taken out and the next smaller tried, up to DEAD_ENDS times; the fullest pack seen wins. It is
repeated as often as the counts allow, so there are about as many patterns as sizes, whatever n is.
The most equal pair keeps small sizes for later.

Up to four passes, until one meets the lower bound; the fewest packs win. Besides the plain pass: "even
fills", where backtracking found no full pack (m samples as equal as can be, for the EVENS least m: it mends
the end, when only small sizes are left); and "stages", where an eighth of every size is held back and only
full packs are kept, so that what is left stays mixed. Costs more than `bfd` and can lose to it on uniform
lengths: `auto` keeps the better of the two. Where first fit decreasing needs fewer packs than all passes, its
packs are taken, and the plan's notes say so: never worse than `ffd`.

Work is limited in iterations, by a budget that depends on the number of samples; beyond it a pack is
closed at its first dead end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..extend import I64, PackProblem, Patterns
from . import ffd
from ._bounds import best_bound
from ._first_fit import first_fit
from ._jit import BIT, DE_BRUIJN, DENSE_LIMIT, SIX_BITS, kernel, over_blocks, part_of, threads_for, use_jit
from ._multi import joined, patterns_of


# --------------------------------------------------------------------------------------------
# Compiled form of `refine`; its plain twin stands in `refine.py`
# --------------------------------------------------------------------------------------------
@kernel
def _exact_fill(  # noqa: C901 - a kernel is compiled as one function
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
                    a = (w << 6) + BIT[(low * DE_BRUIJN) >> SIX_BITS]
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
                    bits |= bits >> np.uint64(1)
                    bits |= bits >> np.uint64(2)
                    bits |= bits >> np.uint64(4)
                    bits |= bits >> np.uint64(8)
                    bits |= bits >> np.uint64(16)
                    bits |= bits >> np.uint64(32)
                    bits ^= bits >> one  # its highest bit alone
                    x = (w << 6) + BIT[(bits * DE_BRUIJN) >> SIX_BITS]
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


# --------------------------------------------------------------------------------------------
# refine: exact fill on counts
# --------------------------------------------------------------------------------------------
VERSION = 2
HISTOGRAM = True

_PROBES = 512
_DEAD_ENDS = 200
_EVENS = 8
_STAGES = (3, 12)  # up to _FEW samples, and above
_FEW = 50_000
_MANY_SIZES = 16_384
_A_CLASS = 16  # samples' worth of work that a size is, when it is asked whether to compile


def budget(samples: int) -> int:
    """Steps of search after which no more alternatives are tried."""
    return 2_000_000 + 400 * samples


def pack(problem: PackProblem) -> Patterns:
    """Patterns of exact fill; those of `ffd` where they are fewer."""
    best = search(problem)
    packs = int(best.repeat.sum())
    if packs <= best_bound(problem.sizes, problem.counts, problem.capacity, packs, cheap=True)[0]:
        return best
    sizes, counts = problem.sizes[::-1].copy(), problem.counts[::-1].copy()
    bins = first_fit(sizes, counts, problem.capacity)
    return best if int(bins.max()) + 1 >= packs else _of_bins(bins, np.repeat(sizes, counts))


def _of_bins(bins: I64, costs: I64) -> Patterns:
    """Packs one by one, as patterns. `bins`, `costs` int64[n], of every sample."""
    order = np.lexsort((costs, bins))
    bins, costs = bins[order], costs[order]
    first = np.flatnonzero(np.append(True, (np.diff(bins) != 0) | (np.diff(costs) != 0)))
    packs = int(bins[-1]) + 1
    return Patterns(
        repeat=np.ones(packs, dtype=np.int64),
        offsets=np.searchsorted(bins[first], np.arange(packs + 1)).astype(np.int64),
        size=costs[first],
        number=np.diff(np.append(first, len(bins))),
        notes={"chosen": f"ffd/{ffd.VERSION}"},
    )


def search(problem: PackProblem) -> Patterns:
    """The best of the passes."""
    samples = int(problem.counts.sum())
    work = max(samples, _A_CLASS * len(problem.sizes))
    stages = _STAGES[samples > _FEW]
    passes = ((0, 1), (_EVENS, 1), (0, stages), (_EVENS, stages))

    def run(k: int) -> Patterns:
        with part_of(work):  # stages are small, but many
            return _staged(problem, *passes[k])

    best = run(0)
    packs = int(best.repeat.sum())
    bound = best_bound(problem.sizes, problem.counts, problem.capacity, packs, cheap=True)[0]
    if packs <= bound:
        return best
    # Many sizes take seconds: then the other passes run side by side.
    ahead = threads_for(work) > 1 and len(problem.sizes) > _MANY_SIZES
    made = over_blocks(range(1, 5), lambda k, _: run(k)) if ahead else []
    for k in range(1, 4):
        other = made[k - 1] if ahead else run(k)
        count = int(other.repeat.sum())
        if count < packs:
            best, packs = other, count
        if packs <= bound:
            break
    return best


def _staged(problem: PackProblem, evens: int, stages: int) -> Patterns:
    """Exact fill in stages: all but the last take 7/8 of what is left and keep full packs only."""
    sizes, left = problem.sizes, problem.counts.copy()
    parts: list[Patterns] = []
    for stage in range(stages):
        part = left if stage == stages - 1 else left - (left + 7) // 8
        some = np.flatnonzero(part)
        if len(some) == 0:
            continue
        made = _fill(sizes[some], part[some], problem.capacity, evens)
        if stage < stages - 1:
            held = np.add.reduceat(made.size * made.number, made.offsets[:-1])
            made = _groups(made, held == problem.capacity)
            used = made.number * np.repeat(made.repeat, np.diff(made.offsets))
            np.subtract.at(left, np.searchsorted(sizes, made.size), used)
        parts.append(made)
    return parts[0] if len(parts) == 1 else joined(parts)


def _groups(made: Patterns, keep: NDArray[np.bool_]) -> Patterns:
    """The groups that are kept, in their order."""
    width = np.diff(made.offsets)
    items = np.repeat(keep, width)
    return Patterns(
        repeat=made.repeat[keep],
        offsets=np.concatenate([[0], np.cumsum(width[keep])]).astype(np.int64),
        size=made.size[items],
        number=made.number[items],
    )


def _fill(sizes: I64, counts: I64, capacity: int, evens: int) -> Patterns:
    """One pass over some counts, compiled or plain."""
    samples = int(counts.sum())
    if use_jit(samples) and capacity <= DENSE_LIMIT:
        repeat, offsets, size, number = _exact_fill(
            sizes, counts, capacity, _PROBES, _DEAD_ENDS, evens, budget(samples)
        )
        return Patterns(repeat=repeat, offsets=offsets, size=size, number=number)
    return plain(sizes, counts, capacity, evens, budget(samples))


def plain(sizes: I64, counts: I64, capacity: int, evens: int, limit: int) -> Patterns:
    """The plain path: counts in a dictionary, sizes that are left in a sorted list."""
    search = _Search(sizes, counts, capacity, evens, limit)
    groups: list[tuple[int, Any]] = []
    while search.left:
        content = Counter(sorted(search.fullest_pack(), reverse=True))
        repeat = min(search.count[item] // k for item, k in content.items())
        for item, k in content.items():
            search.take(item, repeat * k)
        groups.append((repeat, content.items()))
    return patterns_of(groups)


class _Search:
    """Counts that are left, and the search for one pack."""

    def __init__(self, sizes: I64, counts: I64, capacity: int, evens: int, limit: int) -> None:
        self.count: dict[int, int] = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
        self.left: list[int] = sizes.tolist()  # sizes with count > 0, ascending
        self.smallest = self.left[0] if self.left else 0
        self.capacity, self.evens, self.limit = capacity, evens, limit
        self.work = 0

    def take(self, item: int, k: int = 1) -> None:
        self.count[item] -= k
        if self.count[item] == 0:
            del self.left[bisect_left(self.left, item)]

    def put_back(self, item: int) -> None:
        if self.count[item] == 0:
            insort(self.left, item)
        self.count[item] += 1

    def pair(self, room: int) -> tuple[int, int] | None:
        """The most equal available pair that fills `room`."""
        count, left = self.count, self.left
        start = bisect_left(left, (room + 1) >> 1)
        stop = min(bisect_left(left, room), start + _PROBES)
        for place in range(start, stop):
            a = left[place]
            b = room - a
            if count.get(b, 0) > (1 if a == b else 0):
                self.work += place - start + 2
                return a, b
        self.work += stop - start + 1
        return None

    def below(self, bound: int) -> int:
        """The largest size that is left and <= bound, or 0."""
        place = bisect_right(self.left, bound)
        return self.left[place - 1] if place else 0

    def fullest_pack(self) -> list[int]:  # noqa: C901 - the loop of the kernel
        """Sizes of the fullest pack found that holds the largest size; counts are as before."""
        stack = [self.left[-1]]
        self.take(stack[0])
        room = self.capacity - stack[0]
        best, best_room, dead = stack[:], self.capacity + 1, 0
        bound = 0
        even = tried = 0  # even: samples that an even fill still takes; 0 = backtracking
        descend = True
        while True:
            if descend:
                fill = self._fill(room, even <= 3)
                if fill is not None:
                    best = [*stack, *fill]
                    break
                bound = min(room // even if even else room, stack[-1])
            item = self.below(bound) if even != 1 else 0
            if item:
                stack.append(item)
                self.take(item)
                room -= item
                even -= even > 0
                descend = True
                continue
            if descend:
                dead += 1
                if room < best_room:
                    best, best_room = stack[:], room
            spent = descend and (dead >= _DEAD_ENDS or self.work > self.limit)
            if even == 0 and len(stack) > 1 and not spent:
                item = stack.pop()
                self.put_back(item)
                room += item
                bound = min(room, item - 1)
                descend = False
                continue
            if tried >= self.evens or self.work > self.limit:
                break
            while len(stack) > 1:
                self.put_back(stack.pop())
            room = self.capacity - stack[0]
            even = max(3, -(-room // stack[0])) + tried
            if even * self.smallest > room:
                break
            tried += 1
            descend = True
        for item in stack:
            self.put_back(item)
        return best

    def _fill(self, room: int, pairs: bool) -> tuple[int, ...] | None:
        """What fills `room` exactly with one sample, or with a pair."""
        if room == 0:
            return ()
        if self.count.get(room, 0) > 0:
            return (room,)
        if not pairs:
            self.work += 1
            return None
        return self.pair(room)
