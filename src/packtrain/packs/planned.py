"""PlannedSource: the packs of a plan in the order of training, from samples or from an export.

One object owns the dataset, its sampler, the plan, the epoch and the plans of other epochs,
so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..errors import InputError
from ..planning.align import AlignedPlan
from ..planning.balance import Balance
from ..planning.packplan import PackPlan
from ..planning.replan import EpochPlans
from ..world import world
from ._sharded_again import check_not_sharded
from ._shared_epoch import SharedEpoch
from .handed_out import HandedOut
from .loader import PackLoader, spawned
from .pack import Pack
from .packed import PackedDataset
from .sampler import PackSampler

__all__ = ["PlannedSource"]


class PlannedSource(IterableDataset[Pack]):  # type: ignore[misc]
    """Packs of one rank over a plan. Picklable as its dataset is.

    Samples that listen to `set_epoch`, wrapped or not, follow it; those that move otherwise are refused.

    Args:
        data: PackedDataset, ShardedPacks or ChunkedPacks; a raw plan is aligned for the world size.
        rank, world_size: None: the aligned plan's world size, else from the launcher.
        seed, shuffle, balance, grad_accum, replan: see `PackSampler`.
        drop_last: of the alignment, where `data` is over a raw plan.
    """

    state_file = "packs.json"
    per_rank_state = False

    def __init__(
        self,
        data: Any,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        balance: str | Balance | None = None,
        grad_accum: int = 1,
        replan: EpochPlans | None = None,
        drop_last: bool = False,
        cost: Any = None,
    ) -> None:
        self.kind = "planned" if isinstance(data, PackedDataset) else "exported"
        if isinstance(data, PackedDataset):
            data.check_still()
        view = data.packs if isinstance(data, PackedDataset) else data.aligned
        if not isinstance(view, AlignedPlan):
            view = data.plan.align(world(rank, world_size).size, drop_last)
            data = data.over(view)
        replan = replan if replan is not None else getattr(data, "replan", None)
        if replan is not None and self.kind == "exported":
            raise InputError("an export holds the packs of one plan, replan makes others every epoch")
        if replan is not None and data.replan is None:
            data = data.over(view)
            data.replan = replan
        self.data = data
        self.handed = HandedOut("use source.loader(collate, num_workers=…), or state_dict(step)")
        self._chosen = SharedEpoch()
        self.sampler = PackSampler(view, rank, seed, shuffle, balance, grad_accum, cost=cost, replan=replan)

    @property
    def rank(self) -> int:
        return self.sampler.rank

    @property
    def world_size(self) -> int:
        return self.aligned.world_size

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def aligned(self) -> AlignedPlan:
        """The view of the current epoch."""
        view: AlignedPlan = self.sampler.aligned
        return view

    @property
    def plan(self) -> PackPlan:
        """The raw plan of the current epoch."""
        plan: PackPlan = self.aligned.plan
        return plan

    @property
    def pack_length(self) -> int:
        return int(self.plan.spec.pack_length)

    @property
    def begins_at(self) -> int:
        return self.sampler.begins_at

    def __len__(self) -> int:
        """Micro steps of a pass on this rank."""
        return len(self.sampler)

    def __getitem__(self, position: int) -> Pack:
        """The pack at an aligned position."""
        pack: Pack = self.data[position]
        return pack

    def __iter__(self) -> Iterator[Pack]:
        info = get_worker_info()
        mine, of = (0, 1) if info is None else (info.id, info.num_workers)
        check_not_sharded(self.world_size)
        self.handed.read()
        if info is None:
            self.handed.restart()
        chosen = self._chosen.news()
        if chosen is not None:
            self.sampler.set_epoch(chosen)
            self._follow()
        start = self.begins_at
        for step, position in enumerate(self.sampler, start):
            if (step - start) % of == mine:
                yield self._pack(step, position)

    def _pack(self, step: int, position: int) -> Pack:
        pack: Pack = self.data[position]
        pack.slot = step * self.world_size + self.rank
        return pack

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.handed.restart()
            self._chosen.choose(epoch)
        self.sampler.set_epoch(epoch)
        self._follow()

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        return self.sampler.state_dict(self.handed.step(self.sampler.micro_step) if step is None else step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        self.handed.restart()
        self._follow()

    def _follow(self) -> None:
        """The samples, where they listen, and the plan follow the sampler's epoch."""
        if isinstance(self.data, PackedDataset):
            self.data.set_epoch(self.sampler.epoch)

    def check_state(self, state: Mapping[str, Any]) -> None:
        self.sampler.check_state(state)

    def check_equal(self) -> str:
        """What every rank must have alike."""
        return f"{self.aligned.checksum} {self.sampler.seed} {self.sampler.shuffle} {self.epoch}"

    def acknowledge(self, state: Mapping[str, Any] | None = None) -> None:
        """Nothing waits for it."""

    def peek(self, count: int) -> list[Pack]:
        start = self.begins_at
        steps = range(start, min(len(self), start + count))
        positions = self.sampler.positions(steps.start, steps.stop).tolist()
        return [self._pack(step, position) for step, position in zip(steps, positions, strict=True)]

    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> PackLoader:
        options = spawned({"num_workers": num_workers, **options})
        return PackLoader(self.data, self.sampler, 1, collate, handed=self.handed, **options)
