"""optimal: column generation through HiGHS, for few distinct lengths where `auto` misses the bound.

The linear relaxation (patterns x multiplicities, every class covered) is solved by generating patterns:
duals price the classes, a knapsack over the capacity finds the patterns worth more than a pack. In each
round the solution is rounded down and the samples left are packed by `refine` or `bfd`; their patterns join
the program, the fewest packs seen are kept, and `auto`'s plan where nothing beats it.

The bound it notes is proven in integers, whatever the solver's rounding: for integer weights w of the
classes and the largest weight V that fits into one pack (exact knapsack), ceil(sum w*count / V) packs are
needed. Work is limited in rounds (ROUNDS) and classes (CLASSES); beyond that the note says what was left out.

The solver computes in floating point, so another HiGHS may choose other patterns: they are stored in the
plan, and `packtrain.planning.build.replay` rebuilds the plan from them without the solver.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import optional
from ..extend import I64, PackProblem, Patterns
from . import auto, bfd, refine
from ._bounds import best_bound
from ._jit import part_of
from ._multi import joined, patterns_of

VERSION = 2
HISTOGRAM = True

_ROUNDS = 60
_DIVES = 30
_CLASSES = 8192
CAPACITY = 1 << 17
_COLUMNS = 400  # patterns taken over in a round, or one for every four classes
_SCALE = 1 << 30  # duals as integers

logger = logging.getLogger(__name__)
Pattern = dict[int, int]  # class -> samples


def pack(problem: PackProblem) -> Patterns:
    """Patterns with a proven bound in the notes (`bound`), and the patterns themselves (`patterns`)."""
    start = auto.pack(problem)
    assert isinstance(start, Patterns)  # no limits here: LIMITS is not set
    packs = int(start.repeat.sum())
    bound, name = best_bound(problem.sizes, problem.counts, problem.capacity, packs)
    notes: dict[str, Any] = dict(start.notes)
    best = start
    if bound < packs:
        if len(problem.sizes) > _CLASSES or problem.capacity > CAPACITY:
            notes["lp"] = (
                f"left out: {len(problem.sizes)} classes at capacity {problem.capacity}, "
                f"limits {_CLASSES} and {CAPACITY}"
            )
            logger.warning("packer optimal: %s", notes["lp"])
        else:
            with part_of(int(problem.counts.sum())):
                found, lp_bound, rounds = _generate(problem, start)
            notes["lp"] = f"{rounds} rounds"
            if lp_bound > bound:
                bound, name = lp_bound, "lp"
            if int(found.repeat.sum()) < packs:
                best, notes["chosen"] = found, f"optimal/{VERSION}"
    stored = {field: getattr(best, field).tolist() for field in ("repeat", "offsets", "size", "number")}
    notes.update(bound=bound, bound_name=name, patterns=stored)
    return replace(best, notes=notes)


def _generate(problem: PackProblem, start: Patterns) -> tuple[Patterns, int, int]:
    """Column generation: (patterns that pack everything, proven bound, rounds)."""
    sizes, counts, capacity = problem.sizes, problem.counts, problem.capacity
    master = _Master(counts)
    for source in (start, refine.search(problem), bfd.pack_tokens(problem)):
        for pattern in _contents(source, sizes):
            master.add(pattern)
    for k, size in enumerate(sizes.tolist()):
        master.add({k: capacity // size})
    best, bound, rounds = start, 0, 0
    while rounds < _ROUNDS:
        rounds += 1
        value, weights = master.solve()
        most, priced = _price(sizes, weights, capacity)
        if most > 0:
            total = sum(w * c for w, c in zip(weights.tolist(), counts.tolist(), strict=True))
            bound = max(bound, -(-total // most))
        left = counts.tolist()
        found, tail = _completed(problem, _take(left, master, 1e-6), left)
        if int(found.repeat.sum()) < int(best.repeat.sum()):
            best = found
        if bound >= min(value - 1e-6, int(best.repeat.sum())):
            break
        # What rounding leaves over is packed well by the heuristics: their patterns fit what is missing.
        if not sum(master.add(pattern) for pattern in (*priced, *_contents(tail, sizes))):
            break
    if int(best.repeat.sum()) > bound:
        best = _dive(problem, master, best, bound)
    return best, bound, rounds


def _quiet_solver() -> tuple[Any, float]:
    """A HiGHS that prints nothing, not even its banner (printed while callbacks are set up), and infinity."""
    highspy = optional("highspy", "highspy", "optimal")

    class Quiet(highspy.Highs):  # type: ignore[misc, name-defined]
        def enableCallbacks(self) -> Any:
            self.setOptionValue("output_flag", False)
            return super().enableCallbacks()

    return Quiet(), float(highspy.kHighsInf)


class _Master:
    """The restricted linear program: one row a class, one column a pattern."""

    def __init__(self, counts: I64) -> None:
        self.patterns: list[Pattern] = []
        self.known: set[tuple[tuple[int, int], ...]] = set()
        self.rows = len(counts)
        self.solver, self.infinity = _quiet_solver()
        options = {"output_flag": False, "threads": 1, "random_seed": 0, "parallel": "off"}
        for option, value in options.items():
            self.solver.setOptionValue(option, value)
        none = np.zeros(0)
        for count in counts.tolist():
            self.solver.addRow(float(count), self.infinity, 0, none.astype(np.int32), none)
        self.activity: list[float] = []

    def add(self, pattern: Pattern) -> bool:
        """A new column; False when it is there already."""
        key = tuple(sorted(pattern.items()))
        if key in self.known:
            return False
        self.known.add(key)
        self.patterns.append(pattern)
        rows = np.array([row for row, _ in key], dtype=np.int32)
        values = np.array([k for _, k in key], dtype=np.float64)
        self.solver.addCol(1.0, 0.0, self.infinity, len(rows), rows, values)
        return True

    def require(self, counts: list[int]) -> None:
        """Cover these counts from now on."""
        for row, count in enumerate(counts):
            self.solver.changeRowBounds(row, float(count), self.infinity)

    def solve(self) -> tuple[float, I64]:
        """Objective and integer weights (duals in units of 1/_SCALE, never negative)."""
        self.solver.run()
        solution = self.solver.getSolution()
        self.activity = list(solution.col_value)
        duals = np.asarray(solution.row_dual, dtype=np.float64)[: self.rows]
        weights = np.floor(np.maximum(duals, 0.0) * _SCALE).astype(np.int64)
        return float(self.solver.getInfo().objective_function_value), weights


def _price(sizes: I64, weights: I64, capacity: int) -> tuple[int, list[Pattern]]:
    """The largest weight that fits into a pack, and for each class the best pattern that holds it.

    An exact knapsack over integers; patterns worth no more than a pack are left out.
    """
    best = np.zeros(capacity + 1, dtype=np.int64)
    item = np.full(capacity + 1, -1, dtype=np.int64)
    for room in range(int(sizes[0]), capacity + 1):
        fits = int(np.searchsorted(sizes, room, side="right"))
        values = best[room - sizes[:fits]] + weights[:fits]
        k = int(values.argmax())
        best[room], item[room] = values[k], k
    through = weights + best[capacity - sizes]
    order = np.argsort(-through, kind="stable")
    order = order[through[order] > _SCALE][: max(_COLUMNS, len(sizes) // 4)]
    patterns: list[Pattern] = []
    for k in order.tolist():
        pattern = {k: 1}
        room = capacity - int(sizes[k])
        while item[room] >= 0:
            other = int(item[room])
            if weights[other] > 0:  # else it only stands for room that is left
                pattern[other] = pattern.get(other, 0) + 1
            room -= int(sizes[other])
        patterns.append(pattern)
    return int(best[capacity]), patterns


def _take(left: list[int], master: _Master, least: float) -> list[tuple[int, Pattern]]:
    """Patterns of the solution, each value rounded to value + least, never above what is left."""
    taken = []
    for value, pattern in zip(master.activity, master.patterns, strict=False):
        repeat = min(int(value + least), *(left[k] // held for k, held in pattern.items()))
        if repeat > 0:
            taken.append((repeat, pattern))
            for k, held in pattern.items():
                left[k] -= repeat * held
    return taken


def _completed(
    problem: PackProblem, whole: list[tuple[int, Pattern]], left: list[int]
) -> tuple[Patterns, Patterns]:
    """`whole` with the rest packed by the better of refine and bfd; and the patterns of that rest alone."""
    sizes = problem.sizes.tolist()
    kept = [k for k, count in enumerate(left) if count]
    rest = PackProblem(
        costs=problem.costs[:0],
        capacity=problem.capacity,
        sizes=problem.sizes[kept],
        counts=np.array([left[k] for k in kept], dtype=np.int64),
    )
    tail = min((refine.search(rest), bfd.pack_tokens(rest)), key=lambda made: int(made.repeat.sum()))
    fixed = patterns_of(
        (times, [(sizes[k], held) for k, held in pattern.items()]) for times, pattern in whole
    )
    return joined([fixed, tail]), tail


def _dive(problem: PackProblem, master: _Master, best: Patterns, bound: int) -> Patterns:
    """Round in steps: fix what is whole (or at least half), solve again for what is left."""
    left = problem.counts.tolist()
    whole: list[tuple[int, Pattern]] = []
    for _ in range(_DIVES):
        taken = _take(left, master, 1e-6) or _take(left, master, 0.5)
        whole += taken
        found, _ = _completed(problem, whole, left)
        if int(found.repeat.sum()) < int(best.repeat.sum()):
            best = found
        if not taken or not any(left) or int(best.repeat.sum()) <= bound:
            break
        master.require(left)
        master.solve()
    return best


def _contents(patterns: Patterns, sizes: I64) -> list[Pattern]:
    """The content of each group, by class."""
    classes = np.searchsorted(sizes, patterns.size).tolist()
    number = patterns.number.tolist()
    bounds = patterns.offsets.tolist()
    return [dict(zip(classes[low:high], number[low:high], strict=True)) for low, high in pairwise(bounds)]
