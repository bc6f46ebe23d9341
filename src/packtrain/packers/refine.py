"""refine: exact fill on counts. Looks for packs without a gap; mostly reaches the lower bound.

While samples are left: the largest size opens a pack with room R. (1) a size equal to R fills it; (2) else
the most equal pair a >= b with a + b = R does (at most PROBES candidates for a, from ceil(R/2) up);
(3) else the largest size that fits (not larger than the one before) is put in. Where nothing fits, the last
size put in is taken out and the next smaller tried, up to DEAD_ENDS times; the fullest pack seen wins. It is
repeated as often as the counts allow, so there are about as many patterns as sizes, whatever n is.
The most equal pair keeps small sizes for later. Costs more than `bfd` and can lose to it on uniform
lengths: `auto` keeps the better of the two.

Work is limited in iterations, by a budget that depends on the number of samples; beyond it a pack is
closed at its first dead end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np
from numpy.typing import NDArray

from ..extend import PackProblem, Patterns
from ._jit import DENSE_LIMIT, use_jit

__all__ = ["HISTOGRAM", "VERSION", "pack"]

VERSION = 1
HISTOGRAM = True

PROBES = 512
DEAD_ENDS = 200


def budget(samples: int) -> int:
    """Steps of search after which no more alternatives are tried."""
    return 2_000_000 + 400 * samples


def pack(problem: PackProblem) -> Patterns:
    """Patterns of exact fill."""
    samples = int(problem.counts.sum())
    if use_jit(samples) and problem.capacity <= DENSE_LIMIT:
        from ._exact_fill import exact_fill

        repeat, offsets, size, number = exact_fill(
            problem.sizes, problem.counts, problem.capacity, PROBES, DEAD_ENDS, budget(samples)
        )
        return Patterns(repeat=repeat, offsets=offsets, size=size, number=number)
    return plain(problem.sizes, problem.counts, problem.capacity, budget(samples))


def plain(sizes: NDArray[np.int64], counts: NDArray[np.int64], capacity: int, limit: int) -> Patterns:
    """The plain path: counts in a dictionary, sizes that are left in a sorted list."""
    search = _Search(sizes, counts, capacity, limit)
    repeats: list[int] = []
    offsets = [0]
    size: list[int] = []
    number: list[int] = []
    while search.left:
        content: dict[int, int] = {}
        for item in sorted(search.fullest_pack(), reverse=True):
            content[item] = content.get(item, 0) + 1
        repeat = min(search.count[item] // k for item, k in content.items())
        for item, k in content.items():
            search.take(item, repeat * k)
        repeats.append(repeat)
        size.extend(content)
        number.extend(content.values())
        offsets.append(len(size))
    as_array = [np.array(values, dtype=np.int64) for values in (repeats, offsets, size, number)]
    return Patterns(repeat=as_array[0], offsets=as_array[1], size=as_array[2], number=as_array[3])


class _Search:
    """Counts that are left, and the search for one pack."""

    def __init__(
        self, sizes: NDArray[np.int64], counts: NDArray[np.int64], capacity: int, limit: int
    ) -> None:
        self.count: dict[int, int] = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
        self.left: list[int] = sizes.tolist()  # sizes with count > 0, ascending
        self.capacity = capacity
        self.limit = limit
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
        stop = min(bisect_left(left, room), start + PROBES)
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

    def fullest_pack(self) -> list[int]:
        """Sizes of the fullest pack found that holds the largest size; counts are as before."""
        stack = [self.left[-1]]
        self.take(stack[0])
        room = self.capacity - stack[0]
        best, best_room, dead = stack[:], self.capacity + 1, 0
        bound = 0
        descend = True
        while True:
            if descend:
                fill = self._fill(room)
                if fill is not None:
                    best = [*stack, *fill]
                    break
                bound = min(room, stack[-1])
            item = self.below(bound)
            if item:
                stack.append(item)
                self.take(item)
                room -= item
                descend = True
                continue
            if descend:
                dead += 1
                if room < best_room:
                    best, best_room = stack[:], room
                if dead >= DEAD_ENDS or self.work > self.limit:
                    break
            if len(stack) == 1:
                break
            item = stack.pop()
            self.put_back(item)
            room += item
            bound = min(room, item - 1)
            descend = False
        for item in stack:
            self.put_back(item)
        return best

    def _fill(self, room: int) -> tuple[int, ...] | None:
        """What fills `room` exactly with at most two samples."""
        if room == 0:
            return ()
        if self.count.get(room, 0) > 0:
            return (room,)
        return self.pair(room)
