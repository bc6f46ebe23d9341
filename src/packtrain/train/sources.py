"""Datasets of every kind as a `PackSource`: what a trainer iterates, saves and resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..data import (
    ChunkedPacks,
    LazyShardedDataset,
    PackedDataset,
    PackLoader,
    PackSampler,
    ShardedPacks,
    StreamingPackedDataset,
    TokenBudgetDataset,
)
from ..errors import InputError
from ..planning.align import AlignedPlan
from ..world import world

__all__ = ["is_packs", "pack_source"]


_MAPS = (PackedDataset, ShardedPacks, ChunkedPacks)


def is_packs(data: Any) -> bool:
    """Does this hold packs that are made (a dataset of any kind, or a source)?"""
    known = isinstance(data, (*_MAPS, LazyShardedDataset, StreamingPackedDataset))
    return known or (hasattr(data, "loader") and hasattr(data, "state_file"))


def pack_source(
    data: Any,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    balance: Any = None,
    grad_accum: int = 1,
    replan: Any = None,
) -> Any:
    """The source of a dataset."""
    if hasattr(data, "loader") and hasattr(data, "state_file"):
        return data
    place = world(rank, world_size)
    if isinstance(data, LazyShardedDataset):
        return GrowingSource(data)
    if isinstance(data, StreamingPackedDataset):
        return StreamSource(data)
    if isinstance(data, PackedDataset | ShardedPacks | ChunkedPacks):
        return MapSource(data, place.rank, place.size, seed, shuffle, balance, grad_accum, replan)
    raise InputError(f"a {type(data).__name__} is no source of packs", hint="see packtrain.data")


class _Counted(IterableDataset[Any]):  # type: ignore[misc]
    pass


class MapSource:
    state_file, per_rank_state = "packs.json", False

    def __init__(
        self, data: Any, rank: int, size: int, seed: int, shuffle: bool, balance: Any, accum: int, replan: Any
    ) -> None:
        self.kind = "planned" if isinstance(data, PackedDataset) else "exported"
        self.rank, self.world_size = rank, size
        if isinstance(data, PackedDataset):
            if not isinstance(data.packs, AlignedPlan):
                raise InputError("the dataset is over a raw plan", hint="make it over plan.align(world_size)")
            aligned = data.packs
        else:
            if data.aligned is None:
                data.aligned = data.plan.align(size)
            aligned = data.aligned
        self.data = data
        self.replan = getattr(data, "replan", None) if replan is None else replan
        self.sampler = PackSampler(aligned, rank, seed, shuffle, balance, accum, replan=self.replan)
        self.pack_length = int(aligned.plan.spec.pack_length)
        self._loader: Any = None

    @property
    def plan(self) -> Any:
        return self.data.plan

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, position: int) -> Any:
        return self.data[position]

    def __iter__(self) -> Iterator[Any]:
        return (self.data[position] for position in self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        if self._loader is not None:
            self._loader._from = self._loader._given = 0

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        if step is None and self._loader is not None:
            return dict(self._loader.state_dict())
        return self.sampler.state_dict(step)

    def check_state(self, state: Mapping[str, Any]) -> None:
        self.sampler.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.sampler.epoch)
        if self._loader is not None:
            self._loader._from, self._loader._given = self.sampler.micro_step, 0

    def acknowledge(self, state: Any = None) -> None:
        return None

    def check_equal(self) -> str:
        return str(self.sampler.aligned.checksum)

    def peek(self, count: int) -> list[Any]:
        return [self.data[p] for p in range(min(count, len(self.data)))]

    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> Any:
        options.pop("persistent_workers", None)
        if not num_workers:
            options.pop("multiprocessing_context", None)
        self._loader = PackLoader(self.data, self.sampler, 1, collate, num_workers=num_workers, **options)
        return self._loader


class GrowingSource:
    kind, state_file, per_rank_state = "growing", "stream.json", False

    def __init__(self, data: LazyShardedDataset) -> None:
        self.data = data
        self.rank, self.world_size, self.epoch = data.rank, data.world_size, 0
        self._from: Any = None
        self._given = 0

    @property
    def pack_length(self) -> int:
        return int(self.data.config["pack_length"])

    def __len__(self) -> int:
        return self.data.steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def set_epoch(self, epoch: int) -> None:
        return None

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        if step is None and self._from is None:
            return self.data.state_dict()
        return self.data.at_step(self._from + self._given if step is None else step)

    def check_state(self, state: Mapping[str, Any]) -> None:
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.data.load_state_dict(state)
        self._from = None

    def acknowledge(self, state: Any = None) -> None:
        self.data.acknowledge(state)

    def check_equal(self) -> str:
        state = self.data.state_dict()
        return f"{state['stream']} {state['start']} {state['step']} {state['order_world']}"

    def peek(self, count: int) -> list[Any]:
        return self.data.peek(self.data.state_dict()["step"], count)

    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> Any:
        options.pop("persistent_workers", None)
        return _Counting(
            self,
            DataLoader(
                self.data.stream(), batch_size=1, collate_fn=collate, num_workers=num_workers, **options
            ),
        )


class _Counting:
    def __init__(self, source: GrowingSource, loader: Any) -> None:
        self.source, self.loader = source, loader

    def __iter__(self) -> Iterator[Any]:
        self.source._from, self.source._given = int(self.source.data.state_dict()["step"]), 0
        for batch in self.loader:
            self.source._given += 1
            yield batch


class StreamSource:
    state_file, per_rank_state = "stream.{rank}.json", True

    def __init__(self, data: StreamingPackedDataset) -> None:
        self.kind = "token_budget" if isinstance(data, TokenBudgetDataset) else "stream"
        self.data = data
        self.rank, self.world_size = data.place.rank, data.place.size
        self.pack_length = data.spec.pack_length

    @property
    def epoch(self) -> int:
        return self.data.epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def set_epoch(self, epoch: int) -> None:
        self.data.set_epoch(epoch)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        return self.data.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.data.load_state_dict(state)

    def acknowledge(self, state: Any = None) -> None:
        return None

    def check_equal(self) -> str:
        return ""

    def peek(self, count: int) -> list[Any]:
        import copy
        from itertools import islice

        apart = copy.copy(self.data)
        apart.encode_workers, apart._ahead, apart._run = 0, type(self.data._ahead)(), None
        return list(islice(apart._packs(), count))

    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> Any:
        return DataLoader(
            self.data, batch_size=1, collate_fn=collate, pin_memory=options.get("pin_memory", False)
        )
