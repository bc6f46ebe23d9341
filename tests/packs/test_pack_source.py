"""One contract: every kind of source yields packs, knows where it stands, and is read once by each rank."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DistributedSampler

import packtrain as pt
from packtrain.collate import PackBatch, PaddingFreeCollator
from packtrain.data import (
    LazyShardedDataset,
    Pack,
    PackedDataset,
    PackLoader,
    PackSampler,
    StreamingPackedDataset,
    TokenBudgetDataset,
    WeightedSources,
    pack_source,
)
from packtrain.errors import ChecksumError, InputError, SampleError
from packtrain.media.image import _QUIET
from packtrain.pipeline.export import export
from packtrain.store.chunks import OpenChunks

LENGTHS = np.random.default_rng(5).integers(2, 12, 60)
SAMPLES = [
    {"input_ids": torch.arange(int(n)), "labels": torch.arange(int(n)), "weight": 1.5} for n in LENGTHS
]


def planned(rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    data = PackedDataset(pt.plan(LENGTHS, 24).align(ranks), SAMPLES, lengths=LENGTHS)
    return pack_source(data, rank=rank, seed=3, **options)


def stream(rank: int = 0, ranks: int = 1) -> Any:
    return StreamingPackedDataset(SAMPLES, pack_length=24, window=12, seed=3, rank=rank, world_size=ranks)


def budget(rank: int = 0, ranks: int = 1) -> Any:
    return TokenBudgetDataset(SAMPLES, max_seq_len=24, rank=rank, world_size=ranks)


def budgeted(rank: int = 0, ranks: int = 1) -> Any:
    return TokenBudgetDataset(SAMPLES, max_seq_len=24, lengths=LENGTHS, rank=rank, world_size=ranks)


SOURCES = [planned, stream, budget, budgeted]


# ------------------------------------------------------------------------------------- the pack
def test_a_pack_is_its_samples_and_its_row() -> None:
    pack = planned()[0]
    assert isinstance(pack, list) and isinstance(pack, Pack)
    row = pack.row
    assert pack["input_ids"] is row["input_ids"] and "labels" in pack and "no such" not in pack
    assert pack["input_ids"].tolist() == [i for one in pack for i in one["input_ids"].tolist()]
    assert pack["cu_seq_lens"].tolist() == np.cumsum([0, *pack.lengths]).tolist()
    assert pack["position_ids"].tolist() == [i for n in pack.lengths for i in range(n)]
    assert pack["sample_ids"] == pack.ids and pack["weight"] == [1.5] * len(pack)
    assert pack.members() == list(pack) and {*dict(pack)} == {*pack.keys()}
    again = pickle.loads(pickle.dumps(pack))
    assert again.ids == pack.ids and again.pack_id == pack.pack_id and not again.is_filler
    filler = Pack.filler(7)
    assert filler.is_filler and filler.pack_id == -1 and filler.slot == 7 and filler["filler"]
    assert PaddingFreeCollator()([pack]).sample_ids == tuple(pack.ids)
    assert PaddingFreeCollator()([filler]).filler


# --------------------------------------------------------------------------- the members of a source
@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_yields_packs_and_stands_where_it_says(kind: Any) -> None:
    whole = [pack.ids for pack in kind()]
    assert all(isinstance(pack, Pack) for pack in kind())
    assert sorted(i for ids in whole for i in ids) == list(range(60))
    for stop in (0, 1, 3):
        source = kind()
        assert [pack.ids for pack in source.peek(2)] == whole[:2]
        packs = iter(source)
        used = [next(packs).ids for _ in range(stop)]
        state = json.loads(json.dumps(source.state_dict()))
        ahead = [next(packs).ids for _ in range(2)]
        assert json.loads(json.dumps(source.state_dict(stop))) == state or kind is stream or kind is budget
        for told in (state, source.state_dict(stop)):
            other = kind()
            other.check_state(told)
            other.load_state_dict(told)
            assert [pack.ids for pack in other.peek(1)] == whole[stop : stop + 1]
            assert used + [pack.ids for pack in other] == whole
        assert ahead == whole[stop : stop + 2]
        source.acknowledge()


@pytest.mark.parametrize("kind", SOURCES)
def test_a_loader_counts_what_left_it(kind: Any) -> None:
    whole = [pack.ids for pack in kind()]
    source = kind()
    loader = source.loader(PaddingFreeCollator())
    batches = iter(loader)
    used = [list(next(batches).sample_ids) for _ in range(3)]
    other = kind()
    other.load_state_dict(loader.state_dict())
    assert used + [pack.ids for pack in other] == whole
    other = kind()
    other.load_state_dict(source.state_dict())
    assert used + [pack.ids for pack in other] == whole


class _Worker:
    id, num_workers, dataset, seed = 0, 1, None, 0


@pytest.mark.parametrize("kind", SOURCES)
def test_a_state_of_who_did_not_read_is_refused(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kind()
    copied = copy.copy(source)  # shares what a worker's copy shares
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", _Worker)
    next(iter(copied))
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", None)
    with pytest.raises(InputError, match="does not know how far they were used"):
        source.state_dict()
    source.set_epoch(source.epoch + 1)  # the next pass has not begun
    source.state_dict()


def test_rank_and_world_size_come_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    view = pt.plan(LENGTHS, 24).align(2)
    assert list(PackSampler(view)) == list(PackSampler(view, 1)) != list(PackSampler(view, 0))
    assert (LazyShardedDataset(tmp_path).rank, LazyShardedDataset(tmp_path).world_size) == (1, 2)
    made = pack_source(PackedDataset(view.plan, SAMPLES))
    assert (made.rank, made.world_size) == (1, 2)
    for data in (StreamingPackedDataset(SAMPLES, pack_length=24), TokenBudgetDataset(SAMPLES)):
        assert (data.rank, data.world_size) == (1, 2)
    with pytest.raises(InputError, match="aligned for 4 ranks, this is rank 1 of 2"):
        PackSampler(view.plan.align(4))
    with pytest.raises(InputError, match="world_size is 4, the packs are aligned for 2 ranks"):
        pack_source(PackedDataset(view, SAMPLES), rank=0, world_size=4)


def test_a_loader_takes_options_of_both_and_no_kind_of_order(caplog: pytest.LogCaptureFixture) -> None:
    for kind in SOURCES:
        loader = pt.loader(kind(), collate=list, pin_memory=False, prefetch_factor=2, persistent_workers=True)
        assert len(list(loader)) == len(list(kind()))
        for option in ({"batch_size": 2}, {"shuffle": True}):
            with pytest.raises(InputError, match="Loader has no"):
                kind().loader(list, **option)
    caplog.clear()
    pt.loader(stream(), collate=list, seed=3, shuffle=False)
    assert "seed, shuffle: no effect on packs whose order is made (stream)" in caplog.text


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 calls it
@pytest.mark.parametrize("kind", [planned, budgeted])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_workers_of_torchdata_go_on_with_their_own_packs(kind: Any, stop: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loader() -> Any:
        return torchdata.StatefulDataLoader(
            kind(), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )

    whole = [pack.ids for pack in kind()]
    begun = loader()
    packs = iter(begun)
    used = [next(packs).ids for _ in range(stop)]
    state = json.loads(json.dumps(begun.state_dict()))
    for _ in range(2):  # a state that was loaded gives states too
        again = loader()
        again.load_state_dict(state)
        packs = iter(again)
        used.append(next(packs).ids)
        state = again.state_dict()
    last = loader()
    last.load_state_dict(state)
    assert used + [pack.ids for pack in last] == whole


# ------------------------------------------------------------------------------ sharded once more
def test_a_loader_is_not_sharded_again() -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        accelerator = accelerate.Accelerator(cpu=True)
        for source in (planned(1, 2), stream(1, 2)):
            alone = [pack.ids for pack in source]
            loader = source.loader(PaddingFreeCollator())
            ready = accelerator.prepare(loader)
            assert ready is loader
            ends = []
            for number, batch in enumerate(ready):
                assert list(batch.sample_ids) == alone[number] and sum(batch.lengths) == len(
                    batch["labels"][0]
                )
                ends.append(accelerator.gradient_state.end_of_dataloader)
            assert ends == [False] * (len(alone) - 1) + [True]
    finally:
        AcceleratorState._reset_state(), GradientState._reset_state(), PartialState._reset_state()


def test_hosts_that_replace_samplers_take_ours_as_distributed() -> None:
    loader = PackLoader(
        PackedDataset(pt.plan(LENGTHS, 24).align(2), SAMPLES), PackSampler(pt.plan(LENGTHS, 24).align(2), 1)
    )
    assert isinstance(loader.sampler, DistributedSampler) and loader.sampler.num_replicas == 2


def test_a_batch_survives_whoever_moves_it() -> None:
    batch = PaddingFreeCollator()([planned()[0]])
    for made in (
        batch.to("cpu"),
        send_to_device(batch, "cpu"),
        send_to_device(pickle.loads(pickle.dumps(batch)), "cpu"),
        PackBatch(batch),
        copy.copy(batch),
        batch.copy(),
        pickle.loads(pickle.dumps(batch)),
    ):
        assert isinstance(made, PackBatch) and made.__dict__ == batch.__dict__ and list(made) == list(batch)
        assert made.cu_seq_lens.tolist() == batch.cu_seq_lens.tolist()
    moved = batch.to("cpu")
    moved.lengths = (1,)
    assert batch.lengths != (1,) and moved.to("cpu").lengths == (1,)


# --------------------------------------------------------------------------------- smaller faults
def test_open_chunks_are_bounded() -> None:
    opened: list[int] = []
    chunks = OpenChunks(lambda number: opened.append(number) or number, limit=3)  # type: ignore[arg-type,func-returns-value]
    for number in (0, 1, 2, 0, 3, 0, 1):
        assert chunks[number] == number and len(chunks) <= 3
    assert opened == [0, 1, 2, 3, 1]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_weighted_sources_read_each_sample_once_over_all_ranks(ranks: int) -> None:
    reads: list[int] = []

    class Counted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    seen = []
    for rank in range(ranks):
        mixed = WeightedSources({"a": Counted(SAMPLES[:30]), "b": SAMPLES[30:]}, {"a": 2, "b": 1})
        data = StreamingPackedDataset(mixed, pack_length=24, window=8, rank=rank, world_size=ranks)
        seen += [len(sample["input_ids"]) for pack in data for sample in pack]
    assert len(reads) == len(set(reads)) == 30 and len(seen) == 45


def test_zeroed_samples_stand_in_the_ledger_once_and_it_is_read_once(tmp_path: Path) -> None:
    def fails(sample: Any) -> Any:
        raise SampleError("failed", "no")

    plan, ledger = pt.plan(LENGTHS, 24), tmp_path / "ledger.jsonl"
    made = [
        PackedDataset(plan, SAMPLES, fails, lengths=LENGTHS, on_error="zero", ledger_file=ledger)
        for _ in range(2)
    ]
    for data in made * 2:
        for number in range(len(data)):
            data[number]
    listed = [json.loads(line)["sample_id"] for line in ledger.read_text().splitlines()]
    assert sorted(listed) == list(range(60))
    assert made[0]._skipping.ledger._read == ledger.stat().st_size


def test_filters_of_warnings_are_put_back_whatever_threads_do() -> None:
    before = list(warnings.filters)
    first, second = threading.Event(), threading.Event()

    def outer() -> None:
        with _QUIET:
            first.set()
            second.wait(10)

    thread = threading.Thread(target=outer)
    thread.start()
    first.wait(10)
    with _QUIET:
        second.set()
        thread.join(10)
        assert warnings.filters[0][0] == "ignore"
    assert list(warnings.filters) == before


def test_one_call_opens_chats_and_one_loads_packs(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(pt.open_chats(tmp_path / "chats.jsonl", shape="auto")) == 3
    data = PackedDataset(pt.plan(LENGTHS, 24), SAMPLES)
    loader = pt.loader(data, seed=3)
    assert [list(batch.sample_ids) for batch in loader] == [pack.ids for pack in planned()]


def test_more_chunks_than_descriptors_are_read_in_order(tmp_path: Path) -> None:
    """280 chunks of a pack each, by `open_packs` and `pt.loader` in a process of 256 descriptors."""

    class Source(list):  # type: ignore[type-arg]
        fingerprint = "many"

        def where(self, number: int) -> str:
            return f"sample {number}"

    class Encoded:
        def encode(self, sample: Any) -> Any:
            return dict(sample)

        def config(self) -> dict[str, Any]:
            return {"name": "encoded"}

    ids = torch.arange(9)
    rows = Source({"input_ids": ids, "labels": ids} for _ in range(280))
    lengths = pt.Lengths([9] * 280)
    lengths.save(tmp_path / "lengths")
    pt.plan(lengths, pack_length=9).save(tmp_path / "plan", origin={"lengths": str(tmp_path / "lengths")})
    made = {"source": rows, "template": Encoded(), "format": "chunks", "maxcount": 1}
    export(tmp_path / "plan", tmp_path / "out", **made)
    script = Path(__file__).with_name("descriptors_script.py")
    told = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out")], capture_output=True, text=True, timeout=300
    )
    assert (told.returncode, told.stdout.strip()) == (0, "280 100"), told.stderr


# ----------------------------------------------------------------------------- the plan's own bytes
def test_a_stored_plan_is_hashed_once_before_it_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one process of a machine, at the contract of all trainers: other ids would be trained in silence."""
    pt.plan(LENGTHS, 24).save(tmp_path / "plan")
    hashed = []
    monkeypatch.setattr(
        pt.PackPlan, "verify", lambda plan, own=pt.PackPlan.verify: (hashed.append(plan), own(plan))
    )
    plan = pt.PackPlan.load(tmp_path / "plan")
    for rank in range(2):
        pack_source(PackedDataset(plan.align(2), SAMPLES), rank=rank)
    pack_source(PackedDataset(pt.plan(LENGTHS, 24), SAMPLES))
    assert hashed == [plan]

    file = tmp_path / "plan" / "indices.npy"
    held = bytearray(file.read_bytes())
    held[-4] ^= 1
    file.write_bytes(held)
    changed = PackedDataset(pt.PackPlan.load(tmp_path / "plan").align(2), SAMPLES)
    for local in (1, 0):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_RANK", str(local))
        if local:
            pack_source(changed, rank=1)
        else:
            with pytest.raises(ChecksumError, match="hashes to"):
                pack_source(changed, rank=0)
