"""Packers of a token-budget stream: the interface of `WindowPacker`, other rules.

    ArrivalPacker    samples in the order they came, as trainers with dynamic batching do it: from a buffer,
                     whatever still fits the budget is taken in order; under a warm-up the budget grows
    FixedPacker      so many samples a batch, whatever their length
    WarmUpPacker     ArrivalPacker for the first batches, then a window packer

All are functions of what was pushed; `state_dict` holds numbers, no samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..planning.lengths import Lengths
from ..planning.raw_plan import PackerId
from ..planning.window import WindowPacker, WindowPacks

I64 = NDArray[np.int64]


class WarmUp:
    """The budget of batch b: from `first` to `full` tokens over `steps` batches, then `full`.

    >>> [WarmUp(1000, 10, 200).budget(b) for b in (0, 1, 10, 11)]
    [200, 280, 1000, 1000]
    """

    def __init__(self, full: int, steps: int = 0, first: int | None = None) -> None:
        self.full, self.steps, self.first = full, steps, full if first is None else first

    def budget(self, batch: int) -> int:
        if batch >= self.steps:
            return self.full
        return self.first + (self.full - self.first) * batch // self.steps


class ArrivalPacker:
    """Args:
    buffer: samples that are held before batches are made.
    warm_up: budget of each batch, in counted tokens.
    cap: hard cap of the tokens of a batch of several samples.
    counted: cost that the budget counts; None: tokens.
    """

    def __init__(self, buffer: int, warm_up: WarmUp, cap: int, counted: str | None = None) -> None:
        self.buffer, self.warm_up, self.cap, self.counted = buffer, warm_up, cap, counted
        self.batches = 0
        self._held: list[tuple[int, int, int]] = []  # id, tokens, counted tokens

    @property
    def waiting(self) -> I64:
        return np.array([row[0] for row in self._held], dtype=np.int64)

    def push(self, ids: I64, lengths: Lengths, *, last: bool = False) -> WindowPacks:
        self._held += _rows(ids, lengths, self.counted)
        batches: list[list[int]] = []
        while self._held and (last or len(self._held) >= self.buffer):
            batches.append(self._take())
        return _packs(batches, "arrival")

    def first_batches(self, ids: I64, lengths: Lengths) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
        """Batches while the warm-up lasts, and what is left over: (id, tokens, counted tokens)."""
        self._held += _rows(ids, lengths, self.counted)
        batches = []
        while self._held and self.batches < self.warm_up.steps:
            batches.append(self._take())
        rest, self._held = self._held, []
        return batches, rest

    def _take(self) -> list[int]:
        budget = self.warm_up.budget(self.batches)
        self.batches += 1
        taken: list[int] = []
        rest: list[tuple[int, int, int]] = []
        total = counted = 0
        for row in self._held:
            fits = total + row[1] <= self.cap and counted + row[2] <= budget
            if not taken or (fits and counted < budget):
                taken.append(row[0])
                total, counted = total + row[1], counted + row[2]
            else:
                rest.append(row)
        self._held = rest
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "ids": [row[0] for row in self._held],
            "tokens": [row[1] for row in self._held],
            "counted": [row[2] for row in self._held],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = int(state["batches"])
        self._held = list(zip(state["ids"], state["tokens"], state["counted"], strict=True))


class FixedPacker:
    """Args:
    samples: of a batch.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._held: list[tuple[int, int]] = []

    @property
    def waiting(self) -> I64:
        return np.array([row[0] for row in self._held], dtype=np.int64)

    def push(self, ids: I64, lengths: Lengths, *, last: bool = False) -> WindowPacks:
        self._held += list(zip(ids.tolist(), lengths.tokens.tolist(), strict=True))
        batches = []
        while len(self._held) >= self.samples or (last and self._held):
            batches.append([row[0] for row in self._held[: self.samples]])
            self._held = self._held[self.samples :]
        return _packs(batches, "fixed")

    def state_dict(self) -> dict[str, Any]:
        return {"ids": [row[0] for row in self._held], "tokens": [row[1] for row in self._held]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = list(zip(state["ids"], state["tokens"], strict=True))


class WarmUpPacker:
    """The first `warm_up.steps` batches in order of arrival, under their own budgets; then `after`."""

    def __init__(self, before: ArrivalPacker, after: WindowPacker) -> None:
        self.before, self.after = before, after

    @property
    def _is_warm(self) -> bool:
        return self.before.batches >= self.before.warm_up.steps

    @property
    def waiting(self) -> I64:
        return self.after.waiting if self._is_warm and not len(self.before.waiting) else self.before.waiting

    def push(self, ids: I64, lengths: Lengths, *, last: bool = False) -> WindowPacks:
        if self._is_warm and not len(self.before.waiting):
            return self.after.push(ids, lengths, last=last)
        made, rest = self.before.first_batches(ids, lengths)
        counted = self.before.counted
        further = Lengths([row[1] for row in rest], {counted: [row[2] for row in rest]} if counted else None)
        done = self.after.push(np.array([row[0] for row in rest], dtype=np.int64), further, last=last)
        warm = _packs(made, "arrival")
        offsets = np.concatenate([warm.offsets, done.offsets[1:] + len(warm.ids)])
        return WindowPacks(offsets, np.concatenate([warm.ids, done.ids]), done.left_out, done.packer)

    def state_dict(self) -> dict[str, Any]:
        before, after = self.before.state_dict(), self.after.state_dict()
        merged = {key: [*before[key], *after[key]] for key in ("ids", "tokens")}
        return {**merged, "before": before, "after": after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before.load_state_dict(state["before"])
        self.after.load_state_dict(state["after"])


def _rows(ids: I64, lengths: Lengths, counted: str | None) -> list[tuple[int, int, int]]:
    tokens = lengths.tokens.tolist()
    costs = tokens if counted is None else lengths.costs[counted].tolist()
    return list(zip(ids.tolist(), tokens, costs, strict=True))


def _packs(batches: list[list[int]], name: str) -> WindowPacks:
    ids = [i for batch in batches for i in sorted(batch)]
    if len(set(ids)) != len(ids):
        raise PlanError("a sample was put into two batches")
    sizes = [len(batch) for batch in batches]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64) if sizes else np.zeros(1, np.int64)
    return WindowPacks(offsets, np.array(ids, dtype=np.int64), {}, PackerId(name, 1, {}))
