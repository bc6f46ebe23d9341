"""PackLoader: torch's DataLoader over packs, with a state that counts what was handed out.

A loader with workers fetches ahead, so the sampler stands further than training does. PackLoader counts
the batches that left it; its state is the first one that did not. Loaded with any number of workers (the
order comes from the sampler, torch keeps it), it goes on there: what was in flight is fetched again,
nothing is lost and nothing comes twice. torchdata's StatefulDataLoader works as well, with the sampler
as it is; it needs another package, keeps a snapshot of every worker, and loads its own state only with as
many workers as saved it. `loader_position` takes the position out of such a state, for any number of them.

Workers are spawned unless told otherwise: tokenizers do not survive a fork.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ..errors import InputError
from .packed import PackedDataset
from .sampler import PackSampler

__all__ = ["PackLoader", "loader_position"]


class PackLoader(DataLoader[Any]):  # type: ignore[misc]
    """Batches of packs in the order of a `PackSampler`.

    Args:
        data: the dataset; its `set_epoch` is called with the sampler's.
        sampler: which positions, and in which order.
        packs: packs of a batch; `collate_fn` gets a list of them.
        collate_fn: such as `PaddingFreeCollator(model)`; None = the list of packs itself.
        options: further arguments of `DataLoader` (`num_workers`, `prefetch_factor`, `pin_memory`, …).

    A pass begins where the loaded state stands, else at the start of the epoch that `set_epoch` named.
    """

    def __init__(
        self,
        data: PackedDataset,
        sampler: PackSampler,
        packs: int = 1,
        collate_fn: Any = None,
        **options: Any,
    ) -> None:
        taken = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & options.keys()
        if taken:
            raise InputError(
                f"PackLoader has no {', '.join(sorted(taken))}",
                hint="order and equal steps come from the sampler; packs= says how many make a batch",
            )
        if options.get("num_workers") and options.get("multiprocessing_context") is None:
            options["multiprocessing_context"] = "spawn"
        if options.get("persistent_workers"):
            raise InputError(
                "persistent workers keep the data of the first epoch", hint="leave persistent_workers out"
            )
        super().__init__(
            data,
            batch_sampler=sampler.batches(packs),
            collate_fn=_as_it_is if collate_fn is None else collate_fn,
            **options,
        )
        self.packs = packs
        self._from, self._given = sampler.micro_step, 0

    @property
    def pack_sampler(self) -> PackSampler:
        found: PackSampler = self.batch_sampler.sampler
        return found

    def __iter__(self) -> Iterator[Any]:
        steps = len(self.pack_sampler)
        self._from, self._given = self.pack_sampler.begins_at, 0
        return self._counted(super().__iter__(), steps)

    def _counted(self, batches: Iterator[Any], steps: int) -> Iterator[Any]:
        for batch in batches:
            self._given = min(self._given + self.packs, steps - self._from)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next passes, for sampler and samples. Another epoch begins at its start."""
        if epoch != self.pack_sampler.epoch:
            self._from, self._given = 0, 0
        self.pack_sampler.set_epoch(epoch)
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: behind the last batch that was handed out."""
        return self.pack_sampler.state_dict(self._from + self._given)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stands, with any number of workers; see `PackSampler.load_state_dict`."""
        self.pack_sampler.load_state_dict(state)
        self.dataset.set_epoch(self.pack_sampler.epoch)
        self._from, self._given = self.pack_sampler.micro_step, 0


def loader_position(state: Mapping[str, Any], packs: int = 1) -> dict[str, Any]:
    """The state of the `PackSampler` in that of a torchdata `StatefulDataLoader`: behind its last batch.

    Args:
        state: `StatefulDataLoader.state_dict()`, of any number of workers.
        packs: packs of a batch.

    Raises:
        InputError: there is none in it.
    """
    if not isinstance(state, Mapping):
        raise InputError(
            f"the state of a loader is a {type(state).__name__}, not a mapping",
            hint="give what StatefulDataLoader.state_dict() returned",
        )
    snapshot = state.get("_snapshot") or {}
    main = snapshot.get("_main_snapshot", state)
    held = main.get("_sampler_iter_state") or main.get("_index_sampler_state") or {}
    position = held.get("sampler_state", held)
    if "micro_step" not in position:
        raise InputError(
            "this state of a loader holds no position in packs",
            hint="StatefulDataLoader(sampler=PackSampler(…)), or batch_sampler=PackSampler(…).batches(k)",
        )
    behind = packs * int(state.get("_steps_since_snapshot", 0))
    return {**position, "micro_step": min(position["steps"], position["micro_step"] + behind)}


def _as_it_is(packs: list[Any]) -> list[Any]:
    return packs
