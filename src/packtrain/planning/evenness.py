"""How even the steps of samples of a plan are over ranks, and what to say where they are not."""

from __future__ import annotations

import logging

import numpy as np

from ..errors import counted
from ..packers._jit import use_jit
from .align import packs_per_step, step_packs
from .balance import deal, rank_totals
from .raw_plan import RawPlan

__all__ = ["UNEVEN", "report_steps", "step_evenness", "step_warnings"]

logger = logging.getLogger(__name__)

#: Above this max / mean over ranks a plan by steps of samples is reported as uneven.
UNEVEN = 1.05


def step_evenness(plan: RawPlan, world_size: int, limit: int = 1 << 18) -> float:
    """Predicted time of the slowest rank over the mean rank, over the full steps of `limit` packs or so."""
    full = len(plan.indices) // (plan.spec.samples_per_step or 1)
    steps = min(full or 1, max(1, limit // packs_per_step(plan)))
    _, costs = step_packs(plan, np.arange(steps, dtype=np.int64))
    totals = rank_totals(costs, deal(costs, world_size, use_jit(len(plan.indices))), world_size)
    return float(totals.max(axis=1).sum()) * world_size / float(costs.sum())


def report_steps(plan: RawPlan) -> None:
    """Log `step_warnings` of a new plan for as many ranks as `packs_multiple`."""
    for warning in step_warnings(plan, plan.spec.packs_multiple):
        logger.warning("%s", warning)


def step_warnings(plan: RawPlan, ranks: int) -> list[str]:
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
            f"samples_per_step={batch} is small for {counted(ranks, 'ranks')}: "
            f"the slowest takes {uneven:.2f} times the "
            f"mean; up to {counted(able, 'ranks')} are even; use "
            f"samples_per_step >= {batch * -(-ranks // able)} for more"
        )
    places = plan.step_count * packs_per_step(plan)
    if fillers := places - len(plan):
        found.append(
            f"{fillers} of {places} places in the steps are fillers (one untrained token): steps of {batch} "
            f"samples, {counted(packs_per_step(plan), 'packs')}"
        )
    return found
