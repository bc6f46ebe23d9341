"""Names of a batch: plain where a model gets them, carriers of the boundaries where somebody rebuilds it."""

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
    for one in (batch(), PackBatch(batch().items()), pickle.loads(pickle.dumps(batch()))):
        assert names(**one) == [str, str] and [type(name) for name in one] == [str, str]

    def doubled(**inputs: Any) -> Any:
        return inputs["input_ids"] * 2 + len(inputs)

    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    assert compiled(**batch()).tolist() == [[2, 4, 6, 8, 10]]


@pytest.mark.parametrize(
    "rebuild",
    [
        lambda one: type(one)({key: value for key, value in one.items()}),
        lambda one: type(one)((key, value) for key, value in one.items()),
        lambda one: type(one)(one),
        lambda one: one.copy(),
        lambda one: one.with_values({"input_ids": one["input_ids"]}),
        copy.copy,
        copy.deepcopy,
        lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: send_to_device(one, "cpu"),
        lambda one: type(one)({key: value for key, value in reversed(one.items())}),
    ],
)  # fmt: skip
def test_whoever_rebuilds_a_batch_keeps_its_boundaries(rebuild: Any) -> None:
    made = batch()
    assert made.items() == made.items() and len(made.items()) == 2
    again = rebuild(made)
    assert type(again) is PackBatch and again.lengths == (2, 3) and again.sample_ids == (7, 8)
    assert torch.equal(again["input_ids"], made["input_ids"])
