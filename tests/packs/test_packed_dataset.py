"""PackedDataset: the planned samples, checked on every fetch, never replaced."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from packtrain.collate import PaddingFreeCollator
from packtrain.data import FILLER, PackedDataset
from packtrain.errors import DriftError, InputError, SampleError
from packtrain.planning.build import plan
from packtrain.planning.lengths import Lengths
from packtrain.planning.replan import EpochPlans

LENGTHS = [5, 3, 4, 2, 6, 1]


class Numbers:
    """Sample i is LENGTHS[i] tokens of value 100 + i; ids in `broken` fail with their error."""

    def __init__(self, broken: dict[int, Exception] | None = None, grown: tuple[int, ...] = ()) -> None:
        self.broken, self.grown = broken or {}, grown

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise self.broken[index]
        size = LENGTHS[index] + (index in self.grown)
        return {"ids": [100 + index] * size}

    def where(self, index: int) -> str:
        return f"numbers.jsonl:{index + 1}"


def encode(sample: dict[str, Any]) -> dict[str, Any]:
    ids = torch.tensor(sample["ids"])
    return {"input_ids": ids, "labels": ids.clone()}


def packs(cap: int = 8) -> Any:
    return plan(Lengths(LENGTHS), pack_length=cap)


def test_items_are_the_planned_samples_in_plan_order() -> None:
    made = packs()
    dataset = PackedDataset(made, Numbers(), encode)
    assert len(dataset) == len(made)
    for position, item in enumerate(dataset[p] for p in range(len(dataset))):
        ids = [member["sample_id"] for member in item]
        assert ids == made[position].tolist()
        assert [int(member["input_ids"][0]) for member in item] == [100 + i for i in ids]
    aligned = made.align(world_size=4)
    view = PackedDataset(aligned, Numbers(), encode)
    assert len(view) == 4
    repeat = int(aligned.repeated[0])
    assert [m["sample_id"] for m in view[repeat]] == made[view.pack_id(repeat)].tolist()
    with pytest.raises(IndexError):
        dataset[len(made)]
    with pytest.raises(IndexError):
        dataset[-2]


def test_encoded_samples_need_no_encode_and_stay_untouched() -> None:
    store = [{"input_ids": [7] * n, "labels": [7] * n} for n in LENGTHS]
    dataset = PackedDataset(packs(), store)
    assert sum(len(m["input_ids"]) for p in range(len(dataset)) for m in dataset[p]) == sum(LENGTHS)
    assert all(set(sample) == {"input_ids", "labels"} for sample in store)


def test_drift_is_caught_with_and_without_lengths() -> None:
    """PB-54: a plan made with another length function never reaches the model."""
    made = packs()
    pack = next(p for p in range(len(made)) if 2 in made[p].tolist())
    with pytest.raises(
        DriftError, match=r"sample 2 \(numbers.jsonl:3\) was measured with 4 tokens but encodes to 5"
    ):
        PackedDataset(made, Numbers(grown=(2,)), encode, lengths=Lengths(LENGTHS))[pack]
    total = int(made.pack_tokens[pack])
    with pytest.raises(
        DriftError, match=rf"pack {pack} was measured with {total} .* encodes to {total + 1} .*sample 2: 5"
    ):
        PackedDataset(made, Numbers(grown=(2,)), encode)[pack]
    text_only = plan([128, 10], pack_length=256)
    store = [{"input_ids": np.zeros(703, dtype=np.int64)}, {"input_ids": np.zeros(10, dtype=np.int64)}]
    with pytest.raises(DriftError, match="703"):
        PackedDataset(text_only, store, lengths=[128, 10])[0]


def test_a_sample_that_comes_back_under_another_id_is_drift() -> None:
    store = [{"input_ids": [1] * n, "sample_id": i + 1} for i, n in enumerate(LENGTHS)]
    with pytest.raises(DriftError, match="came back as sample"):
        PackedDataset(packs(), store)[0]


def test_failing_sample_raises_with_its_place() -> None:
    broken = {1: SampleError("missing_media", "a.png does not exist", hint="restore it")}
    dataset = PackedDataset(packs(), Numbers(broken), encode)
    pack = next(p for p in range(len(dataset)) if 1 in dataset.plan[p].tolist())
    with pytest.raises(SampleError, match=r"sample 1 \(numbers.jsonl:2\): a.png does not exist") as caught:
        dataset[pack]
    assert caught.value.reason == "missing_media" and caught.value.hint == "restore it"


@pytest.mark.parametrize("known", [True, False])
def test_zero_keeps_the_place_writes_the_ledger_and_substitutes_nobody(tmp_path: Path, known: bool) -> None:
    broken = {1: SampleError("missing_media", "gone"), 4: OSError("disk")}
    ledger = tmp_path / "run" / "failed.jsonl"
    dataset = PackedDataset(
        packs(),
        Numbers(broken),
        encode,
        lengths=Lengths(LENGTHS) if known else None,
        on_error="zero",
        ledger_file=ledger,
    )
    for _ in range(2):  # two epochs, one line each
        seen = [member for p in range(len(dataset)) for member in dataset[p]]
    assert sorted(m["sample_id"] for m in seen) == list(range(6))
    for member in seen:
        index = member["sample_id"]
        if index in broken:
            assert len(member["input_ids"]) == (LENGTHS[index] if known else 1)
            assert set(member["labels"].tolist()) == {-100} and member["stand_in"]
        else:
            assert set(member["input_ids"].tolist()) == {100 + index}
    rows = sorted(
        (json.loads(line) for line in ledger.read_text().splitlines()), key=lambda r: r["sample_id"]
    )
    assert [(r["sample_id"], r["reason"]) for r in rows] == [(1, "missing_media"), (4, "encode_failed")]
    assert rows[1]["detail"] == "numbers.jsonl:5: cannot be encoded: OSError: disk"
    batch = PaddingFreeCollator("qwen2_vl")([dataset[p] for p in range(len(dataset))])
    assert len(batch.sample_ids) == 6


def test_zero_never_hides_drift_and_needs_a_ledger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = PackedDataset(
        packs(), Numbers(grown=(0,)), encode, on_error="zero", ledger_file=tmp_path / "failed.jsonl"
    )
    pack = next(p for p in range(len(dataset)) if 0 in dataset.plan[p].tolist())
    with pytest.raises(DriftError):
        dataset[pack]
    with pytest.raises(InputError, match="ledger_file"):
        PackedDataset(packs(), Numbers(), encode, on_error="zero")
    for wrong in ({"on_error": "drop"}, {"on_error": "skip"}, {"max_skip_fraction": 1.5}):
        with pytest.raises(InputError, match=r"on_error|max_skip_fraction"):
            PackedDataset(packs(), Numbers(), encode, **wrong)
    caplog.clear()
    PackedDataset(packs(), Numbers(), encode, max_skip_fraction=0.1)
    assert caplog.messages == ["max_skip_fraction has no effect with on_error 'raise'"]


@pytest.mark.parametrize("known", [True, False])
def test_skip_leaves_samples_out_of_their_packs(tmp_path: Path, known: bool) -> None:
    """All others in their packs; a pack without any keeps one weightless segment; each told once."""
    for broken in ({1, 4}, set(range(6)), {0}, set()):
        ledger = tmp_path / f"{len(broken)}-{known}.jsonl"
        dataset = PackedDataset(
            packs(),
            Numbers({index: SampleError("missing_media", "gone") for index in broken}),
            encode,
            lengths=Lengths(LENGTHS) if known else None,
            on_error="skip",
            ledger_file=ledger,
        )
        for _ in range(2):
            found = [dataset[p] for p in range(len(dataset))]
        for pack, planned in zip(found, dataset.plan, strict=True):
            kept = [index for index in planned.tolist() if index not in broken]
            assert [m["sample_id"] for m in pack] == (kept or planned.tolist()[:1])
            assert all((m["labels"] != -100).any() for m in pack) == bool(kept)
        PaddingFreeCollator("qwen2_vl")(found)
        rows = [json.loads(line) for line in ledger.read_text().splitlines()] if broken else []
        assert sorted(row["sample_id"] for row in rows) == sorted(broken)


@pytest.mark.parametrize("on_error", ["skip", "zero"])
def test_a_share_of_failed_samples_stops_the_run(tmp_path: Path, on_error: str) -> None:
    def read(failed: int, limit: float | None) -> int:
        dataset = PackedDataset(
            packs(),
            Numbers({index: OSError("disk") for index in range(failed)}),
            encode,
            on_error=on_error,
            max_skip_fraction=limit,
            ledger_file=tmp_path / f"{failed}-{limit}.jsonl",
        )
        return sum(len(dataset[p]) for p in range(len(dataset)))

    assert read(3, None) and read(3, 0.5) and read(0, 0.0) == 6
    for failed, limit in ((4, 0.5), (1, 0.0), (6, 0.9)):
        with pytest.raises(
            InputError, match=f"of 6 samples were left out, more than max_skip_fraction {limit}"
        ):
            read(failed, limit)


def test_filler_position_and_workers() -> None:
    dataset = PackedDataset(packs(), Numbers(), encode)
    assert PaddingFreeCollator()([dataset[FILLER]]).filler
    again = pickle.loads(pickle.dumps(dataset))
    assert [m["sample_id"] for m in again[0]] == [m["sample_id"] for m in dataset[0]]
    loader = DataLoader(
        dataset,
        batch_size=1,
        collate_fn=PaddingFreeCollator(),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert [batch.sample_ids for batch in loader] == [tuple(p.tolist()) for p in dataset.plan]


class Heard(list):  # type: ignore[type-arg]
    """Samples that change with the epoch."""

    def set_epoch(self, epoch: int) -> None:
        for sample in self:
            sample["epoch"] = epoch


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_reaches_workers_or_is_refused_by_them(persistent: bool, start: str) -> None:
    """Samples follow in every worker; a worker that was sent one plan, and runs already, has no other."""
    lengths = [3, 4, 5, 3, 4, 5, 4, 4] * 2
    made = plan(lengths, pack_length=8)
    for replan in (None, EpochPlans(made, lengths)):
        samples = Heard({"input_ids": [1] * length} for length in lengths)
        data = PackedDataset(made, samples, replan=replan)
        options = {"num_workers": 1, "multiprocessing_context": start, "persistent_workers": persistent}
        loader = DataLoader(data, batch_size=None, **options)
        assert [pack.ids for pack in loader] == [ids.tolist() for ids in made]
        data.set_epoch(1)
        if persistent and start == "spawn" and replan is not None:
            for _ in range(2):
                with pytest.raises(InputError, match="kept the plan of the epoch before"):
                    list(loader)
            continue
        packs = list(loader)
        assert {sample["epoch"] for pack in packs for sample in pack} == {1}
        assert [pack.ids for pack in packs] == [ids.tolist() for ids in data.plan]
        assert (data.plan == made) == (replan is None)


def test_samples_that_came_or_went_since_they_were_planned_are_told() -> None:
    made = plan([4, 4, 4], pack_length=4)
    for count in (2, 4):
        samples = [{"input_ids": [1] * 4}] * count
        with pytest.raises(InputError, match=f"plan is of 3 samples, there are {count}"):
            PackedDataset(made, samples).check_still()
