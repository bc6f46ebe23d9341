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

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ..errors import InputError, counted
from ..workers import one_start, worker_context
from .handed_out import HandedOut
from .packed import PackedDataset
from .sampler import PackSampler

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
            if self.handed is not None:
                self.handed.add(1)
            self._given = (self._given or 0) + 1
            yield batch
        self._given = None

    def set_epoch(self, epoch: int) -> None:
        self.source.set_epoch(epoch)
        self._given = None

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, behind the last batch that was handed out."""
        state: dict[str, Any] = self.source.state_dict(None if self.handed is not None else self._given)
        return state

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
        collate_fn = _as_it_is if collate_fn is None else collate_fn
        super().__init__(data, options, batch_sampler=sampler.batches(packs), collate_fn=collate_fn)
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
        found: PackSampler = self.batch_sampler.sampler
        return found

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
                f"this state of EqualSteps is "
                f"{counted(state['steps'], 'steps')} behind that of the packs it holds",
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


def _as_it_is(packs: list[Any]) -> list[Any]:
    return packs
