"""diverse: packs that mix many lengths, in the phases of offline multimodal packing. Places every sample.

1. powers: samples whose length is a power of two are combined into packs without a gap, as many different
   lengths as possible first, repeats only where no new length fits (where limits forbid that, greedily); what
   would leave a gap waits.
2. seeds: every sample above half a pack opens one and is filled up with different lengths, largest first.
3. rest: the largest length left opens a pack that is filled in the same way, while packs get at least 95 %
   full.
4. finalise: best fit decreasing on what is left.
The plan notes a table with packs, samples and fill of each phase. Packs are mixed rather than tight: expect
somewhat more of them than with `auto`. Deterministic; works on counts, so its cost does not depend on n.
Under further limits (images of a pack, `max_samples`) samples of equal need are one kind, every pack of every
phase keeps all limits, and the last phase fills what is left largest first.

Options: `max_items` (samples of a pack, in every phase), and `phases` instead of 2. and 3., each with

    seeds       what opens a pack: half (above half of it), largest (until a pack stays below the knobs),
                {top: N} (the N largest lengths), {range: [low, high]}, {lengths: [512, …]}, or
                {above: 0.25} (of a pack)
    min_items, max_items     samples of a pack
    min_fill    share of a pack; what stays below it, or below min_items, waits for a later phase
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..checks import number, one_of, whole
from ..errors import InputError
from ..extend import I64, Bins, PackProblem, Patterns
from . import bfd
from ._multi import assign, needs, patterns_of, types_of

VERSION = 1
HISTOGRAM = True
LIMITS = True
OPTIONS: dict[str, Any] = {"max_items": None, "phases": None}

_FULL_ENOUGH = 0.95
_PARTS = 1_000_000  # shares of a pack are compared in whole numbers
_SEEDS = ("half", "largest")
_NAMED_SEEDS = ("top", "range", "lengths", "above")
#: What takes the place of phases that are not given, by their names.
_DEFAULT: dict[str, dict[str, Any]] = {
    "seeds": {"seeds": "half"},
    "rest": {"seeds": "largest", "min_fill": _FULL_ENOUGH},
}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse knobs that cannot hold.

    Raises:
        InputError, UnknownNameError: names the knob.
    """
    _at_least_1(options, "max_items")
    phases = options.get("phases")
    if phases is None:
        return
    if not isinstance(phases, list | tuple) or not all(isinstance(phase, Mapping) for phase in phases):
        raise InputError("phases of packer diverse are no list of mappings", hint="[{seeds: half}, …]")
    for phase in phases:
        for name in phase:
            one_of("knob of a phase", name, ("seeds", "min_items", "max_items", "min_fill"))
        _at_least_1(phase, "min_items", "max_items")
        number("min_fill", phase.get("min_fill", 0.0), 0, 1, hint="a share of a pack")
        seeds = phase.get("seeds", "largest")
        named = isinstance(seeds, Mapping) and len(seeds) == 1 and next(iter(seeds)) in _NAMED_SEEDS
        if not named and seeds not in _SEEDS:
            raise InputError(
                f"seeds of a phase are {seeds!r}",
                hint="half, largest, {top: N}, {range: [low, high]}, {lengths: [N, …]} or {above: share}",
            )
        _seeds_of(seeds, [1], 1)


