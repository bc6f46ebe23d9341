"""PackSampler: the aligned positions of one rank, in consumption order.

The order, and where a run stands in it, are `planning.epoch_order.EpochOrder`; a sampler is one rank's walk
through it. It holds no permutation and restores in O(1) at any step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from ..checks import whole
from ..errors import InputError, counted
from ..planning.align import AlignedPlan
from ..planning.balance import Balance
from ..planning.epoch_order import EpochOrder
from ..planning.replan import EpochPlans
from ..world import World, world
from .handed_out import HandedOut, check_not_sharded

_BLOCK = 4096  # micro steps computed at a time


class PackSampler(DistributedSampler[int]):  # type: ignore[misc]
    """Yields this rank's aligned positions. Every rank has the same number of them.

    Args:
        aligned: the view that training consumes; its world size is the number of ranks.
        rank: this rank, 0 <= rank < aligned.world_size; None: from the launcher, whose world size has
            to be that of `aligned`.
        seed: seed of the epoch orders.
        shuffle: False: packs come in plan order.
        balance: None, or `step`, `window`, `global` (or a `planning.balance.Balance` with further settings):
            every epoch is balanced anew. With one micro step a step, `step` has nothing to rearrange.
        grad_accum: micro steps per optimizer step; kept in the state, so that a resume can tell.
        cost: what `balance` evens out; see `AlignedPlan.balance`.
        replan: the plans of the epochs (`planning.replan.EpochPlans` of `aligned.plan`): every epoch then
            reads its own plan, of as many packs. `aligned` is the view of the epoch that was set last; give
            the same object to `PackedDataset`, whose `set_epoch` must be called too.

    A balanced plan holds the order of one epoch already: it is read as it is, with shuffle=False.

    A pass starts at micro step 0, the first one after `load_state_dict` where the state stands.
    `micro_step` counts the positions handed out. `set_epoch` chooses the order of the next passes.

    Attributes:
        order: the order of all ranks.
        handed: who took the positions, and how many.
    """

    def __init__(
        self,
        aligned: AlignedPlan,
        rank: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        balance: str | Balance | None = None,
        grad_accum: int = 1,
        *,
        cost: Any = None,
        replan: EpochPlans | None = None,
    ) -> None:
        rank = _rank(aligned) if rank is None else World(rank, aligned.world_size).rank
        self.order = EpochOrder(
            aligned,
            seed=seed,
            shuffle=shuffle,
            grad_accum=grad_accum,
            balance=balance,
            cost=cost,
            replan=replan,
        )
        self.rank = rank  # a DistributedSampler by its base: hosts that shard samplers leave it alone
        self.num_replicas = aligned.world_size
        self.epoch = 0
        self.micro_step = 0
        self._start = 0
        self.handed = HandedOut("use source.loader(collate), PackLoader, or state_dict(step)")
        if rank == 0:
            self.order.warn_of_effect()
            self.order.warn_without_effect()

    @property
    def aligned(self) -> Any:
        """The view of the epoch that was set last."""
        return self.order.view(self.epoch)

    @property
    def replan(self) -> Any:
        return self.order.replan

    @property
    def seed(self) -> int:
        return self.order.seed

    @property
    def shuffle(self) -> bool:
        return self.order.shuffle

    @property
    def grad_accum(self) -> int:
        return self.order.grad_accum

    def __len__(self) -> int:
        """Micro steps of a whole epoch on this rank, whatever is left of the current one."""
        return self.order.micro_steps

    @property
    def begins_at(self) -> int:
        """The micro step at which the next pass begins."""
        return self._start

    def __iter__(self) -> Iterator[int]:
        self.order.aligned.check_epoch(self.epoch)
        check_not_sharded(self.num_replicas)
        self.handed.begin_pass()
        self.micro_step = self._start  # at once: a loader may ask for the state before the first position
        return self._pass(self.epoch, self._start)

    def _pass(self, epoch: int, start: int) -> Iterator[int]:
        self._start = 0  # only now: torch's loader with workers makes two iterators and uses the second
        for block in range(start // _BLOCK * _BLOCK, len(self), _BLOCK):
            first = max(start, block)
            positions = self.order.of_rank(self.rank, epoch, first, min(len(self), block + _BLOCK))
            for step, position in enumerate(positions.tolist(), start=first):
                self.micro_step = step + 1
                yield position

    def begin_at(self, micro_step: int) -> None:
        """Let the next pass begin at this micro step of the epoch; nothing before it is computed."""
        if not 0 <= micro_step <= len(self):
            raise InputError(f"micro step {micro_step} of {len(self)}")
        self.micro_step = self._start = micro_step
        self.handed.restart()

    def check_pass(self, epoch: int) -> None:
        """Refuse to go on with a pass of `epoch` over packs that are those of another plan by now.

        Raises:
            InputError: `set_epoch` was called in the middle of the pass, and every epoch has its own plan.
        """
        if self.replan is not None and self.epoch != epoch:
            raise InputError(
                f"epoch {self.epoch} was chosen in the middle of a pass of epoch {epoch}: another plan",
                hint="read the pass to its end, or begin another one, after set_epoch",
            )

    def batches(self, packs: int) -> PackBatches:
        """This sampler as a batch sampler: `packs` positions at a time (the last batch may be smaller)."""
        return PackBatches(self, packs)

    def positions(self, start: int, stop: int) -> Any:
        """This rank's aligned positions at micro steps start..stop-1 of the epoch, int64; nothing moves."""
        return self.order.of_rank(self.rank, self.epoch, start, stop)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch. Naming another epoch starts it from its first micro step."""
        whole("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self.micro_step, self._start = epoch, 0, 0
            self.handed.restart()

    def state_dict(self, micro_step: int | None = None) -> dict[str, Any]:
        """Where the stream stands.

        Args:
            micro_step: micro steps of this epoch that were really consumed. None: those handed out.

        Raises:
            InputError: `micro_step` is None and a loader fetched ahead: more was handed out than consumed.
        """
        return self.order.state(
            self.epoch, self.handed.step(self.micro_step) if micro_step is None else micro_step
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` stands; another number of ranks may have saved it (`planning.epoch_order`).

        Raises:
            ForeignArtefactError: the state belongs to another plan, order or version, or this number of
                ranks cannot go on exactly (the hint names those that can).
        """
        self.epoch, self.micro_step = self.order.resume(state)
        self._start = self.micro_step
        self.handed.restart()

    def check_state(self, state: Mapping[str, Any]) -> int:
        """The micro step at which `state` stands; raises as `load_state_dict` does. Nothing is changed."""
        return self.order.check_state(state)


def _rank(aligned: AlignedPlan) -> int:
    """The rank of this process.

    Raises:
        InputError: the plan is aligned for another number of ranks than there are.
    """
    here = world()
    if here.size != aligned.world_size:
        raise InputError(
            f"the plan is aligned for {counted(aligned.world_size, 'ranks')}, "
            f"this is rank {here.rank} of {here.size}",
            hint=f"use plan.align({here.size}), or name the rank: PackSampler(aligned, rank)",
        )
    return here.rank


class PackBatches(Sampler[list[int]]):  # type: ignore[misc]
    """A `PackSampler` as a batch sampler: lists of positions, with the state of the sampler."""

    def __init__(self, sampler: PackSampler, packs: int) -> None:
        self.sampler, self.packs = sampler, whole("packs", packs, 1, hint="positions in a batch")

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.packs)

    def __iter__(self) -> Iterator[list[int]]:
        return _batched(iter(self.sampler), self.packs)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def state_dict(self, micro_step: int | None = None) -> dict[str, Any]:
        return self.sampler.state_dict(micro_step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)


def _batched(positions: Iterator[int], packs: int) -> Iterator[list[int]]:
    while batch := list(itertools.islice(positions, packs)):
        yield batch
