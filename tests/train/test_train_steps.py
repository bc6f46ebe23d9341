"""Steps of samples train as the unpacked batch does: same samples, same gradient, same curve."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from train_samples import text_sample

from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset, PackSampler
from packtrain.errors import ConfigError, InputError, counted
from packtrain.planning.build import plan
from packtrain.planning.lengths import Lengths
from packtrain.testing.tiny import tiny_model
from packtrain.train.config import load_config
from packtrain.train.loss import token_loss_sum
from packtrain.train.runtime import announce_steps, step_plan_options
from packtrain.train.sft import train


def some(count: int, longest: int = 40) -> list[dict[str, Any]]:
    return [text_sample(3 + (i * i * 7) % (longest - 3), i, supervised=1 + i % 9) for i in range(count)]


def by_steps(samples: list[dict[str, Any]], batch: int, multiple: int, **options: Any) -> Any:
    lengths = Lengths([len(sample["input_ids"]) for sample in samples])
    return plan(lengths, 48, samples_per_step=batch, packs_multiple=multiple, seed=1, **options)


def trainer_for(
    folder: Path, model: Any, samples: list[Any], view: Any, rank: int | None = 0, **more: Any
) -> Any:
    from transformers import TrainingArguments

    from packtrain.train.trainer import PackTrainer

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=view.grad_accum,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        **more,
    )
    return PackTrainer(model, arguments, PackedDataset(view, samples), rank=rank, balance="step")


def rank_gradients(
    folder: Path, model: Any, samples: list[Any], view: Any, step: int
) -> list[list[torch.Tensor]]:
    """Gradient of every rank's share of one step, through the trainer's own loss."""
    collate = PaddingFreeCollator(model)
    rows, trainers = [], []
    for rank in range(view.world_size):
        trainer = trainer_for(folder, model, samples, view, rank)
        positions = list(trainer.train_sampler)[step * view.grad_accum : (step + 1) * view.grad_accum]
        rows.append([collate([trainer.train_dataset[p]]) for p in positions])
        trainers.append(trainer)
    count = sum(int((batch["labels"] != -100).sum()) for row in rows for batch in row)
    found = []
    for trainer, row in zip(trainers, rows, strict=True):
        model.zero_grad()
        for batch in row:
            trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(count)).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def unpacked_gradient(model: Any, samples: list[Any]) -> tuple[float, list[torch.Tensor]]:
    """Token mean of a batch, one sample at a time."""
    collate = PaddingFreeCollator(model)
    model.zero_grad()
    batches = [collate([[sample]]) for sample in samples]
    count = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = token_loss_sum(model, batch) / count
        loss.backward()
        total += float(loss.detach())
    return total, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("step", [0, 2])
def test_one_two_and_eight_ranks_give_the_unpacked_gradient(tmp_path: Path, step: int) -> None:
    model = tiny_model("tiny:qwen3", seed=3).double()
    samples = some(64)
    made = by_steps(samples, 24, 8)
    assert made.spec.packs_per_step % 8 == 0 and made.step_count == 3
    wanted = None
    for world_size in (1, 2, 8):
        view = made.align(world_size)
        sampler = PackSampler(view, 0, 42)
        at = list(sampler)[step * view.grad_accum] // view.block
        ids = sorted(i for p in range(view.block) for i in view[at * view.block + p].tolist())
        if wanted is None:
            _, wanted = unpacked_gradient(model, [samples[i] for i in ids])
        ranks = rank_gradients(tmp_path, model, samples, view, step)
        summed = [torch.stack(grads).sum(0) for grads in zip(*ranks, strict=True)]
        for a, b in zip(summed, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_a_filler_keeps_a_rank_in_step_without_weight(tmp_path: Path) -> None:
    model = tiny_model("tiny:qwen3", seed=3).double()
    samples = some(6)
    made = by_steps(samples, 4, 8)
    view = made.align(8)
    assert len(view) == 16 and len(view.fillers) == 10
    ranks = rank_gradients(tmp_path, model, samples, view, 1)
    idle = [grads for grads in ranks if all(bool((grad == 0).all()) for grad in grads)]
    assert len(idle) == 6


def test_a_hundred_packed_steps_equal_the_unpacked_run(tmp_path: Path) -> None:
    """Against a plain loop over single samples with AdamW and the same linear schedule."""
    steps, batch = 100, 8
    samples = some(batch * 50, 30)
    made = by_steps(samples, batch, 2)
    view = made.align(1)
    model = tiny_model("tiny:qwen3", seed=2)
    plain = copy.deepcopy(model)
    trainer = trainer_for(
        tmp_path,
        model,
        samples,
        view,
        learning_rate=1e-3,
        max_steps=steps,
        weight_decay=0.0,
        max_grad_norm=0.0,
    )
    trainer.train()
    packed = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(packed) == steps and trainer.state.epoch == steps / made.step_count
    plain.train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    sampler = PackSampler(view, 0, 42)
    unpacked: list[float] = []
    for epoch in range(steps // made.step_count):
        sampler.set_epoch(epoch)
        for first in list(sampler)[:: view.grad_accum]:
            start = first // view.block * view.block
            ids = [i for p in range(start, start + view.block) for i in view[p].tolist()]
            assert len(set(ids)) == batch
            loss, _ = unpacked_gradient(plain, [samples[i] for i in sorted(ids)])
            optimizer.step()
            schedule.step()
            unpacked.append(loss)
    assert unpacked[-1] < unpacked[0] - 0.5
    assert max(abs(a - b) for a, b in zip(packed, unpacked, strict=True)) <= 1e-5


class Encoded:
    """A template for samples that are already encoded."""

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        return dict(sample)


def test_train_takes_accumulation_and_steps_from_the_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = some(50)
    config = load_config(
        {
            "training": {
                "output_dir": str(tmp_path),
                "samples_per_step": 16,
                "num_train_epochs": 2,
                "save_strategy": "no",
                "logging_steps": 1,
                "proof": False,
            }
        }
    )
    lengths = Lengths([len(sample["input_ids"]) for sample in samples])
    made = plan(lengths, 48, **step_plan_options(config, world_size=2))
    assert (made.spec.samples_per_step, made.spec.seed, made.spec.packs_per_step % 2) == (16, 42, 0)
    model = tiny_model("tiny:qwen3", seed=2)
    with caplog.at_level("INFO"):
        result = train(config, made, samples, Encoded(), lengths=lengths, model=model)
    assert result.metrics["steps"] == 2 * made.step_count == 8
    assert "an epoch has 4 steps of 16 samples" in caplog.text
    assert "the last step of every epoch holds 2 samples" in caplog.text


def test_steps_of_packs_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    aligned = plan([10] * 400, 40).align(2)
    with caplog.at_level("WARNING"):
        announce_steps(aligned, 5, seed=0)
    assert "10 steps of 10 packs, 4.0 times fewer than the 40 of 10 unpacked samples" in caplog.text
    assert "a step holds 40.0 samples (sd 0.0, 40 to 40)" in caplog.text
    assert "training.samples_per_step: 10" in caplog.text


@pytest.mark.parametrize("samples", [6, 40])
def test_a_batch_that_was_asked_for_is_not_asked_for_again(
    samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One pack a step, and fewer samples than a step has: still steps of samples, and no warning."""
    aligned = plan([10] * samples, 400, samples_per_step=32).align(1)
    with caplog.at_level(logging.INFO):
        announce_steps(aligned, 1, seed=0)
    assert not [row for row in caplog.records if row.levelno > logging.INFO]
    assert f"an epoch has {counted(-(-samples // 32), 'steps')} of 32 samples" in caplog.text
    assert f"the last step of every epoch holds {samples % 32} samples" in caplog.text


