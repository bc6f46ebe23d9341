"""PackPlan: which samples form which pack. Immutable CSR arrays with checksum, ledger and certificate.

A plan made in memory computes its checksum, per-pack sums and statistics at first access; a plan opened
from a folder is memory-mapped, holds them ready, and never hashes when it is indexed. A plan from a
folder pickles as its path, so worker processes share one mapping.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import extend
from ..errors import PlanError, counted
from ..extend import I64
from ..moved import also_named
from .align import AlignedPlan, align
from .balance import Balance
from .epoch_order import EpochOrder
from .raw_plan import Certificate, RawPlan, Sums
from .stats import plan_stats


class PackPlan(RawPlan):
    """Packs 0..P-1; pack p holds the sample ids `indices[offsets[p]:offsets[p+1]]`, ascending.

    Made by `packtrain.plan` or `PackPlan.load`; the constructor is for them. Attributes: see `RawPlan`.
    """

    def stats(self) -> dict[str, Any]:
        """Statistics of the plan (plain JSON values); see `planning/stats.py` for the keys."""
        if "over_long_packs" not in self._stored.get("stats", {}):  # also of plans written before it was told
            self._stored["stats"] = plan_stats(self)
        return dict(self._stored["stats"])

    # -- derived plans and files ---------------------------------------------------------------
    @also_named("align")
    def align(self, world_size: int, drop_last: bool = False, grad_accum: int = 1) -> AlignedPlan:
        """The view in which `world_size` ranks get equally many packs, a multiple of `grad_accum` each."""
        return align(self, world_size, drop_last, grad_accum)

    def epoch(
        self,
        seed: int | None = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        drop_last: bool = False,
        balance: str | Balance | None = None,
        grad_accum: int = 1,
    ) -> I64:
        """int64[micro steps]: the packs that `rank` takes in an epoch, in order; -1: a filler.

        What `PackSampler` gives, without torch. `seed` None: plan order.

        >>> import packtrain as pt
        >>> plan = pt.plan([5, 5, 5, 5], pack_length=5)
        >>> [plan.epoch(seed=7, rank=rank, world_size=2).tolist() for rank in range(2)]
        [[2, 0], [1, 3]]
        """
        order = EpochOrder(
            self.align(world_size, drop_last),
            seed=seed or 0,
            shuffle=seed is not None,
            balance=balance,
            grad_accum=grad_accum,
        )
        return order.packs(rank, epoch)

    def without(self, packs: Any, reason: str) -> PackPlan:
        """A new plan whose named packs (bool[P] mask or int[k] ids) went to the ledger for `reason`."""
        if self.spec.samples_per_step is not None:
            raise PlanError(
                "packs of a plan by steps of samples cannot be taken out: every step would lose its samples",
                hint="plan with skip=… instead",
            )
        gone = _as_mask(packs, len(self))
        sizes = np.diff(self.offsets)
        keep_item = np.repeat(~gone, sizes)
        offsets = np.concatenate([[0], np.cumsum(sizes[~gone])]).astype(np.int64)
        costs = {name: array[~gone] for name, array in self.pack_costs.items()}
        cap = self.spec.pack_length
        long_gone = gone & (sizes == 1) & (self._pack_cost() > cap)
        slots_gone = int(np.maximum(self._pack_cost()[gone], cap).sum())
        kept = len(offsets) - 1
        cost = self._pack_cost()[~gone]
        bound = int((cost > cap).sum()) + -(-int(cost[cost <= cap].sum()) // cap)  # of volume
        return PackPlan(
            offsets=offsets,
            indices=np.asarray(self.indices)[keep_item],
            spec=self.spec,
            packer=replace(self.packer, notes={**self.packer.notes, f"packs_{reason}": int(gone.sum())}),
            ledger=self.ledger.with_more(np.asarray(self.indices)[~keep_item], reason),
            certificate=Certificate.of(kept, min(kept, bound), "volume"),
            long_samples=self.long_samples - int(long_gone.sum()),
            slots=self.slots - slots_gone,
            sums=Sums(self.pack_tokens[~gone], self.pack_sq[~gone], costs),
            lengths_digest=self.lengths_digest,
        )

    def _pack_cost(self) -> I64:
        """A lower bound of each pack's cost; exact for a pack of one sample."""
        m = self.spec.multiple_of
        return -(-self.pack_tokens // m) * m

    def save(self, folder: str | Path, **options: Any) -> None:
        """Write the plan folder; see `packtrain.store.plans.save` for the options."""
        extend.lookup("store", "plans").save(self, folder, **options)

    @classmethod
    def load(cls, folder: str | Path) -> PackPlan:
        """Open a plan folder, memory-mapped. Header and sizes are checked, bytes are not hashed."""
        return extend.lookup("store", "plans").load(folder)  # type: ignore[no-any-return]


def _as_mask(packs: Any, n: int) -> NDArray[np.bool_]:
    array = np.asarray(packs)
    if array.dtype == np.bool_:
        if array.shape != (n,):
            raise PlanError(f"the mask has shape {array.shape}, the plan has {counted(n, 'packs')}")
        return array
    mask = np.zeros(n, dtype=np.bool_)
    if array.size:
        if array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) >= n:
            raise PlanError(f"pack ids outside 0..{n - 1}", hint="pass bool[P] or pack ids")
        mask[array] = True
    return mask
