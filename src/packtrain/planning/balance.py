"""Balance: packs rearranged so that the ranks finish together.

`step` leaves the content of every optimizer step as it is: its packs are sorted by cost and cut into its
micro steps (`sync="micro"`), or dealt so that only the step totals of the ranks are equal
(`sync="step"`). With one micro step a step there is nothing to rearrange. `window` and `global` sort
beyond the step: ranks are more even, but packs of one kind come together and the samples per step spread
further. They are off by default and say what they do.

Everything is a pure function of (plan, settings, seed, epoch, step). `step` needs only the step itself;
`window` its 64 micro steps; `global` holds the order of all packs.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, PlanError, UnknownNameError
from ..files import digest_json
from ..packers._jit import use_jit
from .align import AlignedPlan
from .costs import FlopsCost, costs_of
from .deal import cut, deal
from .steps import Permutation, epoch_positions

__all__ = ["MODES", "WINDOW", "Balance", "BalancedPlan", "Balancer", "balance"]

logger = logging.getLogger(__name__)
I64 = NDArray[np.int64]

MODES = ("step", "window", "global")
SYNCS = ("micro", "step")

#: Micro steps that `window` sorts together.
WINDOW = 64

_CHUNK = 1 << 18  # places computed at a time


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
        try:
            accum = 0 if isinstance(self.grad_accum, bool) else operator.index(self.grad_accum)
        except TypeError:
            accum = 0
        if accum < 1:
            raise InputError(f"grad_accum is {self.grad_accum!r}, expected an integer >= 1")
        if self.mode not in MODES:
            raise UnknownNameError("balance mode", str(self.mode), MODES)
        if self.sync not in SYNCS:
            raise UnknownNameError("sync", str(self.sync), SYNCS)
        if self.mode != "step" and (self.sync != "micro" or self.even is not None):
            raise InputError(
                f"sync={self.sync!r} and even={self.even!r} have no effect in mode {self.mode!r}",
                hint="use mode='step'",
            )
        if self.sync == "step" and self.even is not None:
            raise InputError("even has no effect with sync='step'", hint="use sync='micro'")


class Balancer:
    """The balanced order of any steps of any epoch.

    Attributes:
        steps: optimizer steps of an epoch; the last may have fewer micro steps.
        width: places of a step, world size x grad_accum.
    """

    def __init__(self, aligned: AlignedPlan, settings: Balance) -> None:
        if isinstance(aligned, BalancedPlan):
            raise InputError("the plan is balanced already", hint="balance plan.align(world_size)")
        self.aligned = aligned
        self.settings = settings
        self.costs, self.cost_name = costs_of(aligned.plan, settings.cost)
        self.width = aligned.world_size * settings.grad_accum
        self.steps = -(-len(aligned) // self.width)
        self._compiled = use_jit(len(aligned.plan.indices))
        self._first = None if settings.even is None else self._has(settings.even)
        self._whole: tuple[Any, I64] = (None, np.zeros(0, dtype=np.int64))
        if aligned.block > 1:
            self._check_block(aligned.block)

    def _check_block(self, block: int) -> None:
        if self.settings.mode != "step":
            raise PlanError(
                f"mode {self.settings.mode!r} would mix the samples of the steps this plan was made by",
                hint="use mode='step'",
            )
        if block != self.width:
            raise PlanError(
                f"grad_accum is {self.settings.grad_accum}, but a step of this plan has {block} packs for "
                f"{self.aligned.world_size} ranks",
                hint=f"use grad_accum={block // self.aligned.world_size}",
            )

    def _has(self, name: str) -> NDArray[np.bool_]:
        if name not in self.aligned.plan.pack_costs:
            raise UnknownNameError("cost of the plan", name, list(self.aligned.plan.pack_costs))
        return np.asarray(self.aligned.plan.pack_costs[name]) > 0

    def positions(self, start: int, stop: int, seed: int | None, epoch: int) -> I64:
        """Aligned positions of steps start..stop-1 in the order they are consumed (int64, flat)."""
        stop = min(stop, self.steps)
        if self.settings.mode == "step":
            return self._by_step(start, stop, seed, epoch)
        key = (seed, epoch)
        if self._whole[0] != key:
            self._whole = (key, self._sorted_runs(seed, epoch))
        return self._whole[1][start * self.width : stop * self.width]

    def _order(self, places: I64, seed: int | None, epoch: int) -> I64:
        return epoch_positions(self.aligned, places, seed or 0, epoch, shuffle=seed is not None)

    def cost_at(self, positions: I64) -> I64:
        """Cost of the packs at aligned positions; 0 for fillers."""
        packs = self.aligned.pack_ids_at(positions)
        return np.where(packs < 0, 0, self.costs[packs])

    def _by_step(self, start: int, stop: int, seed: int | None, epoch: int) -> I64:
        places = np.arange(start * self.width, min(stop * self.width, len(self.aligned)), dtype=np.int64)
        positions = self._order(places, seed, epoch)
        if self.settings.grad_accum == 1:
            return positions
        full = len(positions) // self.width * self.width
        parts = [self._arranged(positions[:full].reshape(-1, self.width))] if full else []
        if full < len(positions):
            parts.append(self._arranged(positions[full:][None, :]))
        return np.concatenate(parts) if parts else positions

    def _arranged(self, positions: I64) -> I64:
        costs = self.cost_at(positions.reshape(-1)).reshape(positions.shape)
        ranks = self.aligned.world_size
        if self.settings.sync == "step":
            order = deal(costs, ranks, self._compiled)
        else:
            first = None
            if self._first is not None:
                packs = self.aligned.pack_ids_at(positions.reshape(-1))
                first = np.where(packs < 0, False, self._first[packs]).reshape(positions.shape)
            order = cut(costs, ranks, first)
        return np.take_along_axis(positions, order, axis=1).reshape(-1)

    def _sorted_runs(self, seed: int | None, epoch: int) -> I64:
        """Sorted by cost inside each window (or all), cut into runs of one micro step, runs shuffled."""
        ranks = self.aligned.world_size
        size = len(self.aligned) if self.settings.mode == "global" else WINDOW * ranks
        out = np.empty(len(self.aligned), dtype=np.int64)
        for number, start in enumerate(range(0, len(out), size)):
            stop = min(len(out), start + size)
            positions = self._order(np.arange(start, stop, dtype=np.int64), seed, epoch)
            down = np.argsort(-self.cost_at(positions), kind="stable")
            runs = positions[down].reshape(-1, ranks)
            mixed = Permutation(len(runs), (seed or 0) + (number << 64), epoch)
            out[start:stop] = runs[mixed.map(np.arange(len(runs), dtype=np.int64))].reshape(-1)
        return out

    def samples_per_step(self, seed: int | None, epoch: int, *, balanced: bool = True) -> I64:
        """Samples of every full optimizer step (all steps, when none is full)."""
        sizes = np.append(np.diff(np.asarray(self.aligned.plan.offsets)), 0)  # -1, a filler, holds none
        places = np.arange(len(self.aligned), dtype=np.int64)
        order = self.positions(0, self.steps, seed, epoch) if balanced else self._order(places, seed, epoch)
        held = sizes[self.aligned.pack_ids_at(order)]
        full = len(held) // self.width * self.width
        found: I64 = held[:full].reshape(-1, self.width).sum(axis=1) if full else held.sum(keepdims=True)
        return found

    def warn_of_effect(self, seed: int | None, epoch: int) -> None:
        """Say what `window` and `global` do to the samples per step."""
        if self.settings.mode == "step":
            return
        before, after = (self.samples_per_step(seed, epoch, balanced=b) for b in (False, True))
        logger.warning(
            "balance mode %r moves packs between steps: samples per step %.1f (sd %.1f) become "
            "%.1f (sd %.1f)",
            self.settings.mode, before.mean(), before.std(), after.mean(), after.std(),
        )  # fmt: skip


class BalancedPlan(AlignedPlan):
    """An aligned plan in the balanced order of one epoch: position m*W + r belongs to rank r at micro step m.

    Attributes:
        base: the aligned plan it was made from.
        settings: Balance.
        seed, epoch: of the epoch order; seed None = plan order.
    """

    __slots__ = ("_balancer", "_cached", "base", "epoch", "seed", "settings")

    def __init__(self, base: AlignedPlan, settings: Balance, seed: int | None, epoch: int) -> None:
        super().__init__(base.plan, base.world_size, base.drop_last)
        self._length = len(base)
        self.base = base
        self.settings = settings
        self.seed, self.epoch = seed, epoch
        self._balancer = Balancer(base, settings)
        self._cached: tuple[int, I64] = (-1, np.zeros(0, dtype=np.int64))

    def base_positions(self, start: int = 0, stop: int | None = None) -> I64:
        """Positions in `base` of optimizer steps start..stop-1, in this plan's order."""
        return self._balancer.positions(
            start, self._balancer.steps if stop is None else stop, self.seed, self.epoch
        )

    def pack_id(self, position: int) -> int:
        index = operator.index(position)
        if not -len(self) <= index < len(self):
            raise IndexError(f"position {index} of {len(self)} aligned packs")
        step, place = divmod(index % len(self), self._balancer.width)
        if self._cached[0] != step:
            self._cached = (step, self.base.pack_ids_at(self.base_positions(step, step + 1)))
        return int(self._cached[1][place])

    def pack_ids_at(self, positions: I64) -> I64:
        found: I64 = self.pack_ids[positions]
        return found

    @property
    def pack_ids(self) -> I64:
        at_once = max(1, _CHUNK // self._balancer.width)
        parts = [
            self.base.pack_ids_at(self.base_positions(s, s + at_once))
            for s in range(0, self._balancer.steps, at_once)
        ]
        return np.concatenate(parts)

    @property
    def block(self) -> int:
        return 1

    @property
    def shuffled(self) -> int:
        """0: the order is that of the epoch already."""
        return 0

    @property
    def kept(self) -> int:
        return self.base.kept

    @property
    def repeated(self) -> I64:
        return np.flatnonzero(self.base_positions() >= self.base.kept)

    @property
    def fillers(self) -> I64:
        return np.flatnonzero(self.pack_ids < 0)

    @property
    def dropped(self) -> I64:
        return self.base.dropped

    @property
    def checksum(self) -> str:
        """SHA-256 (hex) over (aligned checksum, grad_accum, cost, mode, seed, epoch) and further settings."""
        made = {
            "aligned": self.base.checksum,
            "grad_accum": self.settings.grad_accum,
            "cost": self._balancer.cost_name,
            "mode": self.settings.mode,
            "seed": self.seed,
            "epoch": self.epoch,
        }
        further = {"sync": (self.settings.sync, "micro"), "even": (self.settings.even, None)}
        return digest_json({**made, **{k: v for k, (v, default) in further.items() if v != default}})


def balance(aligned: AlignedPlan, settings: Balance, seed: int | None = None, epoch: int = 0) -> BalancedPlan:
    """See `AlignedPlan.balance`."""
    if (seed is not None and seed < 0) or epoch < 0:
        raise InputError(f"seed {seed} and epoch {epoch} must be >= 0")
    made = BalancedPlan(aligned, settings, seed, epoch)
    made._balancer.warn_of_effect(seed, epoch)
    return made
