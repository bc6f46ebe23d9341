"""Rows that move: what changes with order or epoch is refused before training, or followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from packtrain.errors import InputError
from packtrain.hosts._plan import pack_rows
from packtrain.world import World


class Rows:
    """Rows that are told of epochs; `moves` says what changes."""

    def __init__(self, moves: str | None = None) -> None:
        self.moves, self.epoch, self.reads = moves, 0, 0

    def __len__(self) -> int:
        return 24

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.reads += 1
        first = {"content": self.reads, "words": 100 + self.epoch}.get(str(self.moves), 7)
        if self.moves == "order":
            number = (number + self.epoch) % len(self)
        return {"input_ids": [first, *range(1, 3 + number % 5), 50 + number]}


def encode(row: dict[str, Any]) -> dict[str, Any]:
    ids = torch.tensor(row["input_ids"])
    return {"input_ids": ids, "labels": ids.clone()}


def made(rows: Any, folder: Path) -> Any:
    place = World(0, 1)
    return pack_rows(
        rows, encode, name="train", folder=folder, place=place, measure="encode", options={"pack_length": 32}
    )


@pytest.mark.parametrize(
    ("moves", "told"),
    [
        ("content", "is another item when it is read in another order"),
        ("order", "in the next epoch"),
    ],
)
def test_rows_that_a_plan_cannot_describe_are_refused(moves: str, told: str, tmp_path: Path) -> None:
    rows = Rows(moves)
    with pytest.raises(InputError, match=told):
        made(rows, tmp_path)
    assert rows.epoch == 0


def test_other_content_of_equal_length_follows_the_epoch(tmp_path: Path) -> None:
    from packtrain.train.mixin import pack_source

    rows = Rows("words")
    data = made(rows, tmp_path)
    assert rows.epoch == 0
    source = pack_source(data)
    for epoch in (0, 1, 2):
        source.set_epoch(epoch)
        assert {int(member["input_ids"][0]) for pack in source for member in pack} == {100 + epoch}
