"""LazyShardedDataset for DataLoaders: a sampler of its slots, and an iterable that workers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch.utils.data import IterableDataset, Sampler, get_worker_info

from .pack import Pack

__all__ = ["SlotSampler", "SlotStream", "Slots"]


class Slots(Protocol):
    """What the views ask of the dataset, which stands above."""

    world_size: int

    @property
    def steps(self) -> int: ...
    def slots(self) -> Iterator[int]: ...
    def sampled(self, *, all_ranks: bool) -> Iterator[int]: ...
    def __iter__(self) -> Iterator[Pack]: ...
    def __getitem__(self, index: int) -> Pack: ...


class SlotSampler(Sampler[int]):  # type: ignore[misc]
    """Slots of the dataset's rank (or of all ranks), each when its micro step can be taken by all ranks."""

    def __init__(self, dataset: Slots, all_ranks: bool) -> None:
        self.dataset, self.all_ranks = dataset, all_ranks

    def __iter__(self) -> Iterator[int]:
        return self.dataset.sampled(all_ranks=self.all_ranks)

    def __len__(self) -> int:
        """Slots of a pass; raises while the stream has no end."""
        return self.dataset.steps * (self.dataset.world_size if self.all_ranks else 1)


class SlotStream(IterableDataset[Pack]):  # type: ignore[misc]
    """The packs of the dataset's rank. Worker w of N reads micro steps w, w + N, …: the order stays."""

    def __init__(self, dataset: Slots) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Pack]:
        worker = get_worker_info()
        if worker is None:
            yield from self.dataset
            return
        mine, of = worker.id, worker.num_workers
        for number, slot in enumerate(self.dataset.slots()):
            if number % of == mine:
                yield self.dataset[slot]
