"""The view of a plan made by steps of samples: every step has K positions, K a multiple of the world size.

Position s*K + m*W + r is the pack that rank r takes at micro step m of step s. Inside a step the packs
are dealt so that all ranks get the same predicted time (`planning.deal`); a step with fewer samples than
packs ends in fillers (pack id -1). Computed step by step, nothing is stored.
"""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..packers._jit import use_jit
from .align import AlignedPlan
from .costs import FlopsCost
from .deal import deal, rank_totals

if TYPE_CHECKING:
    from .packplan import PackPlan

__all__ = ["UNEVEN", "StepAlignedPlan", "report_steps", "step_evenness", "step_packs", "step_warnings"]

logger = logging.getLogger(__name__)
I64 = NDArray[np.int64]

#: Above this max / mean over ranks a plan by steps of samples is reported as uneven.
UNEVEN = 1.05

_CHUNK = 1 << 20  # packs dealt at a time


class StepAlignedPlan(AlignedPlan):
    """Aligned positions of a plan by steps; what differs from `AlignedPlan` is the order and the fillers."""

    __slots__ = ("_cached", "_steps")

    def __init__(self, plan: PackPlan, world_size: int, drop_last: bool) -> None:
        super().__init__(plan, world_size, drop_last)
        packs = packs_per_step(plan)
        if packs % world_size:
            able = [w for w in range(1, packs + 1) if packs % w == 0]
            raise PlanError(
                f"every step of this plan has {packs} packs, which {world_size} ranks cannot share",
                hint=f"world sizes that work: {', '.join(map(str, able))}; or plan with "
                f"packs_multiple={world_size}",
            )
        full = len(plan.indices) // (plan.spec.samples_per_step or 1)
        self._steps = full if drop_last else plan.step_count
        if self._steps == 0:
            raise PlanError("dropping the partial step leaves none", hint="use drop_last=False")
        self._length = self._steps * packs
        self._cached: tuple[int, I64] = (-1, np.zeros(0, dtype=np.int64))

    @property
    def block(self) -> int:
        """Positions of a step."""
        return packs_per_step(self.plan)

    @property
    def shuffled(self) -> int:
        """Full steps; a partial one stays at the end of every epoch."""
        return min(self._steps, len(self.plan.indices) // (self.plan.spec.samples_per_step or 1))

    @property
    def grad_accum(self) -> int:
        """Micro steps of a step: packs per step / world size."""
        return self.block // self.world_size

    def pack_id(self, position: int) -> int:
        """Raw pack id at an aligned position; -1 for a filler."""
        index = operator.index(position)
        if not -len(self) <= index < len(self):
            raise IndexError(f"position {index} of {len(self)} aligned packs")
        step, place = divmod(index % len(self), self.block)
        if self._cached[0] != step:
            self._cached = (step, self._dealt(np.array([step]))[0])
        return int(self._cached[1][place])

    def __getitem__(self, position: int) -> I64:
        pack = self.pack_id(position)
        return np.zeros(0, dtype=np.int64) if pack < 0 else self.plan[pack]

    @property
    def pack_ids(self) -> I64:
        at_once = max(1, _CHUNK // self.block)
        steps = np.arange(self._steps, dtype=np.int64)
        return np.concatenate(
            [self._dealt(steps[s : s + at_once]).reshape(-1) for s in range(0, self._steps, at_once)]
        )

    def pack_ids_at(self, positions: I64) -> I64:
        steps, which = np.unique(positions // self.block, return_inverse=True)
        return self._dealt(steps)[which.reshape(-1), positions % self.block]

    @property
    def kept(self) -> int:
        return len(self)

    @property
    def fillers(self) -> I64:
        return np.flatnonzero(self.pack_ids < 0)

    @property
    def dropped(self) -> I64:
        first = self._steps * min(self.block, self.plan.spec.samples_per_step or 1)
        return np.arange(min(first, len(self.plan)), len(self.plan), dtype=np.int64)

    def _dealt(self, steps: I64) -> I64:
        """int64[S, K]: pack ids of the named steps in the order of their positions."""
        packs, costs = step_packs(self.plan, steps)
        order = deal(costs, self.world_size, use_jit(len(self.plan.indices)))
        return np.take_along_axis(packs, order, axis=1)


def packs_per_step(plan: PackPlan) -> int:
    packs = plan.spec.packs_per_step
    if plan.spec.samples_per_step is None or packs is None:
        raise PlanError("the plan was not made by steps of samples", hint="plan with samples_per_step")
    return packs


def step_packs(plan: PackPlan, steps: I64) -> tuple[I64, I64]:
    """(pack ids, predicted cost) of the named steps, int64[S, K]; fillers have id -1 and cost 0."""
    packs = packs_per_step(plan)
    real = min(packs, plan.spec.samples_per_step or 1)
    ids = np.full((len(steps), packs), -1, dtype=np.int64)
    held = steps[:, None] * real + np.arange(real, dtype=np.int64)
    ids[:, :real] = np.where(held < len(plan), held, -1)
    patches = plan.pack_costs.get("patches")
    cost = FlopsCost().of(
        np.asarray(plan.pack_tokens[ids]),
        np.asarray(plan.pack_sq[ids]),
        None if patches is None else np.asarray(patches[ids]),
    )
    return ids, np.where(ids < 0, 0, cost)


def step_evenness(plan: PackPlan, world_size: int, limit: int = 1 << 18) -> float:
    """Predicted time of the slowest rank over the mean rank, over the full steps of `limit` packs or so."""
    full = len(plan.indices) // (plan.spec.samples_per_step or 1)
    steps = min(full or 1, max(1, limit // packs_per_step(plan)))
    _, costs = step_packs(plan, np.arange(steps, dtype=np.int64))
    totals = rank_totals(costs, deal(costs, world_size, use_jit(len(plan.indices))), world_size)
    return float(totals.max(axis=1).sum()) * world_size / float(costs.sum())


def report_steps(plan: PackPlan) -> None:
    """Log `step_warnings` of a new plan for as many ranks as `packs_multiple`."""
    for warning in step_warnings(plan, plan.spec.packs_multiple):
        logger.warning("%s", warning)


def step_warnings(plan: PackPlan, ranks: int) -> list[str]:
    """What to say when the steps of a plan are too small for `ranks` ranks, with the figures."""
    batch = plan.spec.samples_per_step
    if batch is None or len(plan) == 0:
        return []
    found: list[str] = []
    uneven = step_evenness(plan, ranks) if ranks > 1 else 1.0
    if uneven > UNEVEN:
        able = max(
            (w for w in range(1, ranks) if ranks % w == 0 and step_evenness(plan, w, 1 << 14) <= UNEVEN),
            default=1,
        )
        found.append(
            f"samples_per_step={batch} is small for {ranks} ranks: the slowest takes {uneven:.2f} times the "
            f"mean; up to {able} ranks are even; use samples_per_step >= {batch * -(-ranks // able)} for more"
        )
    places = plan.step_count * packs_per_step(plan)
    if fillers := places - len(plan):
        found.append(
            f"{fillers} of {places} places in the steps are fillers (one untrained token): steps of {batch} "
            f"samples, {packs_per_step(plan)} packs"
        )
    return found
