"""Steps of samples: the seeded sample order cut into steps of B, each step packed on its own into K packs.

K is the same for all steps: the largest need, rounded up. A step's samples are spread over its packs so
that the predicted time is even, under the hard caps. One sample can cost more than the mean pack; then
packs are filled in groups (the fewest that a sample fits into evenly), so that whoever deals packs to
ranks (`balance.deal`) finds equal totals for any number of ranks up to the number of groups.

Trade-off: packs are not filled to the brim, since a step rarely fills exactly K packs. Padding-free rows
do not compute what stays free.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import divisors
from ..errors import PlanError, counted
from ..extend import I64
from ..packers._jit import kernel, use_jit
from ._materialise import Csr, from_bins, index_dtype
from .costs import FlopsCost
from .lengths import Lengths
from .long_samples import Classes
from .permutation import Permutation
from .spec import PlanSpec


# --------------------------------------------------------------------------------------------
# Kernels that put the samples of a step into its packs. The plain twin is the same function, uncompiled
# --------------------------------------------------------------------------------------------
# Samples of a step come heaviest first. `alone` samples (longer than a pack) take an empty pack and close it.
# `need` holds, sample by sample, what a sample takes of each capped quantity.
@kernel
def spread(  # noqa: C901 - a kernel is compiled as one function
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
def _best_fit(  # noqa: C901 - a kernel is compiled as one function
    need: Any, alone: Any, starts: Any, steps: Any, caps: Any, out: Any, opened: Any
) -> Any:
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
def _fill_empty(weight: Any, starts: Any, packs: Any, out: Any) -> Any:
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


# --------------------------------------------------------------------------------------------
# Steps of samples: the seeded sample order cut into steps of B, each step packed on its own into K packs
# --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Steps:
    """Samples in step order, heaviest first inside a step; arrays as the kernels take them."""

    ids: I64
    tokens: I64
    weight: I64
    need: I64
    alone: NDArray[np.bool_]
    starts: I64
    caps: I64
    compiled: bool

    @property
    def sizes(self) -> I64:
        return np.diff(self.starts)

    def sums(self, values: I64) -> I64:
        return np.add.reduceat(values, self.starts[:-1])


def plan_steps(lengths: Lengths, classes: Classes, spec: PlanSpec) -> tuple[Csr, PlanSpec, Classes, int]:
    """Pack by steps of `spec.samples_per_step` samples.

    Returns:
        Packs, step by step, canonical inside each step; the asked spec with its `packs_per_step`; the asked
        classes, with ledger and long samples of what was really packed; a lower bound on the packs.

    Raises:
        PlanError: no sample is left, or `spec.packs_per_step` packs do not hold a step.
    """
    batch = spec.samples_per_step
    assert batch is not None
    ids = np.flatnonzero(classes.keys > 0)
    if spec.seed is not None and len(ids):
        ids = ids[Permutation(len(ids), spec.seed).map(np.arange(len(ids), dtype=np.int64))]
    rest = len(ids) % batch
    if spec.last_step == "drop" and rest:
        classes = replace(classes, ledger=classes.ledger.with_more(ids[-rest:], "partial_step"))
        ids = ids[:-rest]
    if len(ids) == 0:
        raise PlanError(
            f"no step of {counted(batch, 'samples')} can be "
            f"made: {classes.ledger.counts() or 'no sample was read'}",
            hint="use fewer samples_per_step, or last_step='keep'",
        )
    steps = _steps(ids, batch, lengths, classes, spec)
    least = _round_up(int(_least_packs(steps).max()), spec.packs_multiple)
    packs, pack_of = _fill(steps, least, spec)
    csr = _materialise(steps, pack_of, packs, len(lengths))
    alone_cost = steps.need[:: len(steps.caps)][steps.alone]
    slots = int(np.maximum(alone_cost, spec.pack_length).sum())
    classes = replace(classes, singles=int(steps.alone.sum()), single_slots=slots)
    return csr, replace(spec, packs_per_step=packs), classes, int(np.minimum(least, steps.sizes).sum())


def _steps(ids: I64, batch: int, lengths: Lengths, classes: Classes, spec: PlanSpec) -> _Steps:
    m = spec.multiple_of
    cost = -(-np.asarray(lengths.tokens)[ids].astype(np.int64) // m) * m
    alone = np.asarray(classes.keys)[ids] > classes.top
    patches = lengths.costs.get("patches")
    weight = FlopsCost().of(cost, cost * cost, None if patches is None else np.asarray(patches)[ids])
    # Sums over a step stay far below 2**63, whatever the lengths.
    spare = int(weight.max()).bit_length() + batch.bit_length() - 61
    weight = np.maximum(weight >> max(0, spare), 1)
    order = np.concatenate([_inside(ids, weight, alone, a, b, batch) for a, b in _stretches(len(ids), batch)])
    ids, cost, weight, alone = ids[order], cost[order], weight[order], alone[order]
    needs, caps = [cost], [spec.pack_length, *spec.limits.values()]
    needs += [np.asarray(lengths.costs[name])[ids].astype(np.int64) for name in spec.limits]
    if spec.max_samples is not None:
        needs.append(np.ones(len(ids), dtype=np.int64))
        caps.append(spec.max_samples)
    starts = np.append(np.arange(0, len(ids), batch), len(ids)).astype(np.int64)
    return _Steps(
        ids=ids,
        tokens=cost,
        weight=weight,
        need=np.ascontiguousarray(np.stack(needs, axis=1)).reshape(-1),
        alone=alone,
        starts=starts,
        caps=np.array(caps, dtype=np.int64),
        compiled=use_jit(len(ids)),
    )


def _stretches(n: int, batch: int) -> list[tuple[int, int]]:
    """All full steps, then the partial one."""
    full = n // batch * batch
    return [(a, b) for a, b in ((0, full), (full, n)) if b > a]


def _inside(ids: I64, weight: I64, alone: NDArray[np.bool_], a: int, b: int, batch: int) -> I64:
    """Places a..b-1 ordered inside each step: long samples, then heaviest, then smallest id."""
    rows = -1 if b - a >= batch else 1
    by_id = np.argsort(ids[a:b].reshape(rows, min(batch, b - a)), axis=1, kind="stable")
    places = (np.arange(len(by_id), dtype=np.int64) * by_id.shape[1])[:, None] + by_id + a
    key = np.where(alone, -weight - (1 << 61), -weight)[places]
    heavy = np.argsort(key, axis=1, kind="stable")
    return np.take_along_axis(places, heavy, axis=1).reshape(-1)


def _least_packs(steps: _Steps) -> I64:
    """int64[S]: packs that each step needs at least."""
    dims = len(steps.caps)
    least = np.zeros(len(steps.starts) - 1, dtype=np.int64)
    for d, cap in enumerate(steps.caps.tolist()):
        values = np.where(steps.alone, 0, steps.need[d::dims])
        volume = -(-steps.sums(values) // max(1, cap))
        large = steps.sums((2 * values > cap).astype(np.int64))
        least = np.maximum(least, np.maximum(volume, large))
    return least + steps.sums(steps.alone.astype(np.int64))


def _fill(steps: _Steps, least: int, spec: PlanSpec) -> tuple[int, I64]:
    """(packs a step, pack in its step of every sample)."""
    fixed = spec.packs_per_step
    packs = least if fixed is None else fixed
    while True:
        pack_of, most = _try(steps, packs)
        if most <= packs:
            return packs, pack_of
        if fixed is not None:
            raise PlanError(
                f"packs_per_step is {fixed}, but a step needs {counted(most, 'packs')}",
                hint="raise it, or leave it out",
            )
        packs = _round_up(most, spec.packs_multiple)


def _try(steps: _Steps, packs: int) -> tuple[I64, int]:
    """Pack of every sample with `packs` packs a step, and the packs that the neediest step took."""
    out = np.full(len(steps.ids), -1, dtype=np.int64)
    held = np.minimum(packs, steps.sizes)
    fits = np.ones(len(held), dtype=np.bool_)

    def run(function: Any, *args: Any) -> None:
        (function if steps.compiled else function.plain)(*args)

    tail = (steps.alone, steps.starts, held)
    run(spread, steps.weight, steps.need, *tail, _groups(steps, held), steps.caps, out, fits)
    most = int(held.max())
    if not fits.all():
        # Tight steps: even by tokens, which the cap is about; then as few packs as best fit takes.
        left = ~fits
        retry = left.copy()
        run(spread, np.maximum(steps.tokens, 1), steps.need, *tail, held, steps.caps, out, retry)
        again = np.flatnonzero(left & ~retry)
        opened = np.zeros(len(held), dtype=np.int64)
        if len(again):
            run(_best_fit, steps.need, steps.alone, steps.starts, again, steps.caps, out, opened)
        most = max(most, int(opened.max()))
    if most <= packs:
        run(_fill_empty, steps.weight, steps.starts, held, out)
    return out, most


def _groups(steps: _Steps, held: I64) -> I64:
    """int64[S]: the most groups of packs for which no sample weighs more than a group's share."""
    heaviest = np.maximum.reduceat(steps.weight, steps.starts[:-1])
    total = steps.sums(steps.weight)
    out = np.ones(len(held), dtype=np.int64)
    for packs in np.unique(held).tolist():
        mine = held == packs
        for groups in divisors(packs):
            enough = mine & (heaviest <= total // groups)
            out[enough] = groups
    return out


def _materialise(steps: _Steps, pack_of: I64, packs: int, n: int) -> Csr:
    """Canonical inside each step: the samples of a step are numbered by id, its packs by their first."""
    step = np.repeat(np.arange(len(steps.sizes), dtype=np.int64), steps.sizes)
    batch = int(steps.sizes[0])
    order = np.concatenate(
        [
            _inside(steps.ids, np.zeros_like(steps.ids), np.zeros(len(steps.ids), np.bool_), a, b, batch)
            for a, b in _stretches(len(steps.ids), batch)
        ]
    )
    csr = from_bins((step * packs + pack_of)[order])
    return Csr(csr.offsets, steps.ids[order][csr.indices].astype(index_dtype(n)))


def _round_up(value: int, multiple: int) -> int:
    return -(-max(1, value) // multiple) * multiple