def test_contradictions_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for more, match in (
        ({"effective_batch_size": 4}, "both say what a step is"),
        ({"packing_drop_last": True}, "take packs out of steps"),
        ({"balance": "global"}, "would mix"),
    ):
        with pytest.raises(ConfigError, match=match):
            load_config({"training": {"samples_per_step": 4, **more}})
    with caplog.at_level("WARNING"):
        config = load_config({"training": {"samples_per_step": 4, "packing_strategy": "bfd"}})
    assert "no effect with samples_per_step" in caplog.text and config.training.packing_strategy == "auto"
    (tmp_path / "ids.txt").write_text("3\n1\n")
    config = load_config({"training": {"skip_samples": str(tmp_path / "ids.txt")}})
    assert step_plan_options(config, 1) == {"skip": (1, 3)}


def test_packs_dealt_to_other_ranks_than_there_are_are_refused(tmp_path: Path) -> None:
    """A process alone reads the packs of one rank only where it says which."""
    samples = [text_sample(12, i) for i in range(16)]
    view = by_steps(samples, 4, 4).align(4)
    model = tiny_model("tiny:qwen3")
    with pytest.raises(InputError, match="aligned for 4 ranks"):
        trainer_for(tmp_path, model, samples, view, rank=None)
    assert trainer_for(tmp_path, model, samples, view, rank=2).rank == 2
