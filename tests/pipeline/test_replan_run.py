"""A run with `training.replan: epoch`, and what `which` says of it afterwards."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from packtrain.errors import InputError
from packtrain.pipeline.run import run
from packtrain.pipeline.which import order_of
from packtrain.planning.replan import EpochPlans
from packtrain.train.config import load_config


def test_which_names_the_packs_of_every_epoch(
    text_run: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(text_run(replan="epoch", num_train_epochs=2, gradient_accumulation_steps=2))
    with caplog.at_level(logging.INFO, logger="packtrain"):
        result = run(config, compare=False, html=False)
    assert result.figures["replan"] == "epoch"
    told = json.loads((result.folder / "run.json").read_text())
    assert told["config"]["data"]["replan"] == "epoch"
    order = order_of(result.folder, world_size=None, grad_accum=None, seed=None, balance=None)
    assert order.packs_order.replan is not None and order.epochs == 2
    plans = EpochPlans(result.plan, order.packs_order.replan.lengths)
    assert f"epoch 1 is planned anew: checksum {plans.plan(1).checksum}" in caplog.text
    for epoch in (0, 1):
        packs = {tuple(pack.tolist()) for pack in plans.plan(epoch)}
        steps = [order.step(epoch * order.steps + k) for k in range(order.steps)]
        assert {step["epoch"] for step in steps} == {epoch}
        assert {tuple(row["ids"]) for step in steps for row in step["packs"]} == packs
        sample = steps[-1]["ids"][0]
        assert [place["step"] for place in order.sample(sample, [epoch])] == [order.steps - 1]
    assert plans.plan(1) != result.plan
    with pytest.raises(InputError, match="it knows its replan"):
        order_of(result.folder, world_size=None, grad_accum=None, seed=None, balance=None, replan="epoch")
