"""A batch: plain names, boundaries that stay with whoever moves or copies it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device

from packtrain.collate import PackBatch


def names(**inputs: Any) -> list[type]:
    return [type(name) for name in inputs]


def batch() -> PackBatch:
    made = PackBatch({"input_ids": torch.arange(5)[None], "labels": torch.arange(5)[None]})
    made.lengths, made.sample_ids = (2, 3), (7, 8)
    return made


def test_a_model_gets_plain_names_also_compiled() -> None:
    for one in (batch(), batch().to("cpu"), pickle.loads(pickle.dumps(batch()))):
        assert names(**one) == [type(name) for name, _ in one.items()] == [str, str]

    def doubled(**inputs: Any) -> Any:
        return inputs["input_ids"] * 2 + len(inputs)

    moved = {name: value.to("cpu") for name, value in batch().items()}
    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    assert compiled(**batch()).tolist() == compiled(**moved).tolist() == [[2, 4, 6, 8, 10]]


@pytest.mark.parametrize(
    "rebuild",
    [
        lambda one: one.copy(),
        lambda one: one.with_values({"input_ids": one["input_ids"]}),
        copy.copy,
        copy.deepcopy,
        lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: send_to_device(one, "cpu"),
        lambda one: one.to("meta"),
        lambda one: one.to(torch.device("cpu"), non_blocking=True),
    ],
)  # fmt: skip
def test_whoever_moves_or_copies_a_batch_keeps_its_boundaries(rebuild: Any) -> None:
    made = batch()
    again = rebuild(made)
    assert type(again) is PackBatch and again.lengths == (2, 3) and again.sample_ids == (7, 8)
    assert again["input_ids"].is_meta or torch.equal(again["input_ids"], made["input_ids"])
