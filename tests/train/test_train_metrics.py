"""What a run logs (aggregates only), repeated packs without weight, and epochs that reach the samples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from train_samples import text_sample

from packtrain.collate import PaddingFreeCollator
from packtrain.data import PackedDataset
from packtrain.errors import InputError
from packtrain.planning.build import plan
from packtrain.planning.lengths import Lengths
from packtrain.testing.tiny import tiny_model
from packtrain.train import loss as loss_module
from packtrain.train import trace as trace_module
from packtrain.train.config import load_config
from packtrain.train.consumed import Meter
from packtrain.train.loss import count_correct, shift_labels, token_loss_sum
from packtrain.train.runtime import resolve_runtime
from packtrain.train.sft import train

#: Keys of the Trainer that come with every row of the training loss.
TRAINERS = {"epoch", "grad_norm", "learning_rate", "loss", "step"}
OURS = {"token_acc", "packs", "tokens_per_s", "slots_per_s", "samples_per_pack", "step_s", "data_wait_s"}


class Encoded:
    """A template for samples that are already encoded."""

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        return dict(sample)


class Listening(list):  # type: ignore[type-arg]
    """Samples that are told of epochs."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        super().__init__(samples)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def run(folder: Path, samples: Any, cap: int = 12, **training: Any) -> Any:
    lengths = Lengths([len(sample["input_ids"]) for sample in samples])
    made = plan(lengths, pack_length=cap)
    config = load_config(
        {
            "template": {"max_length": cap},
            "training": {
                "output_dir": str(folder),
                "save_strategy": "no",
                "logging_steps": 1,
                "proof": False,
                **training,
            },
        }
    )
    model = tiny_model("tiny:qwen3", seed=2)
    runtime = resolve_runtime(config, made, 1)
    return train(config, made, samples, Encoded(), lengths=lengths, model=model, runtime=runtime), made


@pytest.mark.parametrize("fused", [True, False])
def test_correct_tokens_are_counted_as_the_models_own_logits_say(fused: bool) -> None:
    model = tiny_model("tiny:qwen3", seed=3)
    batch = PaddingFreeCollator(model)([[text_sample(20, 0, supervised=12), text_sample(9, 1)]])
    with torch.no_grad():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        targets = shift_labels(batch["labels"])
        likeliest = logits.argmax(-1)
        half = batch["labels"].clone()  # make half of the targets what the model says
        half[0, 1::2] = torch.where(targets[0, 0:-1:2] != -100, likeliest[0, 0:-1:2], half[0, 1::2])
        batch["labels"] = half
        expected = int((likeliest == shift_labels(half)).sum())
        with count_correct() as found:
            token_loss_sum(model, batch, fused=fused, chunk=3) if fused else token_loss_sum(
                model, batch, fused=False
            )
        token_loss_sum(model, batch)  # outside: nobody counts
    assert sum(int(part) for part in found) == expected > 5


def test_rows_hold_aggregates_only_and_the_first_describes_the_plan(tmp_path: Path) -> None:
    samples = [text_sample(3 + i % 5, i) for i in range(16)]
    result, made = run(tmp_path, samples, gradient_accumulation_steps=2)
    rows = [json.loads(line) for line in result.log_file.read_text().splitlines()]
    first, *rest = rows
    assert first["raw_checksum"] == made.checksum and first["aligned_checksum"] == made.align(1).checksum
    assert (first["n_raw_packs"], first["n_aligned_packs"], first["pad_needed"]) == (len(made), len(made), 0)
    assert first["fill"] == pytest.approx(made.stats()["efficiency"]) and first["dropped_samples"] == 0
    assert all(isinstance(value, int | float | str) for value in first.values())
    steps = [row for row in rest if "loss" in row]
    assert all(set(row) == TRAINERS | OURS for row in steps) and len(steps) == result.metrics["steps"]
    assert sum(row["packs"] for row in steps) == len(made)
    assert sum(row["packs"] * row["samples_per_pack"] for row in steps) == pytest.approx(16)
    assert all(row["slots_per_s"] >= row["tokens_per_s"] > 0 for row in steps)
    assert first == {**result.history[0]}


def test_the_meter_counts_neither_fillers_nor_tails() -> None:
    time = [100.0]
    meter = Meter(30, lambda values: values * 2, clock=lambda: time[0])  # two equal ranks
    collate = PaddingFreeCollator(pad_to_length=30)
    batch = collate([[text_sample(10, 0, supervised=4), text_sample(6, 1)]])
    long = PaddingFreeCollator()([[text_sample(40, 2)]])
    from packtrain.collate import filler_pack

    meter.add([batch, long, PaddingFreeCollator()([filler_pack()])])
    meter.judge([torch.tensor(7)], batch)  # of the packs of one step, not of all since the last row
    time[0] = 104.0
    row = meter.row()
    supervised = 4 + 5
    assert row == {
        "token_acc": pytest.approx(7 / supervised),
        "packs": 4.0,
        "tokens_per_s": 2 * 56 / 4,
        "slots_per_s": 2 * (30 + 40) / 4,
        "samples_per_pack": 1.5,
        "step_s": 4.0,
        "data_wait_s": 0.0,
    }
    time[0] = 105.0
    assert meter.row()["packs"] == 0


