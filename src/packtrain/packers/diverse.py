"""diverse: packs that mix many lengths, in the phases of offline multimodal packing. Places every sample.

1. powers: samples whose length is a power of two are combined into packs without a gap, as many different
   lengths as possible first, repeats only where no new length fits; what would leave a gap waits.
2. seeds: every sample above half a pack opens one and is filled up with different lengths, largest first.
3. rest: the largest length left opens a pack that is filled in the same way, while packs get at least 95 %
   full.
4. finalise: best fit decreasing on what is left.
The plan notes a table with packs, samples and fill of each phase. Packs are mixed rather than tight: expect
somewhat more of them than with `auto`. Deterministic; works on counts, so its cost does not depend on n.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..extend import PackProblem, Patterns
from . import bfd

__all__ = ["HISTOGRAM", "VERSION", "pack"]

VERSION = 1
HISTOGRAM = True

_FULL_ENOUGH = (95, 100)
_PHASES = ("powers", "seeds", "rest", "finalise")


def pack(problem: PackProblem) -> Patterns:
    """Patterns of the four phases, with their table in the notes."""
    state = _State(problem.sizes, problem.counts, problem.capacity)
    state.powers()
    state.seeds()
    state.rest()
    state.finalise()
    as_array = [np.array(v, dtype=np.int64) for v in (state.repeat, state.offsets, state.size, state.number)]
    return Patterns(
        repeat=as_array[0],
        offsets=as_array[1],
        size=as_array[2],
        number=as_array[3],
        notes={"phases": {phase: state.table[phase] for phase in _PHASES}},
    )


@dataclass
class _State:
    """What is left, and the patterns made so far."""

    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]
    capacity: int
    repeat: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=lambda: [0])
    size: list[int] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    table: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left: list[int] = self.sizes.tolist()  # ascending, all with count > 0
        self.count: dict[int, int] = dict(zip(self.left, self.counts.tolist(), strict=True))
        self.table = {phase: {"packs": 0, "samples": 0, "tokens": 0, "fill": 0.0} for phase in _PHASES}

    def powers(self) -> None:
        ladder = [size for size in self.left if size & (size - 1) == 0]
        while ladder:
            content = self.mixed(ladder, {}, self.capacity)
            if sum(size * k for size, k in content.items()) < self.capacity:
                break
            self.emit("powers", content, ladder)
        self.drop_used()

    def seeds(self) -> None:
        for seed in [size for size in reversed(self.left) if 2 * size > self.capacity]:
            while self.count[seed]:
                content = self.mixed(self.left, {seed: 1}, self.capacity - seed)
                self.emit("seeds", content, self.left)

    def rest(self) -> None:
        while self.left:
            seed = self.left[-1]
            content = self.mixed(self.left, {seed: 1}, self.capacity - seed)
            fill = sum(size * k for size, k in content.items())
            if fill * _FULL_ENOUGH[1] < self.capacity * _FULL_ENOUGH[0]:
                break
            self.emit("rest", content, self.left)

    def finalise(self) -> None:
        sizes = np.array(self.left, dtype=np.int64)
        counts = np.array([self.count[size] for size in self.left], dtype=np.int64)
        rest = bfd.pack_tokens(
            PackProblem(costs=sizes[:0], capacity=self.capacity, sizes=sizes, counts=counts)
        )
        for group in range(len(rest.repeat)):
            part = slice(int(rest.offsets[group]), int(rest.offsets[group + 1]))
            content = dict(zip(rest.size[part].tolist(), rest.number[part].tolist(), strict=True))
            self.add("finalise", content, int(rest.repeat[group]))

    def mixed(self, choice: list[int], start: dict[int, int], room: int) -> dict[int, int]:
        """Fill `room` with different sizes of `choice`, largest first; then with repeats, largest first."""
        content = dict(start)
        place = bisect_right(choice, room)
        while place:
            size = choice[place - 1]
            if size not in content:
                content[size] = 1
                room -= size
            place = min(place - 1, bisect_right(choice, room))
        place = bisect_right(choice, room)
        while place:
            size = choice[place - 1]
            more = min(room // size, self.count[size] - content.get(size, 0))
            if more > 0:
                content[size] = content.get(size, 0) + more
                room -= more * size
            place = min(place - 1, bisect_right(choice, room))
        return content

    def emit(self, phase: str, content: dict[int, int], choice: list[int]) -> None:
        """Use a content as often as the counts allow; used-up sizes leave `choice`."""
        repeat = min(self.count[size] // k for size, k in content.items())
        for size, k in content.items():
            self.count[size] -= repeat * k
            if self.count[size] == 0:
                choice.remove(size)
        self.add(phase, content, repeat)

    def drop_used(self) -> None:
        self.left = [size for size in self.left if self.count[size]]

    def add(self, phase: str, content: dict[int, int], repeat: int) -> None:
        self.repeat.append(repeat)
        self.size.extend(content)
        self.number.extend(content.values())
        self.offsets.append(len(self.size))
        row = self.table[phase]
        row["packs"] += repeat
        row["samples"] += repeat * sum(content.values())
        row["tokens"] += repeat * sum(size * k for size, k in content.items())
        row["fill"] = round(row["tokens"] / (row["packs"] * self.capacity), 6)
