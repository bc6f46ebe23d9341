"""AlignedPlan: a view of a plan for (world_size, drop_last). What training consumes, as positions.

Three kinds: positions of packs, positions of steps of samples, and positions of one balanced epoch. When each
comes is the matter of `order.EpochOrder`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..checks import divisors, whole
from ..errors import InputError, PlanError, counted
from ..extend import I64
from ..files import digest_json
from ..packers._jit import use_jit
from .balance import Balance, deal
from .costs import FlopsCost
from .epoch_order import EpochOrder, view_checksum
from .raw_plan import RawPlan

_LARGEST_WORLD = 1 << 24  # ranks; far above any machine, and low enough that positions stay 64-bit
_CHUNK = 1 << 18  # positions computed at a time


def align(plan: RawPlan, world_size: int, drop_last: bool = False, grad_accum: int = 1) -> AlignedPlan:
    """The view of `plan` in which every rank gets the same number of packs.

    Args:
        grad_accum: the number is a multiple of this too, so that an epoch ends with a whole optimizer step.

    Raises:
        PlanError: the plan is empty, dropping leaves no pack, or the plan was made by steps whose number of
            packs `world_size` does not divide (names the sizes that work).
    """
    size = whole("world_size", world_size, 1, _LARGEST_WORLD, error=PlanError)
    n = len(plan)
    if n == 0:
        raise PlanError("the plan holds no packs", hint="see plan.ledger.counts() for where the samples went")
    whole("grad_accum", grad_accum, 1, error=PlanError)
    if plan.spec.samples_per_step is not None:
        made = StepAlignedPlan(plan, size, bool(drop_last))
        if grad_accum not in (1, made.grad_accum):
            raise PlanError(
                f"grad_accum is {grad_accum}, a step of this "
                f"plan is {counted(made.grad_accum, 'micro steps')}",
                hint=f"leave it out, or use {made.grad_accum}",
            )
        return made
    if drop_last and n < size * grad_accum:
        raise PlanError(
            f"dropping the remainder of {counted(n, 'packs')} on {counted(size, 'ranks')} leaves none",
            hint="use drop_last=False, fewer ranks or less accumulation",
        )
    return AlignedPlan(plan, size, bool(drop_last), grad_accum)


class AlignedPlan:
    """A view of a plan for (world_size, drop_last): positions 0..len-1, each a raw pack. Immutable.

    drop: the first floor(N / W) * W packs. pad: packs are repeated cyclically from the start of the raw
    plan, for any N >= 1 and W. Nothing is stored besides N and W. With `multiple` micro steps in an
    optimizer step, W * multiple stands in the place of W.

    >>> import packtrain as pt
    >>> a = pt.plan([5, 5, 5], pack_length=5).align(world_size=8)
    >>> a.pack_ids.tolist(), a.repeated.tolist()
    ([0, 1, 2, 0, 1, 2, 0, 1], [3, 4, 5, 6, 7])
    """

    __slots__ = ("_length", "drop_last", "multiple", "plan", "world_size")

    #: Whether this is the order of one epoch already (`BalancedPlan`).
    is_balanced = False

    def __init__(self, plan: RawPlan, world_size: int, drop_last: bool, multiple: int = 1) -> None:
        self.plan: Any = plan  # a PackPlan, which stands above this file
        self.world_size, self.drop_last, self.multiple = world_size, drop_last, multiple
        n, group = len(plan), world_size * multiple
        self._length = (n if drop_last else n + group - 1) // group * group

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> I64:
        """Sample ids (int64[k], ascending) of the pack at an aligned position; none for a filler."""
        pack = self.pack_id(position)
        return np.zeros(0, dtype=np.int64) if pack < 0 else self.plan[pack]

    def __iter__(self) -> Iterator[I64]:
        return (self[position] for position in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} of "
            f"{counted(len(self.plan), 'packs')}, world_size={self.world_size}, drop_last={self.drop_last})"
        )

    def pack_id(self, position: int) -> int:
        """Raw pack id at an aligned position; -1 for a filler."""
        index = operator.index(position)
        if not -len(self) <= index < len(self):
            raise IndexError(f"position {index} of {len(self)} aligned packs")
        return self._pack_at(index % len(self))

    def _pack_at(self, place: int) -> int:
        return place % len(self.plan)

    def pack_ids_at(self, positions: I64) -> I64:
        """Raw pack ids at int64[k] positions; -1 for a filler."""
        return positions % len(self.plan)

    @property
    def pack_ids(self) -> I64:
        """int64[len]: raw pack id of every aligned position (computed, not stored)."""
        return np.arange(len(self), dtype=np.int64) % len(self.plan)

    @property
    def block(self) -> int:
        """Positions that stay together in the epoch order: 1, or those of a step of samples."""
        return 1

    @property
    def shuffled(self) -> int:
        """Blocks at the front that the epoch order permutes; what follows stays where it is."""
        return self.kept

    @property
    def kept(self) -> int:
        """Distinct packs in the view: positions 0..kept-1 hold packs 0..kept-1, the rest repeat."""
        return min(len(self), len(self.plan))

    @property
    def repeated(self) -> I64:
        """Positions that repeat a pack (int64, ascending)."""
        return np.arange(self.kept, len(self), dtype=np.int64)

    @property
    def fillers(self) -> I64:
        """Positions without a pack (pack id -1); only plans by steps of samples have some."""
        return np.zeros(0, dtype=np.int64)

    @property
    def dropped(self) -> I64:
        """Raw pack ids that are not in the view (int64, ascending)."""
        return np.arange(self.kept, len(self.plan), dtype=np.int64)

    @property
    def steps(self) -> int:
        """Micro steps of an epoch, equal on every rank."""
        return len(self) // self.world_size

    def balance(
        self,
        grad_accum: int,
        cost: Any = "flops",
        mode: str = "step",
        seed: int | None = None,
        epoch: int = 0,
        *,
        sync: str = "micro",
        even: str | None = None,
    ) -> BalancedPlan:
        """The packs of an epoch rearranged so that ranks finish together; see `planning.balance`.

        Args:
            grad_accum: micro steps per optimizer step.
            cost: `tokens`, `attention`, `flops`, a `FlopsCost`, or an array with a number for every raw pack.
            mode: `step` (the content of every step unchanged), `window` or `global`.
            seed, epoch: the epoch order that is balanced; None = plan order.
            sync: `micro`, ranks meet at every micro step; `step`, once a step.
            even: a cost such as `images` that should be on all ranks of a micro step or on none.

        Raises:
            InputError, PlanError: an argument cannot hold, or the plan's own steps have another width.
        """
        settings = Balance(grad_accum=grad_accum, cost=cost, mode=mode, sync=sync, even=even)
        whole("seed", seed or 0, 0)
        whole("epoch", epoch, 0)
        return BalancedPlan(self, settings, seed, epoch)

    @property
    def checksum(self) -> str:
        """SHA-256 (hex) over (plan checksum, world_size, drop_last), and `multiple` where it is not 1."""
        return view_checksum(self.plan, self.world_size, self.drop_last, self.multiple)

    def check_epoch(self, epoch: int) -> None:
        """Refuse an epoch whose order this is not."""


class _GroupedPlan(AlignedPlan):
    """A view whose packs are found a group of positions at a time, each an optimizer step.

    Attributes:
        together: positions of a group.
    """

    __slots__ = ("_held", "together")

    def __init__(self, plan: RawPlan, world_size: int, drop_last: bool, multiple: int = 1) -> None:
        super().__init__(plan, world_size, drop_last, multiple)
        self.together = world_size
        self._held: tuple[int, I64] = (-1, np.zeros(0, dtype=np.int64))

    def _from(self, first: int, count: int) -> I64:
        return self.pack_ids_at(np.arange(first, min(first + count, len(self)), dtype=np.int64))

    def _pack_at(self, place: int) -> int:
        number, place = divmod(place, self.together)
        if self._held[0] != number:
            self._held = (number, self._from(number * self.together, self.together))
        return int(self._held[1][place])

    @property
    def pack_ids(self) -> I64:
        size = -(-_CHUNK // self.together) * self.together
        return np.concatenate([self._from(first, size) for first in range(0, len(self), size)])

    @property
    def fillers(self) -> I64:
        return np.flatnonzero(self.pack_ids < 0)


class StepAlignedPlan(_GroupedPlan):
    """Positions of a plan by steps of samples: every step has K, K a multiple of the world size.

    Position s*K + m*W + r is the pack that rank r takes at micro step m of step s: the packs of a step are
    dealt so that all ranks get the same predicted time (`balance.deal`). A step with fewer samples than packs
    ends in fillers (pack id -1).
    """

    __slots__ = ("_steps",)

    def __init__(self, plan: RawPlan, world_size: int, drop_last: bool) -> None:
        super().__init__(plan, world_size, drop_last)
        packs = packs_per_step(plan)
        if packs % world_size:
            able = divisors(packs)
            raise PlanError(
                f"every step of this plan has {counted(packs, 'packs')}, "
                f"which {counted(world_size, 'ranks')} cannot share",
                hint=f"world sizes that work: {', '.join(map(str, able))}; or plan with "
                f"packs_multiple={world_size}",
            )
        self._steps = _full_steps(plan) if drop_last else plan.step_count
        if self._steps == 0:
            raise PlanError("dropping the partial step leaves none", hint="use drop_last=False")
        self._length, self.together = self._steps * packs, packs

    @property
    def block(self) -> int:
        """Positions of a step."""
        return self.together

    @property
    def shuffled(self) -> int:
        """Full steps; a partial one stays at the end of every epoch."""
        return min(self._steps, _full_steps(self.plan))

    @property
    def grad_accum(self) -> int:
        """Micro steps of a step: packs per step / world size."""
        return self.block // self.world_size

    def pack_ids_at(self, positions: I64) -> I64:
        steps, which = np.unique(positions // self.block, return_inverse=True)
        packs, costs = step_packs(self.plan, steps)
        order = deal(costs, self.world_size, use_jit(len(self.plan.indices)))
        return np.take_along_axis(packs, order, axis=1)[which.reshape(-1), positions % self.block]

    @property
    def kept(self) -> int:
        return len(self)

    @property
    def dropped(self) -> I64:
        first = self._steps * min(self.block, self.plan.spec.samples_per_step or 1)
        return np.arange(min(first, len(self.plan)), len(self.plan), dtype=np.int64)


class BalancedPlan(_GroupedPlan):
    """An aligned plan in the balanced order of one epoch: position m*W + r belongs to rank r at micro step m.

    Attributes:
        base: the aligned plan it was made from.
        settings: Balance.
        seed, epoch: of the epoch order; seed None = plan order.
    """

    __slots__ = ("_order", "base", "epoch", "seed", "settings")

    is_balanced = True

    def __init__(self, base: AlignedPlan, settings: Balance, seed: int | None, epoch: int) -> None:
        super().__init__(base.plan, base.world_size, base.drop_last, base.multiple)
        self._length = len(base)
        self.base, self.settings, self.seed, self.epoch = base, settings, seed, epoch
        self._order = EpochOrder(
            base, seed=seed or 0, shuffle=seed is not None, grad_accum=settings.grad_accum, balance=settings
        )
        self._order.warn_of_effect(epoch)
        self.together = self._order.width

    def base_positions(self, start: int = 0, stop: int | None = None) -> I64:
        """Positions in `base` of optimizer steps start..stop-1, in this plan's order."""
        return self._order.of_steps(start, self._order.steps if stop is None else stop, self.epoch)

    def pack_ids_at(self, positions: I64) -> I64:
        if len(positions) == 0:
            return positions
        first, last = int(positions.min()) // self.together, int(positions.max()) // self.together
        group = self.base.pack_ids_at(self.base_positions(first, last + 1))
        return group[positions - first * self.together]

    def check_epoch(self, epoch: int) -> None:
        if self.seed is not None and self.epoch != epoch:
            raise InputError(
                f"the balanced plan holds the order of epoch {self.epoch}, not of epoch {epoch}",
                hint="use PackSampler(plan.align(world_size), balance=…), which balances every epoch",
            )

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
    def dropped(self) -> I64:
        return self.base.dropped

    @property
    def checksum(self) -> str:
        """SHA-256 (hex) over (aligned checksum, grad_accum, cost, mode, seed, epoch) and further settings."""
        made = {
            "aligned": self.base.checksum,
            "grad_accum": self.settings.grad_accum,
            "cost": self._order.cost_name,
            "mode": self.settings.mode,
            "seed": self.seed,
            "epoch": self.epoch,
        }
        further = {"sync": (self.settings.sync, "micro"), "even": (self.settings.even, None)}
        return digest_json({**made, **{k: v for k, (v, default) in further.items() if v != default}})


def packs_per_step(plan: RawPlan) -> int:
    """Packs of every step of a plan by steps of samples."""
    packs = plan.spec.packs_per_step
    if plan.spec.samples_per_step is None or packs is None:
        raise PlanError("the plan was not made by steps of samples", hint="plan with samples_per_step")
    return packs


def _full_steps(plan: RawPlan) -> int:
    return len(plan.indices) // (plan.spec.samples_per_step or 1)


def step_packs(plan: RawPlan, steps: I64) -> tuple[I64, I64]:
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
