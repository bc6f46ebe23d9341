"""Statistics of a plan as one flat dictionary, and how even its steps are over ranks.

Efficiency = real tokens / slots. A pack has pack_length slots; the pack of a single longer sample has as
many as the sample takes after rounding, so efficiency never exceeds 1.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError, counted
from ..packers._jit import use_jit
from .align import packs_per_step, step_packs
from .balance import deal, rank_totals
from .raw_plan import RawPlan

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# How even the steps of samples of a plan are over ranks, and what to say where they are not
# --------------------------------------------------------------------------------------------
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
            f"the slowest takes {uneven:.2f} times the mean; up to {counted(able, 'ranks')} are even; use "
            f"samples_per_step >= {batch * -(-ranks // able)} for more"
        )
    places = plan.step_count * packs_per_step(plan)
    if fillers := places - len(plan):
        found.append(
            f"{fillers} of {places} places in the steps are fillers (one untrained token): steps of {batch} "
            f"samples, {counted(packs_per_step(plan), 'packs')}"
        )
    return found


# --------------------------------------------------------------------------------------------
# Statistics of a plan as one flat dictionary, and how even its steps are over ranks
# --------------------------------------------------------------------------------------------
#: The cost of lengths that numbers the source of each sample; not one to limit.
SOURCE = "source"


def plan_stats(plan: RawPlan) -> dict[str, Any]:
    """Keys: packs samples read tokens slots padding efficiency samples_per_pack samples_per_pack_max
    tokens_per_pack_min fill_min longest_pack over_long_packs (those of more than pack_length tokens: one long
    sample each) length_order_correlation dropped dropped_by_reason long_samples bound bound_name gap optimal
    packer; where the lengths have a cost `source` also those of `source_mixing`; for a plan by steps of
    samples also steps samples_per_step packs_per_step fillers step_imbalance (slowest over mean rank, with
    `packs_multiple` ranks).

    Raises:
        FormatError: a stored plan was edited: its offsets do not ascend.
    """
    packs, samples = len(plan), len(plan.indices)
    tokens = int(plan.pack_tokens.sum())
    per_pack = np.diff(plan.offsets)
    if packs and per_pack.min() < 1:
        raise FormatError("the offsets of a plan do not ascend: they were edited", hint="make the plan again")
    smallest = int(plan.pack_tokens.min()) if packs else 0
    certificate = plan.certificate
    made = {
        "packs": packs,
        "samples": samples,
        "read": samples + len(plan.ledger),
        "tokens": tokens,
        "slots": plan.slots,
        "padding": plan.slots - tokens,
        "efficiency": tokens / plan.slots if plan.slots else 0.0,
        "samples_per_pack": samples / packs if packs else 0.0,
        "samples_per_pack_max": int(per_pack.max()) if packs else 0,
        "tokens_per_pack_min": smallest,
        "fill_min": smallest / plan.spec.pack_length,
        "longest_pack": int(plan.pack_tokens.max()) if packs else 0,
        "over_long_packs": int(np.count_nonzero(plan.pack_tokens > plan.spec.pack_length)),
        "length_order_correlation": _order_correlation(plan),
        "dropped": len(plan.ledger),
        "dropped_by_reason": plan.ledger.counts(),
        "long_samples": plan.long_samples,
        "bound": certificate.bound,
        "bound_name": certificate.name,
        "gap": certificate.gap,
        "optimal": certificate.optimal,
        "packer": str(plan.packer),
    }
    made.update(plan.sums.mixing)
    if plan.spec.samples_per_step is not None:
        made.update(_step_stats(plan))
    return made


def _step_stats(plan: RawPlan) -> dict[str, Any]:
    each = packs_per_step(plan)
    return {
        "steps": plan.step_count,
        "samples_per_step": plan.spec.samples_per_step,
        "packs_per_step": each,
        "fillers": plan.step_count * each - len(plan),
        "step_imbalance": round(step_evenness(plan, plan.spec.packs_multiple), 6),
    }


def _order_correlation(plan: RawPlan) -> float:
    """Correlation of a pack's mean sample length with its place, -1..1; near 0 = no length order.

    Packs are compared in at most 1000 equal stretches. Sums are exact integers and the result is rounded
    to 4 places, so that it is the same on every machine.
    """
    packs = len(plan)
    stretches = min(packs, 1000)
    if stretches < 3:
        return 0.0
    cuts = np.arange(stretches, dtype=np.int64) * packs // stretches
    tokens = np.add.reduceat(plan.pack_tokens, cuts)
    samples = np.add.reduceat(np.diff(plan.offsets), cuts)
    mean = (tokens / samples).tolist()
    center, middle = math.fsum(mean) / stretches, (stretches - 1) / 2
    spread = math.fsum((x - center) ** 2 for x in mean) * math.fsum(
        (i - middle) ** 2 for i in range(stretches)
    )
    if spread == 0:
        return 0.0
    return round(math.fsum((x - center) * (i - middle) for i, x in enumerate(mean)) / math.sqrt(spread), 4)


def source_mixing(offsets: NDArray[Any], indices: NDArray[Any], groups: NDArray[Any]) -> dict[str, Any]:
    """How well packs mix sources, against chance; a packer never reads the source of a sample.

    Figures on packs p = indices[offsets[p]:offsets[p+1]] with the group number of each sample.

    Returns:
        `sources` in the plan; `sources_per_pack`, the mean; `sources_per_pack_at_random`, what the mean
        would be if packs of these sizes drew their samples at random; `mixed_packs`, the share of packs
        that hold at least two sources. Means are rounded to 4 places.
    """
    packs = len(offsets) - 1
    if packs == 0:
        return {"sources": 0, "sources_per_pack": 0.0, "sources_per_pack_at_random": 0.0, "mixed_packs": 0.0}
    sizes = np.diff(offsets)
    names, group = np.unique(groups[indices], return_inverse=True)
    pack = np.repeat(np.arange(packs, dtype=np.int64), sizes)
    held = np.unique(pack * len(names) + group) // len(names)
    distinct = np.bincount(held, minlength=packs)
    share = np.bincount(group, minlength=len(names)).tolist()
    widths, number = np.unique(sizes, return_counts=True)
    chance = math.fsum(
        count * math.fsum(1.0 - (1.0 - k / len(group)) ** width for k in share)
        for width, count in zip(widths.tolist(), number.tolist(), strict=True)
    )
    return {
        "sources": len(names),
        "sources_per_pack": round(int(distinct.sum()) / packs, 4),
        "sources_per_pack_at_random": round(chance / packs, 4),
        "mixed_packs": round(int((distinct > 1).sum()) / packs, 4),
    }
