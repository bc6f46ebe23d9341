"""PackLoader: torch's DataLoader over packs, with a state that counts what was handed out.

A loader with workers fetches ahead, so the sampler stands further than training does. PackLoader counts
the batches that left it; its state is the first one that did not. Loaded with any number of workers (the
order comes from the sampler, torch keeps it), it goes on there: what was in flight is fetched again,
nothing is lost and nothing comes twice. torchdata's StatefulDataLoader works as well, with the sampler
as it is; it needs another package, keeps a snapshot of every worker, and loads its own state only with as
many workers as saved it. `loader_position` takes the position out of such a state, for any number of them.

Workers come from a server that forks them (`workers`) unless told otherwise: tokenizers that were used do not
survive a fork.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, Sampler

from ..checks import whole
from ..errors import InputError, counted
from ..planning.align import AlignedPlan
from ..planning.balance import Balance
from ..planning.epoch_order import EpochOrder
from ..planning.replan import EpochPlans
from ..workers import one_start, worker_context
from ..world import World, world
from .handed_out import HandedOut, check_not_sharded
from .packed import PackedDataset

# --------------------------------------------------------------------------------------------
# PackSampler: the aligned positions of one rank, in consumption order
# --------------------------------------------------------------------------------------------
# The order, and where a run stands in it, are `planning.epoch_order.EpochOrder`; a sampler is one rank's walk
# through it. It holds no permutation and restores in O(1) at any step.
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
        self.rank = _rank(aligned) if rank is None else World(rank, aligned.world_size).rank
        self.order = EpochOrder(
            aligned,
            seed=seed,
            shuffle=shuffle,
            grad_accum=grad_accum,
            balance=balance,
            cost=cost,
            replan=replan,
        )
        # a DistributedSampler by its base: hosts that shard samplers leave it alone
        self.num_replicas = aligned.world_size
        self.epoch = self.micro_step = self._start = 0
        self.handed = HandedOut("use source.loader(collate), PackLoader, or state_dict(step)")
        if self.rank == 0:
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


logger = logging.getLogger(__name__)

_TAKEN = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


class RankLoader(DataLoader[Any]):  # type: ignore[misc]
    """A DataLoader of one rank's packs, which nobody shards again.

    Args:
        data: what is read.
        options: of the caller, as those of `DataLoader`; workers start as `worker_context` says unless told
            otherwise, anew for every pass.
        own: arguments of `DataLoader` that decide which packs come.

    accelerate's `prepare` would give each rank every W-th of its own packs and drop the others: it takes this
    loader as prepared instead, which then moves batches to the device and tells where a pass ends, as its own
    loaders do. Lightning keeps its `sampler`, which is distributed already.
    """

    is_prepared = False

    def __init__(self, data: Any, options: dict[str, Any], **own: Any) -> None:
        taken = _TAKEN & options.keys()
        if taken:
            raise InputError(
                f"{type(self).__name__} has no {', '.join(sorted(taken))}",
                hint="the packs decide what comes when; PackLoader(packs=…) makes batches of several",
            )
        options = {**options}
        if options.pop("persistent_workers", False):
            logger.warning("no effect beside packs: persistent_workers (workers of every pass start anew)")
        if not options.get("num_workers"):
            for name in ("multiprocessing_context", "prefetch_factor"):
                options.pop(name, None)
        elif options.get("multiprocessing_context") is None:
            options["multiprocessing_context"] = worker_context()
        super().__init__(data, **own, **options)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by accelerate alone, when the loader is given to `prepare`."""
        self.is_prepared = True
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self.is_prepared = value

    def __iter__(self) -> Iterator[Any]:
        with one_start():
            return super().__iter__()  # type: ignore[no-any-return]

    def placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches as they leave the loader, on the device of accelerate where it prepared this loader."""
        if not self.is_prepared:
            yield from batches
            return
        from accelerate.state import GradientState, PartialState
        from accelerate.utils import send_to_device

        state, device = GradientState(), PartialState().device
        self.end_of_dataloader, self.remainder = False, -1
        state._add_dataloader(self)
        try:
            held = next(batches, _NONE)
            while held is not _NONE:
                after = next(batches, _NONE)
                self.end_of_dataloader = after is _NONE
                yield send_to_device(held, device)
                held = after
        finally:
            state._remove_dataloader(self)


_NONE = object()


class SourceLoader(RankLoader):
    """Batches of one pack each from an iterable source, counted as they leave.

    Args:
        packs: the iterable view that workers share.
        source: whose state this is.
        handed: the source's counter; None: the source counts itself.
        collate: list of one pack -> batch.
        options: further arguments of `DataLoader`.
    """

    def __init__(
        self, packs: Any, source: Any, handed: HandedOut | None, collate: Any, **options: Any
    ) -> None:
        self.source, self.handed = source, handed
        self._given: int | None = None  # batches of the pass that left, where the source counts itself
        super().__init__(packs, options, batch_size=1, collate_fn=collate)

    def __iter__(self) -> Iterator[Any]:
        if self.handed is not None:
            self.handed.begin(self.source.begins_at)
        self._given = 0
        return self._counted(self.placed(super().__iter__()))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._given = (self._given or 0) + 1
            if self.handed is not None:
                self.handed.add(1)
            yield batch
        self._given = None

    def set_epoch(self, epoch: int) -> None:
        self.source.set_epoch(epoch)
        self._given = None

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, behind the last batch that was handed out."""
        return dict(self.source.state_dict(None if self.handed is not None else self._given))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)
        self._given = None


