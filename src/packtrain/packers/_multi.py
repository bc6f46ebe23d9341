"""Best fit decreasing under several capacities: tokens, further limits, samples a pack.

Samples of equal need in every dimension form a type; groups of identical open packs are handled at once as
in `bfd`. One dimension is cut into planes (what a pack has left of it), another tells rooms apart: open
packs are found by (plane, room) with one room bitset a plane. For a type every plane that may hold it is
searched for the smallest room that fits; of at most TRIES candidates a plane the one with the least left
over wins. Without the planes, packs that are full in the other dimension block the search.

Where three dimensions bind at once, packs that are full in the third block the search in the same way: when a
plan stays 1 % over its bound, the third most demanded dimension is cut into planes too.

Which order of types is best differs by instance: the largest relative need first, the sum of needs first,
or needs weighted by scarcity; and so does which dimension serves as rooms. All are run, until one is within
1/10,000 of the bound, and the fewest packs win. Integers only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..extend import I64, PackProblem, Patterns
from ._jit import BIT, DE_BRUIJN, SIX_BITS, kernel, use_jit
from ._kernels import emit_patterns


# --------------------------------------------------------------------------------------------
# Compiled form of the fill in `_multi.py`
# --------------------------------------------------------------------------------------------
@kernel
def _fill_types(  # noqa: C901 - a kernel is compiled as one function
    rows: Any, counts: Any, caps: Any, floor: Any, planes: Any, seconds: Any, shift: Any, tries: Any
) -> Any:  # pragma: no cover
    """Groups of types as `bfd_groups` gives them; rows in the order in which they are placed."""
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
                    place = (w << 6) + BIT[(low * DE_BRUIJN) >> SIX_BITS]
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
    return repeat[:n_groups], content[:n_groups], node_kind, node_number, node_parent


# --------------------------------------------------------------------------------------------
# Best fit decreasing under several capacities: tokens, further limits, samples a pack
# --------------------------------------------------------------------------------------------

_PLANES = 16
_SECONDS = 8  # planes of a third dimension
_COARSE = 1 << 11  # rooms when there are those
_ROOMS = 1 << 14
_TRIES = 16
_FINE = 64
_UNIT = 1 << 20  # relative needs are counted in millionths (of 2**20) of a capacity


def needs(problem: PackProblem) -> tuple[I64, I64]:
    """(int64[n, d] need of each sample, int64[d] caps): tokens first, then limits, then samples."""
    columns = [np.asarray(problem.costs).astype(np.int64)]
    caps = [problem.capacity]
    for name in sorted(problem.limits):
        cost, cap = problem.limits[name]
        columns.append(np.asarray(cost).astype(np.int64))
        caps.append(cap)
    if problem.max_samples is not None:
        columns.append(np.ones(len(problem.costs), dtype=np.int64))
        caps.append(problem.max_samples)
    return np.stack(columns, axis=1), np.array(caps, dtype=np.int64)


def types_of(need: I64) -> tuple[I64, I64, I64]:
    """Distinct rows (ascending), how many samples each has, and the sample ids grouped by row.

    Stable sorts only; ids ascend inside a type.
    """
    order = np.arange(len(need), dtype=np.int64)
    for column in range(need.shape[1] - 1, -1, -1):
        order = order[np.argsort(need[order, column], kind="stable")]
    rows = need[order]
    first = (
        np.flatnonzero(np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])) if len(rows) else order
    )
    return rows[first], np.diff(np.append(first, len(rows))), order


def pack_limits(problem: PackProblem) -> I64:
    """Bin of each sample; the best of three orders of types."""
    need, caps = needs(problem)
    if len(need) == 0:
        return np.zeros(0, dtype=np.int64)
    rows, counts, ids = types_of(need)
    share = _units(need, np.maximum(caps, 1)).sum(axis=0)
    bound = max(
        -(-total // cap) for total, cap in zip(need.sum(axis=0).tolist(), caps.tolist(), strict=True) if cap
    )
    compiled = use_jit(len(need))
    best: tuple[int, I64, Any] | None = None
    for seconds in (1, _SECONDS) if len(caps) > 2 else (1,):
        if best is not None and best[0] - bound <= bound // 100:
            break
        for columns in _layouts(share, caps)[: 2 if seconds == 1 else 1]:
            view = np.ascontiguousarray(rows[:, columns])
            for order in _orders(view, caps[columns], share[columns]):
                patterns, packs = _run(view[order], counts[order], caps[columns], seconds, compiled)
                if best is None or packs < best[0]:
                    best = (packs, order, patterns)
                if best[0] - bound <= bound // 10_000:  # nothing can gain more than one pack in 10,000
                    return assign(best[1], best[2], ids)
    assert best is not None  # there is always a layout
    return assign(best[1], best[2], ids)


def _layouts(share: I64, caps: I64) -> list[list[int]]:
    """Orders of the dimensions: rooms (fine), planes (coarse), the others.

    First tokens as rooms and the most demanded of the rest as planes; then, where that differs, the most
    demanded fine dimension as rooms.
    """
    by_share = np.argsort(-share, kind="stable").tolist()
    out = []
    for rooms in (0, next((d for d in by_share if caps[d] > _FINE), 0)):
        planes = next(d for d in by_share if d != rooms)
        layout = [rooms, planes, *(d for d in by_share if d not in (rooms, planes))]
        if layout not in out:
            out.append(layout)
    return out


def _units(need: I64, caps: I64) -> I64:
    return need * _UNIT // caps


def largest_need(need: I64, caps: I64) -> I64:
    """The largest need of each row relative to its cap, in millionths (of 2**20)."""
    return _units(need, np.maximum(caps, 1)).max(axis=1)  # type: ignore[no-any-return]


def _orders(rows: I64, caps: I64, share: I64) -> list[I64]:
    """Three orders of the types, the most demanding first."""
    relative = _units(rows, np.maximum(caps, 1))
    weight = share * 1024 // max(1, int(share.max()))
    keys = [relative.max(axis=1), relative.sum(axis=1), (relative * weight).sum(axis=1)]
    return [np.argsort(-key, kind="stable") for key in keys]


def _run(rows: I64, counts: I64, caps: I64, seconds: int, compiled: bool) -> tuple[Any, int]:
    """Patterns over types (repeat, offsets, type, number), and the number of packs."""
    planes = int(min(_PLANES, caps[1])) + 1
    shift = 0
    while int(caps[0]) >> shift > (_ROOMS if seconds == 1 else _COARSE):
        shift += 1
    floor = rows.min(axis=0)  # a pack with less left than any sample needs is closed
    if compiled:
        patterns = emit_patterns(*_fill_types(rows, counts, caps, floor, planes, seconds, shift, _TRIES))
    else:
        patterns = _PlainFill(caps, floor, planes, seconds, shift).run(rows, counts)
    return patterns, int(patterns[0].sum())


def assign(order: I64, patterns: Any, ids: I64) -> I64:
    """Bin of each sample: packs in the order of their groups take the next samples of each type."""
    repeat, offsets, kind, number = patterns
    group = np.repeat(np.arange(len(repeat), dtype=np.int64), repeat)
    items = np.diff(offsets)[group]
    within = np.arange(int(items.sum()), dtype=np.int64) - np.repeat(np.cumsum(items) - items, items)
    item = np.repeat(offsets[group], items) + within
    pack = np.repeat(np.arange(len(group), dtype=np.int64), items)
    taken = number[item]
    kind_of_place, pack_of_place = np.repeat(order[kind[item]], taken), np.repeat(pack, taken)
    bins = np.empty(len(ids), dtype=np.int64)
    bins[ids] = pack_of_place[np.argsort(kind_of_place, kind="stable")]
    return bins


class _PlainFill:
    """The plain path: for each plane a sorted list of occupied rooms and a stack of groups for each."""

    def __init__(self, caps: I64, floor: I64, planes: int, seconds: int, shift: int) -> None:
        self.caps: list[int] = caps.tolist()
        self.floor: list[int] = floor.tolist()
        self.planes, self.seconds, self.shift = planes, seconds, shift
        self.second = 2 if seconds > 1 else 1
        self.second_cap = max(1, self.caps[self.second])
        self.plane_cap = max(1, self.caps[1])
        self.rooms: list[list[int]] = [[] for _ in range(planes * seconds)]
        self.at_room: list[dict[int, list[int]]] = [{} for _ in range(planes * seconds)]
        self.left: list[list[int]] = []
        self.repeat: list[int] = []
        self.content: list[Any] = []

    def run(self, rows: I64, counts: I64) -> tuple[I64, I64, I64, I64]:
        """Patterns over types (repeat, offsets, type, number)."""
        for kind, (need, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            todo = count
            while todo > 0:
                todo = self.place(kind, need, todo)
        made = flatten(zip(self.repeat, self.content, strict=True))
        return made.repeat, made.offsets, made.size, made.number

    def place(self, kind: int, need: list[int], todo: int) -> int:
        """Put samples of a type into the best group or into new packs; returns how many are left."""
        found = self.best_group(need)
        if found is None:
            base, left = None, self.caps
        else:
            base, left = self.content[found], self.left[found]
        k = min(todo, *(a // b for a, b in zip(left, need, strict=True) if b > 0))
        m = -(-todo // k) if found is None else self.repeat[found]
        if found is not None:
            self.repeat[found] = 0
        full = min(m, todo // k)
        rest = todo - full * k
        part = 1 if full < m and rest > 0 else 0
        self.add(full, [a - k * b for a, b in zip(left, need, strict=True)], (kind, k, base))
        if part:
            self.add(part, [a - rest * b for a, b in zip(left, need, strict=True)], (kind, rest, base))
        self.add(m - full - part, left, base)
        return 0 if part else rest

    def best_group(self, need: list[int]) -> int | None:
        """The open group that has least left over, taken out of its stack."""
        best = best_at = None
        low_room = need[0] >> self.shift
        low_second = need[self.second] * (self.seconds - 1) // self.second_cap
        low_plane = need[1] * (self.planes - 1) // self.plane_cap
        for plane in range(low_plane * self.seconds, self.planes * self.seconds):
            if plane % self.seconds < low_second:
                continue
            rooms = self.rooms[plane]
            at = self.first_fit(rooms, self.at_room[plane], bisect_left(rooms, low_room), need)
            if at is None:
                continue
            left = self.left[self.at_room[plane][at[0]][at[1]]]
            score = 2 * ((left[0] << 20) // self.caps[0]) + (left[1] << 20) // self.plane_cap
            if self.seconds > 1:
                score += (left[2] << 20) // self.second_cap
            if best is None or score < best:
                best, best_at = score, (plane, *at)
        if best_at is None:
            return None
        plane, room, place = best_at
        stack = self.at_room[plane][room]
        group = stack.pop(place)
        if not stack:
            rooms = self.rooms[plane]
            del rooms[bisect_left(rooms, room)]
        return group

    def first_fit(
        self, rooms: list[int], at_room: dict[int, list[int]], start: int, need: list[int]
    ) -> tuple[int, int] | None:
        """(room, place in its stack) of the first of TRIES candidates that fits."""
        tried = 0
        for room in rooms[start : start + _TRIES]:
            stack = at_room[room]
            for place in range(len(stack) - 1, -1, -1):
                tried += 1
                if all(a >= b for a, b in zip(self.left[stack[place]], need, strict=True)):
                    return room, place
                if tried >= _TRIES:
                    return None
        return None

    def add(self, repeat: int, left: list[int], content: Any) -> None:
        if repeat == 0:
            return
        if all(a >= b for a, b in zip(left, self.floor, strict=True)):
            plane = left[1] * (self.planes - 1) // self.plane_cap * self.seconds
            plane += left[self.second] * (self.seconds - 1) // self.second_cap
            room = left[0] >> self.shift
            stack = self.at_room[plane].setdefault(room, [])
            if not stack:
                insort(self.rooms[plane], room)
            stack.append(len(self.repeat))
        self.repeat.append(repeat)
        self.left.append(left)
        self.content.append(content)


def flatten(groups: Iterable[tuple[int, Any]]) -> Patterns:
    """Patterns of (repeat, content) groups; a content is (size, number, what was there before) or None."""
    return patterns_of((repeat, _items(content)) for repeat, content in groups if repeat)


def _items(content: Any) -> Iterator[tuple[int, int]]:
    while content is not None:
        yield content[:2]
        content = content[2]


def patterns_of(groups: Iterable[tuple[int, Iterable[tuple[int, int]]]]) -> Patterns:
    """Patterns of (repeat, pairs of size and number)."""
    repeats: list[int] = []
    offsets = [0]
    items: list[tuple[int, int]] = []
    for repeat, content in groups:
        repeats.append(repeat)
        items.extend(content)
        offsets.append(len(items))
    pairs = np.array(items, dtype=np.int64).reshape(-1, 2)
    return Patterns(
        repeat=np.array(repeats, dtype=np.int64),
        offsets=np.array(offsets, dtype=np.int64),
        size=pairs[:, 0].copy(),
        number=pairs[:, 1].copy(),
    )


def joined(parts: Sequence[Patterns]) -> Patterns:
    """One after the other."""
    none = np.zeros(0, dtype=np.int64)
    width = np.concatenate([none, *(np.diff(part.offsets) for part in parts)])
    return Patterns(
        repeat=np.concatenate([none, *(part.repeat for part in parts)]),
        offsets=np.concatenate([[0], np.cumsum(width)]).astype(np.int64),
        size=np.concatenate([none, *(part.size for part in parts)]),
        number=np.concatenate([none, *(part.number for part in parts)]),
    )
