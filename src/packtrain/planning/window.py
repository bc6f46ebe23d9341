"""Windowed planning with carry: for streams, and for corpora too large to plan at once.

Samples come in id order and are planned `window` at a time. Packs that are not full enough give their
samples back to the next window: under FILL, the emptiest first, at most SHARE of a window's packs, and no
pack with a sample that was carried MAX_AGE times already, so no sample waits for ever. The price against
one plan of everything is small: 0.03 % more packs at windows of 1000 on chat lengths (without carry 0.6 %).

`WindowPacker` knows nothing of what comes next, so a stream uses it as it is; `plan(window=…)` feeds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..extend import I64
from ..packers import auto, bfd
from ..packers._jit import DENSE_LIMIT, kernel, part_of, use_jit
from ..packers._kernels import bfd_groups
from ._blocks import move_packs
from ._materialise import Csr, index_dtype, mix64, pack_classes
from .lengths import Lengths, part_of_lengths
from .long_samples import classify
from .raw_plan import PackerId, sum_over_packs
from .spec import PlanSpec

_FILL = (999, 1000)  # a pack below 99.9 % is carried
_SHARE = 2  # one pack in 2 at most
MAX_AGE = 16

#: Samples of a window that one kernel plans; larger ones cost it more than the steps of a plan do.
SMALL = 1 << 11
_SMALL = PackerId("auto", auto.VERSION, {"chosen": f"bfd/{bfd.VERSION}"})


@dataclass(frozen=True, slots=True)
class WindowPacks:
    """Packs that are final: pack p holds the ids `ids[offsets[p]:offsets[p+1]]`, ascending.

    `left_out` holds ids that go to the ledger, with their reasons.
    """

    offsets: I64
    ids: I64
    left_out: dict[int, str]
    packer: PackerId


class WindowPacker:
    """Plans a stream window by window. `push` as samples come, `flush` at the end.

    Args:
        spec: the plan's spec; `spec.window` samples are planned together.
        max_age: windows a sample may be carried over.
    """

    #: Samples that windows of this process held. By half a million the compiled kernels (the same bytes) have
    #: earned their start of 1 s: a window of 256 costs 2.5 us a sample with them, 4.3 us without.
    seen = 0

    def __init__(self, spec: PlanSpec, *, max_age: int = MAX_AGE) -> None:
        if spec.window is None:
            raise PlanError("a WindowPacker needs spec.window", hint="for example window=1000")
        self.spec, self.max_age = spec, max_age
        self.windows = 0
        self._of_window: PlanSpec | None = None  # what a window without a seed is planned by
        self._ids: I64 = np.zeros(0, dtype=np.int64)
        self._age: I64 = np.zeros(0, dtype=np.int64)
        self._carried: Lengths | None = None

    @property
    def waiting(self) -> I64:
        """Ids of the samples that wait for the next window, ascending."""
        return self._ids

    def state_dict(self) -> dict[str, Any]:
        """What waits, as plain values: a stream is resumed from it."""
        held = self._carried
        return {
            "windows": self.windows,
            "ids": self._ids.tolist(),
            "age": self._age.tolist(),
            "tokens": held.tokens.tolist() if held else [],
            "costs": {name: array.tolist() for name, array in held.costs.items()} if held else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.windows = int(state["windows"])
        self._ids = np.array(state["ids"], dtype=np.int64)
        self._age = np.array(state["age"], dtype=np.int64)
        self._carried = Lengths(state["tokens"], state["costs"]) if len(self._ids) else None

    def push(self, ids: I64, lengths: Lengths, *, last: bool = False) -> WindowPacks:
        """Plan one window: the samples that wait, then `lengths` with their `ids`.

        Args:
            ids: int64[k], ascending and above all ids seen before.
            lengths: their lengths, costs and status.
            last: nothing follows, so nothing is carried.
        """
        if len(self._ids) and len(ids) and int(ids[0]) <= int(self._ids[-1]):
            raise PlanError(f"sample id {int(ids[0])} does not follow {int(self._ids[-1])}")
        all_ids = np.concatenate([self._ids, np.asarray(ids, dtype=np.int64)])
        joined = lengths if self._carried is None else _join(self._carried, lengths)
        age = np.concatenate([self._age, np.zeros(len(ids), dtype=np.int64)])
        WindowPacker.seen += len(ids)
        with part_of(WindowPacker.seen // 10):
            return self._pushed(all_ids, joined, age, last)

    def _pushed(self, all_ids: I64, joined: Lengths, age: I64, last: bool) -> WindowPacks:
        at_once = self._small(joined, age, last)
        if at_once is not None:
            offsets, final, back = at_once
            out = WindowPacks(offsets, all_ids[final], {}, _SMALL)
        else:
            out, back = self._in_steps(all_ids, joined, age, last)
        self._ids, self._age = all_ids[back], age[back] + 1
        self._carried = _part(joined, back) if len(back) else None
        self.windows += 1
        return out

    def _small(self, joined: Lengths, age: I64, last: bool) -> tuple[I64, I64, I64] | None:
        """(offsets, samples of final packs, samples to carry), where the kernels for small windows apply."""
        spec, n = self.spec, len(joined)
        bounded = spec.limits or spec.max_samples is not None or spec.multiple_of > 1 or spec.seed is not None
        if bounded or spec.packer != "auto" or not 0 < n <= SMALL or joined.costs or joined.status.any():
            return None
        fits = joined.max_tokens < spec.pack_length + (spec.long_rule == ">")
        if not fits or spec.pack_length > DENSE_LIMIT or not use_jit(n):
            return None
        sizes, counts = np.unique(joined.tokens, return_counts=True)
        sizes = sizes.astype(np.int64)
        groups = bfd_groups(sizes, counts, spec.pack_length)
        rules = (spec.pack_length, (_FILL[0] << 20) // _FILL[1], self.max_age, 0 if last else _SHARE)
        made: tuple[I64, I64, I64] = finished_packs(*groups, joined.tokens, age, sizes, counts, *rules)
        return made if len(made[0]) else None

    def _in_steps(
        self, all_ids: I64, joined: Lengths, age: I64, last: bool
    ) -> tuple[WindowPacks, NDArray[Any]]:
        """What is final, and the samples that are carried."""
        csr, packer, left_out = self._plan(joined)
        carry = np.zeros(len(csr.offsets) - 1, dtype=bool) if last else self._to_carry(csr, joined, age)
        sizes = np.diff(csr.offsets)
        back = np.sort(_contents(csr, np.flatnonzero(carry)).astype(np.int64), kind="stable")
        offsets = np.concatenate([[0], np.cumsum(sizes[~carry])]).astype(np.int64)
        out = WindowPacks(
            offsets,
            _contents(csr, np.flatnonzero(~carry), all_ids),
            {int(all_ids[i]): why for i, why in left_out.items()},
            packer,
        )
        return out, back

    def flush(self) -> WindowPacks:
        """Plan what waits; nothing is carried."""
        names = self.spec.limits if self._carried is None else self._carried.costs
        return self.push(np.zeros(0, dtype=np.int64), Lengths([], dict.fromkeys(names, ())), last=True)

    def _plan(self, lengths: Lengths) -> tuple[Csr, PackerId, dict[int, str]]:
        spec, seed = self._of_window, self.spec.seed
        if spec is None or seed is not None:
            seed = None if seed is None else mix64(seed ^ (self.windows << 1))
            spec = self._of_window = replace(self.spec, window=None, seed=seed)
        packed = pack_classes(classify(lengths, spec), lengths, spec)
        return packed.csr, packed.packer, dict(packed.ledger)

    def _to_carry(self, csr: Csr, lengths: Lengths, age: I64) -> NDArray[np.bool_]:
        """Which packs give their samples back."""
        n_packs = len(csr.offsets) - 1
        if n_packs == 0:
            return np.zeros(0, dtype=bool)
        m = self.spec.multiple_of
        tokens = lengths.tokens if m == 1 else -(-lengths.tokens.astype(np.int64) // m) * m
        # Parts per 2**20 of the fullest dimension; a pack at a limit is full however few tokens it has.
        fill = (sum_over_packs(tokens, csr.offsets, csr.indices)[0] << 20) // self.spec.pack_length
        for name, cap in self.spec.limits.items():
            held = sum_over_packs(lengths.costs[name], csr.offsets, csr.indices)[0]
            fill = np.maximum(fill, (held << 20) // max(1, cap))
        if self.spec.max_samples is not None:
            fill = np.maximum(fill, (np.diff(csr.offsets) << 20) // self.spec.max_samples)
        emptiest = np.flatnonzero(fill < (_FILL[0] << 20) // _FILL[1])
        oldest = np.maximum.reduceat(age[csr.indices], csr.offsets[:-1])
        emptiest = emptiest[oldest[emptiest] < self.max_age]
        emptiest = emptiest[np.argsort(fill[emptiest], kind="stable")][: -(-n_packs // _SHARE)]
        out = np.zeros(n_packs, dtype=bool)
        out[emptiest] = True
        return out


def plan_windows(lengths: Lengths, spec: PlanSpec) -> tuple[Csr, PackerId, dict[int, str]]:
    """All samples in windows: canonical packs, the packer, and what the packer left out."""
    n = len(lengths)
    packer = WindowPacker(spec)
    window = spec.window or max(1, n)
    offsets: list[I64] = []
    indices = np.empty(n, dtype=index_dtype(n))
    total = 0
    left_out: dict[int, str] = {}
    made: WindowPacks | None = None
    chosen: set[str] = set()
    with part_of(n):
        for start in range(0, max(1, n), window):
            stop = min(n, start + window)
            made = packer.push(
                np.arange(start, stop, dtype=np.int64), _part(lengths, slice(start, stop)), last=stop == n
            )
            indices[total : total + len(made.ids)] = made.ids
            offsets.append(made.offsets[1:] + total)
            total += len(made.ids)
            left_out.update({i: why for i, why in made.left_out.items() if why == "left_out"})
            chosen.add(str(made.packer.notes.get("chosen", made.packer.name)))
    assert made is not None  # there is always one window
    ends = np.concatenate([[0], *offsets]).astype(np.int64)
    name = PackerId(made.packer.name, made.packer.version, {"chosen": "+".join(sorted(chosen))})
    return _by_first_id(Csr(ends, indices[:total])), name, left_out


def _by_first_id(csr: Csr) -> Csr:
    """Packs ascending by smallest id (carried samples have smaller ids than their window)."""
    first = csr.indices[csr.offsets[:-1]]
    if bool((first[1:] > first[:-1]).all()):
        return csr
    order = np.argsort(first, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.diff(csr.offsets)[order])]).astype(np.int64)
    return Csr(offsets, _contents(csr, order))


def _contents(csr: Csr, packs: I64, ids: I64 | None = None) -> NDArray[Any]:
    """The contents of the named packs one after the other; through `ids` where given."""
    sizes = np.diff(csr.offsets)[packs]
    total = int(sizes.sum())
    if use_jit(len(csr.indices)):
        held = np.empty(total, dtype=csr.indices.dtype)
        move_packs(csr.offsets, csr.indices, packs, held)
    else:
        ends = np.cumsum(sizes)
        held = csr.indices[np.repeat(csr.offsets[packs] - (ends - sizes), sizes) + np.arange(total)]
    return held if ids is None else ids[held]


def _part(lengths: Lengths, places: I64 | slice) -> Lengths:
    """Some samples; their reasons are not taken along."""
    return part_of_lengths(
        lengths.tokens[places],
        {name: array[places] for name, array in lengths.costs.items()},
        lengths.status[places],
    )


def _join(first: Lengths, second: Lengths) -> Lengths:
    """`first` (all ok) followed by `second`."""
    return part_of_lengths(
        np.concatenate([first.tokens, second.tokens]),
        {name: np.concatenate([first.costs[name], second.costs[name]]) for name in first.costs},
        np.concatenate([first.status, second.status]),
    )


# --------------------------------------------------------------------------------------------
# A small window planned in two passes of compiled code: what the steps above do, with their bytes
# --------------------------------------------------------------------------------------------
# For windows of a stream, where a few hundred samples cost less than the steps between the kernels of a large
# plan: tokens are the only limit, every sample fits a pack, no seed. The packs are those of `bfd` where they
# meet the volume bound and are dealt in one round; else `finished_packs` says so, and only time is lost.
@kernel
def finished_packs(  # noqa: C901 - a kernel is compiled as one function
    repeat: Any, content: Any, node_size: Any, node_number: Any, node_parent: Any, tokens: Any, age: Any,
    sizes: Any, counts: Any, capacity: Any, least_fill: Any, max_age: Any, share: Any
) -> Any:  # fmt: skip  # pragma: no cover - compiled
    """(offsets, samples of the packs that are final, samples that are carried, ascending), int64.

    Args:
        repeat, content, node_size, node_number, node_parent: of `bfd_groups`.
        tokens, age: of the samples, in the order of their ids.
        sizes, counts: their classes.
        capacity: tokens of a pack.
        least_fill: parts per 2**20 of a pack from which on it is final.
        max_age: a pack with a sample of this age is final.
        share: one pack in so many is carried at most; 0 = none.

    Returns:
        Offsets are empty where the packs are not those of the plan: more than the volume bound, equal packs
        enough to be dealt in rounds, or patterns that break a law, which the steps of a plan will name.
    """
    n = len(tokens)
    none = np.empty(0, dtype=np.int64)
    groups = np.int64(0)
    packs = np.int64(0)
    for g in range(len(repeat)):
        if repeat[g] > 0:
            groups += 1
            packs += repeat[g]
    total = np.int64(0)
    for d in range(len(sizes)):
        total += sizes[d] * counts[d]
    if packs != (total + capacity - 1) // capacity or packs >= 4 * groups:
        return none, none, none

    # Every pack has its places in the classes, and every sample, in the order of ids, the next of its class.
    cursor = np.zeros(len(sizes) + 1, dtype=np.int64)
    for d in range(len(sizes)):
        cursor[d + 1] = cursor[d] + counts[d]
    begin = cursor.copy()
    slot = np.empty(n, dtype=np.int64)
    members = np.zeros(packs, dtype=np.int64)
    held = np.zeros(packs, dtype=np.int64)
    pack = np.int64(0)
    for g in range(len(repeat)):
        for _ in range(repeat[g]):
            node = content[g]
            while node >= 0:
                d = np.searchsorted(sizes, node_size[node])
                if d == len(sizes) or sizes[d] != node_size[node] or node_number[node] < 1:
                    return none, none, none
                first = cursor[d]
                if first + node_number[node] > begin[d + 1]:
                    return none, none, none
                for q in range(first, first + node_number[node]):
                    slot[q] = pack
                cursor[d] = first + node_number[node]
                members[pack] += node_number[node]
                held[pack] += node_number[node] * node_size[node]
                node = node_parent[node]
            if held[pack] > capacity or members[pack] == 0:
                return none, none, none
            pack += 1
    for d in range(len(sizes)):
        if cursor[d] != begin[d + 1]:
            return none, none, none

    # Packs are numbered as their first samples come.
    at = np.full(packs, -1, dtype=np.int64)  # where the next sample of a pack goes
    number = np.empty(packs, dtype=np.int64)
    offsets = np.zeros(packs + 1, dtype=np.int64)
    oldest = np.zeros(packs, dtype=np.int64)
    samples = np.empty(n, dtype=np.int64)
    opened = np.int64(0)
    for i in range(n):
        d = np.searchsorted(sizes, tokens[i])
        b = slot[begin[d]]
        begin[d] += 1
        if at[b] < 0:
            at[b] = offsets[opened]
            number[b] = opened
            opened += 1
            offsets[opened] = at[b] + members[b]
        samples[at[b]] = i
        at[b] += 1
        oldest[number[b]] = max(oldest[number[b]], age[i])

    # The emptiest are carried, by (fill, number).
    keys = np.empty(packs, dtype=np.int64)
    able = np.int64(0)
    for b in range(packs):
        fill = (held[b] << 20) // capacity
        if fill < least_fill and oldest[number[b]] < max_age:
            keys[able] = fill * packs + number[b]
            able += 1
    most = np.int64(0)
    if share > 0:
        most = min(able, (packs + share - 1) // share)
    keys = keys[:able].copy()  # no two are equal
    keys.sort()
    carried = np.zeros(packs, dtype=np.bool_)
    kept = n
    for k in range(most):
        p = keys[k] % packs
        carried[p] = True
        kept -= offsets[p + 1] - offsets[p]
    ends = np.zeros(packs - most + 1, dtype=np.int64)
    final = np.empty(kept, dtype=np.int64)
    back = np.empty(n - kept, dtype=np.int64)
    n_final = np.int64(0)
    n_back = np.int64(0)
    n_packs = np.int64(0)
    for p in range(packs):
        for q in range(offsets[p], offsets[p + 1]):
            if carried[p]:
                back[n_back] = samples[q]
                n_back += 1
            else:
                final[n_final] = samples[q]
                n_final += 1
        if not carried[p]:
            n_packs += 1
            ends[n_packs] = n_final
    back.sort()
    return ends, final, back