class PackLoader(RankLoader):
    """Batches of packs in the order of a `PackSampler`.

    Args:
        data: the dataset; its `set_epoch` is called with the sampler's.
        sampler: which positions, and in which order.
        packs: packs of a batch; `collate_fn` gets a list of them.
        collate_fn: such as `PaddingFreeCollator(model)`; None = the list of packs itself.
        options: further arguments of `DataLoader` (`num_workers`, `prefetch_factor`, `pin_memory`, …).

    A pass begins where the loaded state stands, else at the start of the epoch that `set_epoch` named. The
    dataset follows the sampler, which alone is told the epoch by Lightning.
    """

    def __init__(
        self,
        data: PackedDataset,
        sampler: PackSampler,
        packs: int = 1,
        collate_fn: Any = None,
        **options: Any,
    ) -> None:
        made = list if collate_fn is None else collate_fn
        super().__init__(data, options, batch_sampler=sampler.batches(packs), collate_fn=made)
        self.packs = packs

    @property
    def sampler(self) -> Any:
        """The sampler of packs, for whoever asks a loader for it."""
        return self.pack_sampler

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """torch sets one of its own beside a batch sampler."""

    @property
    def pack_sampler(self) -> PackSampler:
        return self.batch_sampler.sampler  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        epoch = self.pack_sampler.epoch
        if getattr(self.dataset, "epoch", epoch) != epoch:
            self._follow(epoch)
        start = self.pack_sampler.begins_at
        batches = super().__iter__()  # the sampler begins a pass of its own
        self.pack_sampler.handed.begin(start)
        return self._counted(self.placed(batches), len(self.pack_sampler))

    def _counted(self, batches: Iterator[Any], steps: int) -> Iterator[Any]:
        epoch = self.pack_sampler.epoch
        for batch in batches:
            self.pack_sampler.handed.add(self.packs, steps)
            yield batch
            if not self.num_workers:  # those have the plan of the epoch that they were started in
                self.pack_sampler.check_pass(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next passes, for sampler and samples. Another epoch begins at its start."""
        self.pack_sampler.set_epoch(epoch)
        self._follow(epoch)

    def _follow(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):  # an export has the same packs in every epoch
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: behind the last batch that was handed out."""
        return self.pack_sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stands, with any number of workers; see `PackSampler.load_state_dict`."""
        self.pack_sampler.load_state_dict(state)
        self._follow(self.pack_sampler.epoch)


def loader_position(state: Mapping[str, Any], packs: int = 1) -> Any:
    """The state of what a torchdata `StatefulDataLoader` reads in that of the loader: behind its last batch.

    Args:
        state: `StatefulDataLoader.state_dict()`, of any number of workers; or that of `EqualSteps` around it.
        packs: packs of a batch.

    Returns:
        The position of the `PackSampler`; for a stream the list of its workers' states, which
        `stream.load_state_dict` takes with those of other ranks.

    Raises:
        InputError: there is none in it.
    """
    if not isinstance(state, Mapping):
        raise InputError(
            f"the state of a loader is a {type(state).__name__}, not a mapping",
            hint="give what StatefulDataLoader.state_dict() returned",
        )
    if state.keys() == {"version", "packs", "steps", "ended"} and isinstance(state["packs"], Mapping):
        if state["steps"] or state["ended"]:
            raise InputError(
                f"this state of EqualSteps is {counted(state['steps'], 'steps')} behind that of its packs",
                hint="a loader with workers knows each of its states; iterate a stream without one by itself",
            )
        state = state["packs"]
    snapshot = state.get("_snapshot") or {}
    main = snapshot.get("_main_snapshot", state)
    workers = snapshot.get("_worker_snapshots") or {"": state}
    streams = [found for found in map(_stream_of, workers.values()) if found is not None]
    if streams:
        if state.get("_steps_since_snapshot"):
            raise InputError(
                "this state of a loader is some batches behind", hint="use snapshot_every_n_steps=1"
            )
        return streams
    held = main.get("_sampler_iter_state") or main.get("_index_sampler_state") or {}
    position = held.get("sampler_state", held)
    if "micro_step" not in position:
        raise InputError(
            "this state of a loader holds no position in packs, and no stream",
            hint="StatefulDataLoader(sampler=PackSampler(…)), or batch_sampler=PackSampler(…).batches(k)",
        )
    behind = packs * int(state.get("_steps_since_snapshot", 0))
    return {**position, "micro_step": min(position["steps"], position["micro_step"] + behind)}


def _stream_of(worker: Any) -> Any:
    """The state of a stream in that of a worker."""
    found = worker.get("dataset_state") if isinstance(worker, Mapping) else None
    return found if isinstance(found, Mapping) and {"settings", "epoch"} <= found.keys() else None
