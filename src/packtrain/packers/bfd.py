"""bfd: best fit decreasing on the histogram. Its cost does not depend on the number of samples.

From the largest size down: all samples of the size go to the fullest open packs that still take one;
identical packs are handled as one group. With m packs of room r and k = r // size, a whole group takes k
samples a pack when there are enough, else it is split into packs that take k, one that takes the rest and
those that take none. Equal sizes keep filling the same pack, so the number of packs equals that of
best fit decreasing sample by sample, in O(D log capacity) steps for D distinct sizes.
Fullest packs win; it never looks ahead: `refine` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from ..extend import I64, PackProblem, Patterns
from ._jit import DENSE_LIMIT, use_jit
from ._kernels import bfd_groups, emit_patterns
from ._multi import flatten, pack_limits

VERSION = 2

#: Reads `sizes` and `counts` only, so the planner need not gather `costs`.
HISTOGRAM = True
LIMITS = True


def pack(problem: PackProblem) -> Patterns | I64:
    """Patterns of best fit decreasing; under further limits a bin for each sample (`_multi.py`)."""
    limited = problem.limits or problem.max_samples is not None
    return pack_limits(problem) if limited else pack_tokens(problem)


def pack_tokens(problem: PackProblem) -> Patterns:
    """Patterns when tokens are the only limit."""
    samples = int(problem.counts.sum())
    if use_jit(samples) and problem.capacity <= DENSE_LIMIT:
        return compiled(problem.sizes, problem.counts, problem.capacity)
    return plain(problem.sizes, problem.counts, problem.capacity)


def compiled(sizes: I64, counts: I64, capacity: int) -> Patterns:
    """The numba path."""
    repeat, offsets, size, number = emit_patterns(*bfd_groups(sizes, counts, capacity))
    return Patterns(repeat=repeat, offsets=offsets, size=size, number=number)


def plain(  # noqa: C901 - the loop of the kernel
    sizes: I64, counts: I64, capacity: int
) -> Patterns:
    """The plain path: a sorted list of the rooms that open packs have, and a stack of groups for each."""
    groups: list[tuple[int, _Content]] = []  # (repeat, content), repeat 0 = used up
    rooms: list[int] = []
    at_room: dict[int, list[int]] = {}

    def add(repeat: int, room: int, content: _Content) -> None:
        if room > 0:
            there = at_room.setdefault(room, [])
            if not there:
                insort(rooms, room)
            there.append(len(groups))
        groups.append((repeat, content))

    for size, left in zip(reversed(sizes.tolist()), reversed(counts.tolist()), strict=True):
        while left > 0:
            place = bisect_left(rooms, size)
            if place == len(rooms):  # as many new packs as it takes
                room, content = capacity, None
                repeat = -(-left // (room // size))
            else:
                room = rooms[place]
                there = at_room[room]
                group = there.pop()
                if not there:
                    del rooms[place]
                repeat, content = groups[group]
                groups[group] = (0, None)
            k = room // size
            if left >= k * repeat:
                add(repeat, room - k * size, (size, k, content))
                left -= k * repeat
                continue
            full, rest = divmod(left, k)
            if full:
                add(full, room - k * size, (size, k, content))
            if rest:
                add(1, room - rest * size, (size, rest, content))
            if untouched := repeat - full - (rest > 0):
                add(untouched, room, content)
            break
    return flatten(groups)


_Content = tuple[int, int, "_Content"] | None  # size, number, what was there before
