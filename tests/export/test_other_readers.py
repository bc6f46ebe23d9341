"""Packs that were made before, read on by other ranks and loader workers: the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from export_sets import Set
from words_in import lengths_of, producer, put

from packtrain.data import LazyShardedDataset, open_packs, pack_source
from packtrain.pipeline.export import export

Open = Callable[[int, int], Any]

#: (ranks, loader workers) that save, and that go on.
MOVES = [((1, 0), (2, 0)), ((2, 0), (4, 0)), ((4, 0), (1, 0)), ((4, 0), (4, 0)), ((2, 1), (1, 2))]


def same(packs: list[Any]) -> list[Any]:
    """A batch of one pack stays what it is."""
    return packs


class Cluster:
    """All ranks of a run, one process each in turn, with the loaders that training uses."""

    def __init__(self, opened: Open, ranks: int, workers: int, state: Any = None) -> None:
        self.sources = [opened(rank, ranks) for rank in range(ranks)]
        if state is not None:
            for source in self.sources:
                source.load_state_dict(state)
        self._loaders = [source.loader(same, num_workers=workers) for source in self.sources]
        self._batches: list[Iterator[Any]] = [iter(loader) for loader in self._loaders]

    def step(self) -> list[list[int]]:
        """The ids of the packs of all ranks in a micro step; empty behind the end."""
        found = [next(batches, None) for batches in self._batches]
        return [list(pack.ids) for packs in found if packs is not None for pack in packs]

    def state(self) -> Any:
        return self.sources[-1].state_dict()

    def close(self) -> None:
        self._batches = []
        self._loaders = []


def packs_left(cluster: Cluster) -> list[list[int]]:
    found = []
    while step := cluster.step():
        found += step
    cluster.close()
    return found


@pytest.fixture(params=["chunks", "webdataset", "growing"])
def opened(request: pytest.FixtureRequest, made: Callable[..., Set], tmp_path: Path) -> Open:
    kind = request.param
    if kind == "growing":
        put(tmp_path / "in", "a.jsonl", lengths_of(160))
        producer(tmp_path / "in", tmp_path / "out", packs_per_chunk=3).run()
        runs = iter(range(10_000))

        def growing(rank: int, ranks: int) -> Any:
            run = tmp_path / f"run-{next(runs)}"
            return LazyShardedDataset(tmp_path / "out", rank, ranks, start="beginning", run=run)

        return growing
    held = made(count=90)
    export(held.plan_folder, tmp_path / "out", format=kind, source=held.source, template=held.template)
    packs = open_packs(tmp_path / "out", held.template.encode)

    def exported(rank: int, ranks: int) -> Any:
        return pack_source(packs, rank=rank, world_size=ranks, seed=3, grad_accum=4 // ranks)

    return exported


def test_other_readers_go_on_with_the_same_packs_in_the_same_order(opened: Open) -> None:
    """Every pack once, in the order that one process has, wherever it stops and whoever goes on."""
    whole = packs_left(Cluster(opened, 1, 0))
    assert len(whole) > 12 and len({tuple(ids) for ids in whole}) == len(whole)
    for (ranks, workers), others in MOVES:
        real = [ids for ids in packs_left(Cluster(opened, ranks, 0)) if ids][: len(whole)]
        assert sorted(real) == sorted(whole)
        first = Cluster(opened, ranks, workers)
        seen = [ids for _ in range(8 // ranks) for ids in first.step()]
        state = first.state()
        first.close()
        rest = packs_left(Cluster(opened, *others, state))
        assert [ids for ids in seen + rest if ids][: len(whole)] == real, (ranks, workers, others)
