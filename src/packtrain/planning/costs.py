"""What a pack costs, in integers: tokens, attention, or both as predicted time.

    flops = tokens + sum(length**2) / l_star + vision patches

fits measured step times: l_star is about 24,000 tokens for a model of 0.5 B and 36,000 for shapes of 7 B.
Costs are scaled by l_star, so that nothing is divided; only their ratios mean something.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError, UnknownNameError, counted
from .raw_plan import RawPlan

__all__ = ["COSTS", "L_STAR", "FlopsCost", "costs_of"]

I64 = NDArray[np.int64]

#: A sample of this many tokens takes twice the time of its tokens alone.
L_STAR = 24_000

COSTS = ("tokens", "attention", "flops")


@dataclass(frozen=True, slots=True)
class FlopsCost:
    """Calibrated predicted time, in units of one token.

    Attributes:
        l_star: length at which attention costs as much as everything else.
        patch: what a patch of the vision tower costs, in thousandths of a token.
    """

    l_star: int = L_STAR
    patch: int = 1000

    def __post_init__(self) -> None:
        if type(self.l_star) is not int or self.l_star < 1 or type(self.patch) is not int or self.patch < 0:
            raise PlanError(f"{self} is no cost", hint="l_star is an integer >= 1, patch an integer >= 0")

    def of(self, tokens: I64, squares: I64, patches: I64 | None) -> I64:
        """Cost x l_star of sums over packs (or of samples)."""
        cost = tokens * self.l_star + squares
        if patches is not None and self.patch:
            cost = cost + patches.astype(np.int64) * self.l_star * self.patch // 1000
        return cost

    def __str__(self) -> str:
        return "flops" if self == FlopsCost() else f"flops:{self.l_star}:{self.patch}"


def costs_of(plan: RawPlan, cost: str | FlopsCost | Any = "flops") -> tuple[I64, str]:
    """(int64[P] cost of every pack, its name for a checksum).

    Args:
        cost: `tokens`, `attention`, `flops`, a `FlopsCost`, or a number >= 0 for every pack.

    Raises:
        UnknownNameError, PlanError: no such cost, or the array does not fit the plan.
    """
    if isinstance(cost, str):
        if cost == "tokens":
            return np.asarray(plan.pack_tokens), cost
        if cost == "attention":
            return np.asarray(plan.pack_sq), cost
        if cost != "flops":
            raise UnknownNameError("cost", cost, COSTS)
        cost = FlopsCost()
    if isinstance(cost, FlopsCost):
        patches = plan.pack_costs.get("patches")
        return cost.of(np.asarray(plan.pack_tokens), np.asarray(plan.pack_sq), patches), str(cost)
    return _given(cost, len(plan))


def _given(cost: Any, packs: int) -> tuple[I64, str]:
    values = np.asarray(cost)
    if values.shape != (packs,) or values.dtype.kind not in "iuf":
        raise PlanError(
            f"cost has shape {values.shape} and type {values.dtype}, expected one number for each of "
            f"{counted(packs, 'packs')}",
            hint=f"or a name: {', '.join(COSTS)}",
        )
    if packs and not (np.isfinite(values).all() and values.min() >= 0):
        raise PlanError("cost holds a negative number or one that is not finite")
    if values.dtype.kind == "f":
        largest = float(values.max(initial=0.0)) or 1.0
        values = np.rint(values / largest * (1 << 40))
    made = values.astype(np.int64)
    if packs and int(made.max()) > 1 << 55:
        raise PlanError(f"cost holds {int(made.max())}, limit is 2**55", hint="scale it down")
    digest = hashlib.sha256(made.astype("<i8").tobytes()).hexdigest()
    return made, f"array:{digest}"
