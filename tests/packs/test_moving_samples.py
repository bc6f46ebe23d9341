"""Samples that move under a plan: followed where they listen to epochs, however wrapped, else refused."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import packtrain as pt
from packtrain.data import PackedDataset, TokenBudgetDataset, open_packs, pack_source
from packtrain.errors import InputError
from packtrain.measuring import eligibility
from packtrain.packs.source import PlannedSource
from packtrain.pipeline.export import export

COUNT = 24
LENGTHS = np.full(COUNT, 4)


class Rows(Dataset[Any]):  # type: ignore[misc]
    """Rows of four tokens; `moves` says what changes."""

    def __init__(self, moves: str | None = None, count: int = COUNT) -> None:
        self.moves, self.count, self.epoch, self.reads = moves, count, 0, 0

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.reads += 1
        first = {"reads": self.reads, "words": 100 + self.epoch}.get(str(self.moves), 7)
        if self.moves == "places":
            number = (number + 8 * self.epoch) % self.count
        return {"input_ids": torch.tensor([first, 1, 2, 50 + number])}


class Deaf(Dataset[Any]):  # type: ignore[misc]
    """A wrapper that knows nothing of epochs."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.samples[number]


class Odd(Dataset[Any]):  # type: ignore[misc]
    """A wrapper that keeps its rows under a name of its own, in a list that listens itself."""

    def __init__(self, rows: Rows) -> None:
        self.whatever = Listening([rows])

    def __len__(self) -> int:
        return len(self.whatever[0])

    def __getitem__(self, number: int) -> Any:
        return self.whatever[0][number]


class Listening(list[Any]):
    def set_epoch(self, epoch: int) -> None:
        for rows in self:
            rows.set_epoch(epoch)


WRAPPED = {
    "odd": lambda moves: Odd(Rows(moves)),
    "bare": lambda moves: Rows(moves),
    "Subset": lambda moves: Subset(Rows(moves), range(COUNT)),
    "ConcatDataset": lambda moves: ConcatDataset([Rows(moves, 8), Rows(moves, 16)]),
    "nested": lambda moves: Subset(ConcatDataset([Deaf(Rows(moves, 20)), Rows(None, 4)]), range(COUNT)),
}
ENTRANCES = {
    "pack_source": lambda samples: pack_source(PackedDataset(pt.plan(LENGTHS, 16), samples)),
    "source": lambda samples: PlannedSource(PackedDataset(pt.plan(LENGTHS, 16).align(1), samples)),
    "loader": lambda samples: pt.loader(PackedDataset(pt.plan(LENGTHS, 16), samples), collate=list),
    "budget": lambda samples: TokenBudgetDataset(samples, max_seq_len=16, lengths=LENGTHS),
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("entrance", ENTRANCES.values(), ids=ENTRANCES)
def test_what_a_plan_cannot_describe_is_refused_at_every_entrance(wrapped: Any, entrance: Any) -> None:
    with pytest.raises(InputError, match="another item when it is read in another order") as told:
        entrance(wrapped("reads"))
    assert "items must not depend on what was read before" in str(told.value.hint)
    samples = wrapped("places")
    with pytest.raises(InputError, match="in the next epoch"):
        entrance(samples)
    assert eligibility.epoch_of(samples) == 0


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_listeners_follow_the_epoch_through_their_wrappers(wrapped: Any) -> None:
    source = pack_source(PackedDataset(pt.plan(LENGTHS, 16), wrapped("words")))
    for epoch in (0, 1, 2):
        source.set_epoch(epoch)
        first = {int(sample["input_ids"][0]) for pack in source for sample in pack}
        assert first in ({100 + epoch}, {100 + epoch, 7})


@pytest.mark.parametrize("format", ["raw", "webdataset"])
def test_an_encoding_of_exported_samples_that_moves_is_refused(format: str, tmp_path: Path) -> None:
    class Chats(list[Any]):
        fingerprint = "chats"

        def where(self, number: int) -> str:
            return f"chat {number}"

    class Template:
        reads = 0

        def encode(self, sample: Any) -> Any:
            self.reads += 1
            return {"input_ids": torch.tensor([7, 1, 2, 3])}

        def config(self) -> dict[str, Any]:
            return {"name": "four"}

    def moved(sample: Any) -> Any:
        return {"input_ids": torch.tensor([template.encode(sample) and template.reads, 1, 2, 3])}

    turns = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant")]
    chats, template = Chats({"messages": turns} for _ in range(8)), Template()
    pt.Lengths([4] * 8).save(tmp_path / "l")
    pt.plan(pt.Lengths([4] * 8), 8).save(tmp_path / "p", origin={"lengths": str(tmp_path / "l")})
    export(tmp_path / "p", tmp_path / "e", source=chats, template=template, format=format)
    assert len(list(pack_source(open_packs(tmp_path / "e", template.encode)))) == 4
    with pytest.raises(InputError, match="another item when it is read in another order"):
        pack_source(open_packs(tmp_path / "e", moved))


def test_samples_are_probed_once_and_few_of_them() -> None:
    samples, calls = Rows(), []
    data = PackedDataset(pt.plan(LENGTHS, 16), samples, lambda one: calls.append(1) or one)  # type: ignore[func-returns-value]
    pack_source(data)
    read = samples.reads
    assert read == len(calls) == 4 * eligibility.FEW
    pack_source(data), pack_source(data.over(data.plan.align(2)), rank=1, world_size=2)
    pack_source(PackedDataset(data.plan, samples))
    assert samples.reads == read
    still = [{"input_ids": torch.arange(4)}] * COUNT
    pack_source(PackedDataset(data.plan, still, lambda one: calls.append(1) or one))  # type: ignore[func-returns-value]
    held = id(samples)
    assert held in eligibility._probed
    del data, samples
    gc.collect()
    assert held not in eligibility._probed


def test_an_encoder_that_moves_is_refused_and_one_that_fails_is_training_s_matter(tmp_path: Path) -> None:
    rows, calls = [{"input_ids": torch.arange(4)}] * COUNT, []

    def drawn(sample: Any) -> Any:
        calls.append(1)
        return {"input_ids": torch.full((4,), len(calls))}

    def fails(sample: Any) -> Any:
        raise OSError("disk")

    with pytest.raises(InputError, match="another item"):
        pack_source(PackedDataset(pt.plan(LENGTHS, 16), rows, drawn))
    source = pack_source(
        PackedDataset(
            pt.plan(LENGTHS, 16), rows, fails, lengths=LENGTHS, on_error="zero", ledger_file=tmp_path / "l"
        )
    )
    assert all(member["stand_in"] for pack in source for member in pack)
