"""AlignedPlan: a view of a plan for (world_size, drop_last). What training consumes.

drop: the first floor(N / W) * W packs. pad: packs are repeated cyclically from the start of the raw
plan, for any N >= 1 and W: 3 packs on 8 ranks give 0 1 2 0 1 2 0 1. Nothing is stored besides N and W.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..files import digest_json

if TYPE_CHECKING:
    from .balance import BalancedPlan
    from .packplan import PackPlan

__all__ = ["AlignedPlan", "align"]


#: Ranks; far above any machine, and low enough that positions stay 64-bit.
_LARGEST_WORLD = 1 << 24


def align(plan: PackPlan, world_size: int, drop_last: bool = False) -> AlignedPlan:
    """The view of `plan` in which every rank gets the same number of packs.

    Raises:
        PlanError: the plan is empty, dropping leaves no pack, or the plan was made by steps whose number of
            packs `world_size` does not divide (names the sizes that work).
    """
    try:
        size = operator.index(world_size) if not isinstance(world_size, bool) else 0
    except TypeError:
        size = 0
    if size < 1:
        raise PlanError(f"world_size is {world_size!r}, expected an integer >= 1")
    if size > _LARGEST_WORLD:
        raise PlanError(f"world_size is {size}, limit is {_LARGEST_WORLD}")
    n = len(plan)
    if n == 0:
        raise PlanError("the plan holds no packs", hint="see plan.ledger.counts() for where the samples went")
    if plan.spec.samples_per_step is not None:
        from .step_view import StepAlignedPlan

        return StepAlignedPlan(plan, size, bool(drop_last))
    if drop_last and n < size:
        raise PlanError(
            f"dropping the remainder of {n} packs on {size} ranks leaves none",
            hint="use drop_last=False or fewer ranks",
        )
    return AlignedPlan(plan, size, bool(drop_last))


class AlignedPlan:
    """Aligned positions 0..len-1, each a pack of the raw plan. Immutable.

    >>> import packtrain as pt
    >>> a = pt.plan([5, 5, 5], pack_length=5).align(world_size=8)
    >>> a.pack_ids.tolist(), a.repeated.tolist()
    ([0, 1, 2, 0, 1, 2, 0, 1], [3, 4, 5, 6, 7])
    """

    __slots__ = ("_length", "drop_last", "plan", "world_size")

    def __init__(self, plan: PackPlan, world_size: int, drop_last: bool) -> None:
        self.plan = plan
        self.world_size = world_size
        self.drop_last = drop_last
        n = len(plan)
        self._length = (n if drop_last else n + world_size - 1) // world_size * world_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> NDArray[np.int64]:
        """Sample ids (int64[k], ascending) of the pack at an aligned position."""
        return self.plan[self.pack_id(position)]

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[position] for position in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"AlignedPlan({len(self)} of {len(self.plan)} packs, world_size={self.world_size}, "
            f"drop_last={self.drop_last})"
        )

    def pack_id(self, position: int) -> int:
        """Raw pack id at an aligned position."""
        index = operator.index(position)
        if not -len(self) <= index < len(self):
            raise IndexError(f"position {index} of {len(self)} aligned packs")
        return index % len(self) % len(self.plan)

    def pack_ids_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Raw pack ids at int64[k] positions."""
        return positions % len(self.plan)

    @property
    def pack_ids(self) -> NDArray[np.int64]:
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
    def repeated(self) -> NDArray[np.int64]:
        """Positions that repeat a pack (int64, ascending)."""
        return np.arange(self.kept, len(self), dtype=np.int64)

    @property
    def fillers(self) -> NDArray[np.int64]:
        """Positions without a pack (pack id -1); only plans by steps of samples have some."""
        return np.zeros(0, dtype=np.int64)

    @property
    def dropped(self) -> NDArray[np.int64]:
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
        from .balance import Balance, balance

        settings = Balance(grad_accum=grad_accum, cost=cost, mode=mode, sync=sync, even=even)
        return balance(self, settings, seed, epoch)

    @property
    def checksum(self) -> str:
        """SHA-256 (hex) over (plan checksum, world_size, drop_last)."""
        return digest_json(
            {"plan": self.plan.checksum, "world_size": self.world_size, "drop_last": self.drop_last}
        )
