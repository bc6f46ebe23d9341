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
from ..packers import auto, bfd
from ..packers._jit import DENSE_LIMIT, part_of, use_jit
from ._materialise import Csr, index_dtype, mix64
from .asking import pack_classes
from .lengths import Lengths, part_of_lengths
from .long_samples import classify
from .raw_plan import PackerId, sum_over_packs
from .spec import PlanSpec

I64 = NDArray[np.int64]

_FILL = (999, 1000)  # a pack below 99.9 % is carried
_SHARE = 2  # one pack in 2 at most
MAX_AGE = 16

#: Samples of a window that one kernel plans.
SMALL = 1 << 14
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
        self.spec = spec
        self.max_age = max_age
        self.windows = 0
        self._of_window: PlanSpec | None = None  # what a window without a seed is planned by
        self._empty()

    def _empty(self) -> None:
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
        self._carried = _take(joined, back) if len(back) else None
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
        from ..packers._kernels import bfd_groups
        from ._window_kernels import classes_of, finished_packs

        sizes, counts = classes_of(joined.tokens)
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
        return self.push(
            np.zeros(0, dtype=np.int64), Lengths([], dict.fromkeys(self._names(), ())), last=True
        )

    def _names(self) -> list[str]:
        return list(self._carried.costs) if self._carried is not None else list(self.spec.limits)

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
                np.arange(start, stop, dtype=np.int64), _slice(lengths, start, stop), last=stop == n
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
    if len(first) < 2 or bool((first[1:] > first[:-1]).all()):
        return csr
    order = np.argsort(first, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.diff(csr.offsets)[order])]).astype(np.int64)
    return Csr(offsets, _contents(csr, order))


def _contents(csr: Csr, packs: I64, ids: I64 | None = None) -> NDArray[Any]:
    """The contents of the named packs one after the other; through `ids` where given."""
    sizes = np.diff(csr.offsets)[packs]
    total = int(sizes.sum())
    if use_jit(len(csr.indices)):
        from . import _blocks

        out = np.empty(total, dtype=csr.indices.dtype if ids is None else ids.dtype)
        if ids is None:
            _blocks.move_packs(csr.offsets, csr.indices, packs, out)
        else:
            _blocks.copy_packs(csr.offsets, csr.indices, packs, ids, out)
        return out
    ends = np.cumsum(sizes)
    take = np.repeat(csr.offsets[packs] - (ends - sizes), sizes) + np.arange(total)
    held = csr.indices[take]
    return held if ids is None else ids[held]


def _slice(lengths: Lengths, start: int, stop: int) -> Lengths:
    return part_of_lengths(
        lengths.tokens[start:stop],
        {name: array[start:stop] for name, array in lengths.costs.items()},
        lengths.status[start:stop],
    )


def _take(lengths: Lengths, places: I64) -> Lengths:
    """Some samples, all of them ok."""
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