def _at_least_1(knobs: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if knobs.get(name) is not None:
            whole(name, knobs[name], 1)


def _seeds_of(strategy: Any, left: list[int], capacity: int) -> list[int]:
    """Lengths that open packs in a phase, the largest first.

    >>> _seeds_of({"range": [2, 5]}, [1, 2, 3, 5, 8], 8), _seeds_of("half", [1, 4, 5, 8], 8)
    ([5, 3, 2], [8, 5])
    """
    down = left[::-1]
    if strategy in _SEEDS:
        return [size for size in down if strategy == "largest" or 2 * size > capacity]
    ((name, value),) = strategy.items()
    try:
        if name == "top":
            return down[: int(value)]
        if name == "range":
            low, high = value
            return [size for size in down if low <= size <= high]
        if name == "lengths":
            return [size for size in down if size in value]
        return [size for size in down if size >= float(value) * capacity]
    except (TypeError, ValueError):
        raise InputError(f"seeds of a phase are {strategy!r}", hint="see packtrain.packers.diverse") from None


def phase_order(names: Iterable[str]) -> list[str]:
    """Names of phases as they were run, whatever order they were stored in."""
    known = {"powers": 0, "seeds": 1, "rest": 2, "finalise": 1 << 30}
    return sorted(names, key=lambda name: known[name] if name in known else int(name.partition(".")[0]))


def pack(problem: PackProblem) -> Patterns | Bins:
    """Patterns of the phases (under further limits a bin for each sample), with their table in the notes."""
    phases = problem.options.get("phases")
    named: dict[str, Mapping[str, Any]] = dict(_DEFAULT)
    if phases is not None:
        named = {f"{i}. {_told(phase)}": phase for i, phase in enumerate(phases, 1)}
    limited = bool(problem.limits) or problem.max_samples is not None
    if limited:
        need, caps = needs(problem)
        kinds, counts, ids = types_of(need)
    else:
        kinds, counts, caps = problem.sizes[:, None], problem.counts, np.array([problem.capacity])
    state = _State(kinds, counts, caps, problem.options.get("max_items"), [*named])
    state.powers()
    for name, phase in named.items():
        state.phase(name, phase)
    state.finalise()
    made = patterns_of((repeat, content.items()) for repeat, content in state.groups)
    notes = {"phases": state.table}
    if limited:
        of_kinds = (made.repeat, made.offsets, made.size, made.number)
        return Bins(bin_of=assign(np.arange(len(kinds), dtype=np.int64), of_kinds, ids), notes=notes)
    return replace(made, size=kinds[made.size, 0], notes=notes)


def _told(phase: Mapping[str, Any]) -> str:
    seeds = phase.get("seeds", "largest")
    return seeds if isinstance(seeds, str) else " ".join(f"{key} {value}" for key, value in seeds.items())


@dataclass
class _State:
    """What is left, and the patterns made so far.

    Attributes:
        kinds: int64[K, d], distinct needs of samples, ascending: tokens, then further limits.
        counts: int64[K], samples of each kind. caps: int64[d].
        left: kinds that are not used up, ascending.
    """

    kinds: I64
    counts: I64
    caps: I64
    most: int | None
    phases: list[str]
    groups: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    table: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity = int(self.caps[0])
        self.need: list[list[int]] = self.kinds.tolist()
        self.size = [need[0] for need in self.need]
        self.floor = self.kinds.min(axis=0).tolist() if len(self.kinds) else self.caps.tolist()
        self.left = [*range(len(self.size))]
        self.count: list[int] = self.counts.tolist()
        names = ["powers", *self.phases, "finalise"]
        self.table = {phase: {"packs": 0, "samples": 0, "tokens": 0, "fill": 0.0} for phase in names}

    def powers(self) -> None:
        ladder = [kind for kind in self.left if self.size[kind] & (self.size[kind] - 1) == 0]
        while ladder:
            content = self.mixed(ladder, None, self.most)
            if self.tokens(content) < self.capacity:
                if self.most is None and len(self.caps) == 1:
                    break
                content = self.mixed(ladder, None, self.most, greedy=True)  # limits kept it from being filled
            if self.tokens(content) == self.capacity:
                self.emit("powers", content, ladder)
            else:
                ladder.pop()
        self.left = [kind for kind in self.left if self.count[kind]]

    def phase(self, name: str, knobs: Mapping[str, Any]) -> None:
        """Open packs with the seeds of a phase; what does not meet its knobs waits for a later one."""
        most = min((n for n in (self.most, knobs.get("max_items")) if n is not None), default=None)
        least, fill = knobs.get("min_items", 1), round(knobs.get("min_fill", 0.0) * _PARTS)
        strategy = knobs.get("seeds", "largest")
        sizes = sorted({self.size[kind] for kind in self.left})
        chosen = set(_seeds_of(strategy, sizes, self.capacity))
        for seed in [kind for kind in reversed(self.left) if self.size[kind] in chosen]:
            while self.count[seed]:
                content = self.mixed(self.left, seed, most)
                if self.tokens(content) * _PARTS < self.capacity * fill or sum(content.values()) < least:
                    if strategy == "largest" and len(self.caps) == 1:
                        return  # smaller seeds fill packs no better
                    break
                self.emit(name, content, self.left)

    def finalise(self) -> None:
        if self.most is not None or len(self.caps) > 1:
            self.phase("finalise", {})
        sizes = np.array([self.size[kind] for kind in self.left], dtype=np.int64)
        counts = np.array([self.count[kind] for kind in self.left], dtype=np.int64)
        rest = bfd.pack_tokens(
            PackProblem(costs=sizes[:0], capacity=self.capacity, sizes=sizes, counts=counts)
        )
        kinds = np.array(self.left, dtype=np.int64)[np.searchsorted(sizes, rest.size)]
        for group in range(len(rest.repeat)):
            part = slice(int(rest.offsets[group]), int(rest.offsets[group + 1]))
            content = dict(zip(kinds[part].tolist(), rest.number[part].tolist(), strict=True))
            self.add("finalise", content, int(rest.repeat[group]))

    def mixed(
        self, choice: list[int], seed: int | None, most: int | None = None, *, greedy: bool = False
    ) -> dict[int, int]:
        """Fill a pack with kinds of different sizes of `choice`, largest first; then with repeats.

        Args:
            seed: the kind that opens it.
            most: samples of the pack.
            greedy: repeats at once.
        """
        size, content = self.size, dict[int, int]()
        room, items = self.caps.tolist(), 1 << 62 if most is None else most
        if seed is not None:
            items -= self.put(content, seed, 1, room)
        sizes = {size[kind] for kind in content}
        place = 0 if greedy else self.fitting(choice, room)
        while place and items:
            kind = choice[place - 1]
            place -= 1
            if size[kind] not in sizes and self.fits(kind, room):
                items -= self.put(content, kind, 1, room)
                sizes.add(size[kind])
                place = min(place, self.fitting(choice, room))
        place = self.fitting(choice, room)
        while place and items:
            kind = choice[place - 1]
            place -= 1
            more = min(self.fits(kind, room), self.count[kind] - content.get(kind, 0), items)
            if more > 0:
                items -= self.put(content, kind, more, room)
                place = min(place, self.fitting(choice, room))
        return content

    def fitting(self, choice: list[int], room: list[int]) -> int:
        """How many kinds of `choice`, from the smallest, can fit; 0 where a limit leaves no sample room."""
        if any(left < least for left, least in zip(room, self.floor, strict=True)):
            return 0
        return bisect_right(choice, room[0], key=self.size.__getitem__)

    def fits(self, kind: int, room: list[int]) -> int:
        """How many samples of a kind the room takes."""
        return min(left // each for left, each in zip(room, self.need[kind], strict=True) if each)

    def put(self, content: dict[int, int], kind: int, number: int, room: list[int]) -> int:
        content[kind] = content.get(kind, 0) + number
        for axis, each in enumerate(self.need[kind]):
            room[axis] -= number * each
        return number

    def tokens(self, content: Mapping[int, int]) -> int:
        return sum(self.size[kind] * k for kind, k in content.items())

    def emit(self, phase: str, content: dict[int, int], choice: list[int]) -> None:
        """Use a content as often as the counts allow; used-up kinds leave `choice`."""
        repeat = min(self.count[kind] // k for kind, k in content.items())
        for kind, k in content.items():
            self.count[kind] -= repeat * k
            if self.count[kind] == 0:
                choice.remove(kind)
        self.add(phase, content, repeat)

    def add(self, phase: str, content: dict[int, int], repeat: int) -> None:
        self.groups.append((repeat, content))
        row = self.table[phase]
        row["packs"] += repeat
        row["samples"] += repeat * sum(content.values())
        row["tokens"] += repeat * self.tokens(content)
        row["fill"] = round(row["tokens"] / (row["packs"] * self.capacity), 6)