def test_the_meter_times_steps_and_waiting_for_data_but_not_what_lies_between_rows() -> None:
    time = [0.0]

    def loader() -> Any:
        for _ in range(4):
            time[0] += 0.5  # a batch takes half a second to come
            yield object()

    batches = loader()
    meter = Meter(30, lambda values: values * 3, clock=lambda: time[0])  # three equal ranks
    time[0] += 100  # before the first step
    for _ in range(2):  # two steps of two micro steps and a second of work
        step = meter.fetched(batches)
        assert len([next(step), next(step)]) == 2
        time[0] += 1.0
    row = meter.row()
    assert (row["step_s"], row["data_wait_s"]) == (2.0, 1.0)
    time[0] += 50  # an evaluation
    assert list(meter.fetched(batches)) == []
    time[0] += 3.0
    row = meter.row()
    assert (row["step_s"], row["data_wait_s"]) == (3.0, 0.0)


def test_repeated_packs_weigh_nothing_when_asked() -> None:
    samples = [text_sample(6, i) for i in range(3)]
    view = plan([6, 6, 6], pack_length=6).align(world_size=2)
    kept, zeroed = PackedDataset(view, samples), PackedDataset(view, samples, repeat_loss="zero")
    assert [zeroed.is_repeat(position) for position in range(4)] == [False, False, False, True]
    for position in range(3):
        assert torch.equal(kept[position][0]["labels"], zeroed[position][0]["labels"])
    assert kept[3][0]["sample_id"] == zeroed[3][0]["sample_id"] == 0
    assert torch.equal(kept[3][0]["labels"], samples[0]["labels"])
    assert torch.equal(kept[3][0]["input_ids"], zeroed[3][0]["input_ids"])
    assert (torch.as_tensor(zeroed[3][0]["labels"]) == -100).all()
    assert (samples[0]["labels"] != -100).any()  # the caller's sample is as it was
    model = tiny_model("tiny:qwen3", seed=3)
    token_loss_sum(model, PaddingFreeCollator(model)([zeroed[3]])).backward()
    assert all(bool((parameter.grad == 0).all()) for parameter in model.parameters())
    with pytest.raises(InputError, match="unknown repeat_loss 'half'"):
        PackedDataset(view, samples, repeat_loss="half")


def test_epochs_reach_samples_that_listen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also with workers: those of every pass start anew, and a setting that says otherwise is one line."""
    samples = Listening([text_sample(3 + i % 5, i) for i in range(8)])
    run(tmp_path, samples, num_train_epochs=3)
    looked = [1, 0]  # the look into the next epoch, and back
    assert samples.epochs == [*looked, 0, 1, 2]
    run(tmp_path, samples, dataloader_num_workers=1, dataloader_persistent_workers=True, num_train_epochs=2)
    assert samples.epochs == [*looked, 0, 1, 2, 0, 1]
    (line,) = [line for line in caplog.messages if "dataloader_persistent_workers" in line]
    assert line.startswith(
        "no effect beside packs: dataloader_persistent_workers=True (workers of every pass"
    )


def test_a_step_does_not_ask_its_device_how_many_targets_there_are(tmp_path: Path, monkeypatch: Any) -> None:
    asked = []

    def places(targets: torch.Tensor, count: int | None = None) -> torch.Tensor:
        asked.append((count, int((targets != -100).sum())))
        return found(targets, count)

    found = loss_module.trained_places
    monkeypatch.setattr(loss_module, "trained_places", places)
    monkeypatch.setattr(trace_module, "trained_places", places)
    samples = [text_sample(3 + i % 5, i, supervised=2) for i in range(8)]
    result, _ = run(tmp_path, samples)
    assert len(asked) == 2 * result.metrics["steps"]  # the loss, and the losses of samples
    assert all(count == true > 0 for count, true in asked)
    lines = (tmp_path / "sample_loss" / "rank-0.jsonl").read_text().splitlines()
    assert sum(sum(json.loads(line)["tokens"]) for line in lines) == sum(count for count, _ in asked) // 2


def test_a_loss_that_is_no_number_is_logged_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("tiny:qwen3", seed=2)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(math.nan)
    samples = [text_sample(5, i) for i in range(4)]
    made = plan(Lengths([5] * 4), pack_length=12)
    training = {"output_dir": str(tmp_path), "save_strategy": "no", "logging_steps": 1, "proof": False}
    result = train(load_config({"training": training}), made, samples, Encoded(), model=model)
    assert all(math.isnan(row["loss"]) for row in result.history if "loss" in row)


def test_a_count_holds_only_for_the_labels_that_were_counted() -> None:
    batch = PaddingFreeCollator()([[text_sample(5, 0), text_sample(4, 1)]])
    assert batch.trained is None
    batch.count_trained(batch["labels"])
    assert batch.trained == int((batch["labels"] != -100).sum()) == 7
    other = batch.with_values({**batch, "labels": batch["labels"].clone()})
    assert other.trained is None
    batch["labels"][0, 1] = -100  # in place
    assert batch.trained is None
