"""`training.replan: epoch` with the real Trainer: other packs each epoch, exact resume, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from train_samples import text_sample

from packtrain.errors import ConfigError, ForeignArtefactError
from packtrain.planning.build import plan
from packtrain.planning.lengths import Lengths
from packtrain.planning.replan import replan
from packtrain.testing.tiny import tiny_model
from packtrain.train.config import load_config
from packtrain.train.sft import train

SAMPLES = [{**text_sample(3 + i % 5, i), "sample_id": i} for i in range(30)]
LENGTHS = Lengths([len(sample["input_ids"]) for sample in SAMPLES])


class Recorder:
    """A template for encoded samples that notes which are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.read.append(sample["sample_id"])
        return dict(sample)


def run(folder: Path, *, cap: int = 12, lengths: Any = LENGTHS, **training: Any) -> tuple[Any, Recorder]:
    options = {
        "output_dir": str(folder), "logging_steps": 1, "num_train_epochs": 3, "learning_rate": 5e-3,
        "save_strategy": "no", "proof": False, "replan": "epoch", **training,
    }  # fmt: skip
    made, template = plan(LENGTHS, cap), Recorder()
    config = load_config({"training": options})
    model = tiny_model("tiny:qwen3", seed=2)
    return train(config, made, SAMPLES, template, lengths=lengths, model=model), template


def test_every_epoch_trains_on_the_packs_of_its_own_plan(tmp_path: Path) -> None:
    base = plan(LENGTHS, 12)
    result, template = run(tmp_path)
    packs = len(base)
    assert result.metrics["steps"] == 3 * packs
    trained = template.read[-3 * 30 :]  # before it, some samples are read twice: do they move?
    epochs = [trained[k * 30 : (k + 1) * 30] for k in range(3)]
    for epoch, read in enumerate(epochs):
        assert sorted(read) == list(range(30)), "each sample once"
        sizes = {tuple(pack.tolist()) for pack in replan(base, LENGTHS, epoch)}
        held, left = set(), list(read)
        while left:
            pack = next(pack for pack in sizes if tuple(left[: len(pack)]) == pack)
            held.add(pack)
            left = left[len(pack) :]
        assert held == sizes
    same, _ = run(tmp_path / "same", replan=None)
    first = [loss for step, loss in result.losses if step <= packs]
    assert first == [loss for step, loss in same.losses if step <= packs]
    assert result.losses != same.losses


def test_resume_in_the_third_epoch_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    whole, _ = run(tmp_path / "whole", save_strategy="steps", save_steps=1, **options)
    steps = int(whole.metrics["steps"])
    stop = 2 * steps // 3 + 2
    checkpoint = tmp_path / "whole" / f"checkpoint-{stop}"
    state = json.loads((checkpoint / "packs.json").read_text())
    assert (state["epoch"], state["micro_step"], state["replan"]["epoch"]) == (2, 4, 2)
    assert state["replan"]["checksum"] == replan(plan(LENGTHS, 12), LENGTHS, 2).checksum
    at_end = json.loads((tmp_path / "whole" / f"checkpoint-{steps // 3}" / "packs.json").read_text())
    assert (at_end["epoch"], at_end["micro_step"]) == (0, len(plan(LENGTHS, 12)))
    again, _ = run(tmp_path / "again", resume_from_checkpoint=str(checkpoint), **options)
    worker, _ = run(
        tmp_path / "worker", resume_from_checkpoint=str(checkpoint), dataloader_num_workers=1, **options
    )
    for other in (again, worker):
        assert [loss for step, loss in other.losses if step > stop] == [
            loss for step, loss in whole.losses if step > stop
        ]
        for a, b in zip(whole.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ForeignArtefactError, match="replan 'epoch', this run has None"):
        run(tmp_path / "b", resume_from_checkpoint=str(checkpoint), replan=None, **options)
    with pytest.raises(ForeignArtefactError, match="the saved position has raw_plan"):
        run(tmp_path / "c", resume_from_checkpoint=str(checkpoint), cap=13, **options)


def test_what_cannot_hold_is_refused(tmp_path: Path) -> None:
    for change, match in (
        ({"samples_per_step": 4}, r"training\.replan 'epoch' and training\.samples_per_step 4"),
        ({"packing_drop_last": True}, r"training\.packing_drop_last"),
        ({"packing_strategy": "random_fit"}, "random_fit"),
        ({"replan": "step"}, r"training\.replan is 'step'"),
    ):
        with pytest.raises(ConfigError, match=match):
            run(tmp_path, **change)
    with pytest.raises(ConfigError, match="needs the lengths"):
        run(tmp_path, lengths=None)
