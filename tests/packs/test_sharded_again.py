"""Packs of one rank in a plain DataLoader: who would lose some is refused, who runs ahead gives no state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import packtrain as pt
from packtrain.data import PackedDataset, PackSampler, StreamingPackedDataset, TokenBudgetDataset, pack_source
from packtrain.errors import InputError
from packtrain.planning.align import AlignedPlan

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from kinds import KINDS, open_kind, write_folders

LENGTHS = np.random.default_rng(5).integers(2, 12, 60)
SAMPLES = [{"input_ids": torch.arange(int(n)), "labels": torch.arange(int(n))} for n in LENGTHS]


def aligned(ranks: int) -> AlignedPlan:
    return pt.plan(LENGTHS, 24).align(ranks)


def first(packs: list[Any]) -> Any:
    return packs[0]


def plain(ranks: int, **options: Any) -> DataLoader[Any]:
    view = aligned(ranks)
    sampler = PackSampler(view, ranks - 1, seed=3)
    return DataLoader(PackedDataset(view, SAMPLES), sampler=sampler, collate_fn=first, **options)


def batched(ranks: int) -> DataLoader[Any]:
    view = aligned(ranks)
    return DataLoader(
        PackedDataset(view, SAMPLES), batch_sampler=PackSampler(view, ranks - 1).batches(2), collate_fn=first
    )


def iterable(ranks: int) -> DataLoader[Any]:
    source = pack_source(PackedDataset(aligned(ranks), SAMPLES), rank=ranks - 1)
    return DataLoader(source, batch_size=1, collate_fn=first)


def stream(ranks: int) -> DataLoader[Any]:
    data = StreamingPackedDataset(SAMPLES, pack_length=24, rank=ranks - 1, world_size=ranks)
    return DataLoader(data, batch_size=1, collate_fn=first)


def budget(ranks: int) -> DataLoader[Any]:
    data = TokenBudgetDataset(SAMPLES, max_seq_len=24, rank=ranks - 1, world_size=ranks)
    return DataLoader(data, batch_size=1, collate_fn=first)


LOADERS = [plain, batched, iterable, stream, budget]


@pytest.fixture
def prepare() -> Any:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader
    from accelerate.state import AcceleratorState, GradientState, PartialState

    accelerate.Accelerator(cpu=True)

    def prepared(loader: Any, **options: Any) -> Any:
        options = {"put_on_device": False, "num_processes": 2, "process_index": 1, **options}
        return prepare_data_loader(loader, **options)

    try:
        yield prepared
    finally:
        AcceleratorState._reset_state(), GradientState._reset_state(), PartialState._reset_state()


@pytest.mark.parametrize("kind", LOADERS)
def test_accelerate_does_not_share_one_ranks_packs_again(kind: Any, prepare: Any) -> None:
    assert list(kind(2))
    options = {} if isinstance(kind(2).dataset, IterableDataset) else {"use_seedable_sampler": True}
    with pytest.raises(InputError, match="accelerate would share one rank's packs") as told:
        list(prepare(kind(2), dispatch_batches=False, **options))
    assert "source.loader(collate)" in str(told.value.hint)


def test_a_dispatcher_of_rank_0_is_refused_too(prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import PartialState

    loader = prepare(plain(2), dispatch_batches=True, put_on_device=True, device=torch.device("cpu"))
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(InputError, match="accelerate would share one rank's packs"):
        next(iter(loader))


def test_the_shard_of_transformers_is_refused() -> None:
    from transformers.trainer_pt_utils import IterableDatasetShard

    with pytest.raises(InputError, match="transformers would share one rank's packs"):
        list(IterableDatasetShard(iterable(2).dataset, num_processes=2, process_index=1))


def test_packs_of_all_ranks_are_dealt_out(prepare: Any) -> None:
    whole = [pack.ids for pack in plain(1)]
    assert [pack.ids for pack in prepare(plain(1))][: len(whole) // 2] == whole[1::2]


def test_growing_packs_are_not_shared_again(tmp_path: Path, prepare: Any) -> None:
    from packtrain.data import LazyShardedDataset

    data = LazyShardedDataset(tmp_path, 1, 2)
    for loader in (DataLoader(data, sampler=data.sampler(), batch_size=1), DataLoader(data.stream())):
        with pytest.raises(InputError, match="accelerate would share one rank's packs"):
            next(iter(prepare(loader, dispatch_batches=False)))


# ------------------------------------------------------------------------------------ states
def test_a_sampler_that_a_loader_runs_ahead_of_gives_no_state(prepare: Any) -> None:
    loader = plain(1, num_workers=1, multiprocessing_context="fork", prefetch_factor=4)
    sampler = loader.sampler
    ahead = iter(loader)
    next(ahead)
    for state_dict in (sampler.state_dict, sampler.batches(1).state_dict):
        with pytest.raises(InputError, match="a loader fetches the packs: this process does not know"):
            state_dict()
    told = sampler.state_dict(micro_step=1)
    del ahead
    again = plain(1).sampler
    again.load_state_dict(told)
    whole = [pack.ids for pack in plain(1)]
    packs = PackedDataset(aligned(1), SAMPLES)
    assert [packs[position].ids for position in again] == whole[1:]
    sampler.load_state_dict(told)
    assert sampler.state_dict() == told
    sampler.set_epoch(1)
    assert sampler.state_dict()["micro_step"] == 0
    looked = plain(1)
    next(iter(prepare(looked)))
    with pytest.raises(InputError, match="a loader fetches the packs"):
        looked.sampler.state_dict()


def numbers(packs: list[Any]) -> dict[str, torch.Tensor]:
    return {"ids": torch.tensor(packs[0].ids)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    write_folders(root)
    return root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_number", [False, True])
def test_a_source_that_a_loader_runs_ahead_of_gives_no_state(
    kind: str, by_number: bool, folders: Path, prepare: Any
) -> None:
    """Workers, or accelerate's look for the end, whichever way a plain loader reads the packs."""
    source = pack_source(open_kind(kind, folders))
    data, sampler = source, None
    if kind == "growing":
        data, sampler = (source, source.sampler()) if by_number else (source.stream(), None)
    elif by_number and kind in ("planned", "exported"):
        data, sampler = source.data, source.sampler
    elif by_number:
        return  # nothing to number
    told = source.state_dict()
    for options in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        loader = DataLoader(data, sampler=sampler, batch_size=1, collate_fn=numbers, **options)
        next(iter(loader if options else prepare(loader, num_processes=1, process_index=0)))
        with pytest.raises(InputError, match="does not know how far they were used"):
            source.state_dict()
        source.load_state_dict(told)
        assert source.state_dict() == told


def test_a_sampler_without_workers_counts() -> None:
    loader = plain(1)
    packs = iter(loader)
    for count in (1, 2, 3):
        next(packs)
        assert loader.sampler.state_dict() == loader.sampler.state_dict(micro_step=count)
