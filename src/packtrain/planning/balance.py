"""Balance: packs rearranged so that the ranks finish together.

`step` leaves the content of every optimizer step as it is: its packs are sorted by cost and cut into its
micro steps (`sync="micro"`), or dealt so that only the step totals of the ranks are equal
(`sync="step"`). With one micro step a step there is nothing to rearrange. `window` and `global` sort
beyond the step: ranks are more even, but packs of one kind come together and the samples per step spread
further. They are off by default and say what they do.

`Balance` holds the settings, `deal` and `cut` arrange the costs of steps; `order.EpochOrder` applies them to
the packs of an epoch. Integers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import one_of, whole
from ..extend import I64
from ..packers._jit import kernel
from .costs import FlopsCost
from .spec import without_effect

#: Micro steps that `window` sorts together.
WINDOW = 64

#: `deal` stops swapping when the largest total is within 1/1024 of the mean, or after so many swaps a rank.
_SWAPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How packs are rearranged.

    Attributes:
        grad_accum: micro steps per optimizer step.
        cost: see `costs.costs_of`.
        mode: step, window or global.
        sync: `micro`: ranks wait for each other at every micro step; `step`: once a step.
        even: name of a cost, such as `images`: packs that have some come together, so that of the micro steps
            of a step at most one has ranks with and ranks without it.
    """

    grad_accum: int
    cost: str | FlopsCost | Any = "flops"
    mode: str = "step"
    sync: str = "micro"
    even: str | None = None

    def __post_init__(self) -> None:
        whole("grad_accum", self.grad_accum, 1)
        one_of("balance mode", self.mode, ("step", "window", "global"))
        one_of("sync", self.sync, ("micro", "step"))
        if self.mode != "step":
            without_effect(self, "sync", "micro", f"in mode {self.mode!r}")
            without_effect(self, "even", None, f"in mode {self.mode!r}")
        if self.sync == "step":
            without_effect(self, "even", None, "with sync='step'")


def cut(costs: I64, world_size: int, first: NDArray[np.bool_] | None = None) -> I64:
    """Order of the packs of each step: sorted by cost and cut into micro steps.

    Args:
        costs: int64[S, K], K = micro steps x world_size.
        world_size: packs of a micro step.
        first: bool[S, K], packs that come before all others (so that a kind stays together), or None.

    Returns:
        int64[S, K]: entry m*W + r is the place in 0..K-1 of the pack of rank r at micro step m.
    """
    steps, packs = costs.shape
    order = np.argsort(-costs, axis=1, kind="stable")
    if first is not None:
        ahead = np.take_along_axis(first, order, axis=1)
        order = np.take_along_axis(order, np.argsort(~ahead, axis=1, kind="stable"), axis=1)
    sorted_costs = np.take_along_axis(costs, order, axis=1)
    out = np.empty_like(order)
    totals = np.zeros((steps, world_size), dtype=np.int64)
    for start in range(0, packs, world_size):
        part = slice(start, start + world_size)
        # The chunk is not sorted by cost where kinds meet.
        down = np.argsort(-sorted_costs[:, part], axis=1, kind="stable")
        ranks = np.argsort(totals, axis=1, kind="stable")
        np.put_along_axis(out[:, part], ranks, np.take_along_axis(order[:, part], down, axis=1), axis=1)
        given = np.take_along_axis(sorted_costs[:, part], down, axis=1)
        held = np.take_along_axis(totals, ranks, axis=1) + given
        np.put_along_axis(totals, ranks, held, axis=1)
    return out


def deal(costs: I64, world_size: int, compiled: bool) -> I64:
    """Order of the packs of each step in which the totals of the ranks are as equal as they can be made.

    Args and result as of `cut`; each rank's packs come heaviest first.
    """
    steps, packs = costs.shape
    if packs == world_size or world_size == 1:
        return np.tile(np.arange(packs, dtype=np.int64), (steps, 1))
    out = cut(costs, world_size)
    run = _swap if compiled else _swap.plain
    run(np.ascontiguousarray(costs), out, world_size, _SWAPS * world_size)
    # Heaviest first on every rank: micro steps then hold packs of similar cost.
    held = np.take_along_axis(costs, out, axis=1).reshape(steps, -1, world_size)
    down = np.argsort(-held, axis=1, kind="stable")
    return np.take_along_axis(out.reshape(steps, -1, world_size), down, axis=1).reshape(steps, packs)


def rank_totals(costs: I64, order: I64, world_size: int) -> I64:
    """int64[S, W]: cost that each rank gets in a step under `order`."""
    held = np.take_along_axis(costs, order, axis=1).reshape(len(costs), -1, world_size)
    return held.sum(axis=1)  # type: ignore[no-any-return]


@kernel
def _swap(  # noqa: C901 - a kernel is compiled as one function
    costs: Any, order: Any, ranks: Any, limit: Any
) -> Any:
    """Swap packs between ranks, in place, while that lowers the largest total of the step."""
    steps, packs = costs.shape
    for s in range(steps):
        totals = np.zeros(ranks, dtype=np.int64)
        whole = np.int64(0)
        for k in range(packs):
            totals[k % ranks] += costs[s, order[s, k]]
            whole += costs[s, k]
        for _ in range(limit):
            top = 0
            for r in range(1, ranks):
                if totals[r] > totals[top]:
                    top = r
            most = totals[top]
            if most * ranks <= whole + (whole >> 10):
                break
            best, give, take = most, -1, -1
            for a in range(top, packs, ranks):
                mine = costs[s, order[s, a]]
                for b in range(packs):
                    r = b % ranks
                    gain = mine - costs[s, order[s, b]]
                    if r == top or gain <= 0 or totals[r] + gain >= best:
                        continue
                    after = max(most - gain, totals[r] + gain)
                    if after < best:
                        best, give, take = after, a, b
            if give < 0:
                break
            gain = costs[s, order[s, give]] - costs[s, order[s, take]]
            totals[top] -= gain
            totals[take % ranks] += gain
            kept = order[s, give]
            order[s, give] = order[s, take]
            order[s, take] = kept
    return 0
