"""Training on a plan with the real Trainer: exact losses, isolation, determinism, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from train_samples import ALL, samples_for, text_sample

from packtrain.collate import PaddingFreeCollator
from packtrain.data import FILLER, PackedDataset
from packtrain.errors import ConfigError, IsolationError
from packtrain.planning.build import plan
from packtrain.planning.lengths import Lengths
from packtrain.testing.tiny import tiny_model
from packtrain.train.compare import evaluate_packed_vs_unpacked
from packtrain.train.config import load_config
from packtrain.train.sft import train


class Encoded:
    """A template for samples that are already encoded."""

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        return dict(sample)


def planned(samples: list[dict[str, Any]], cap: int) -> tuple[Any, Lengths]:
    lengths = Lengths([len(sample["input_ids"]) for sample in samples])
    return plan(lengths, pack_length=cap), lengths


def run(folder: Path, model: Any, samples: list[dict[str, Any]], cap: int, **training: Any) -> Any:
    made, lengths = planned(samples, cap)
    config = load_config(
        {"training": {"output_dir": str(folder), "save_strategy": "no", "logging_steps": 1, **training}}
    )
    return train(config, made, samples, Encoded(), lengths=lengths, model=model)


def separate_mean(model: Any, samples: list[dict[str, Any]]) -> float:
    """Token mean over the samples one by one, through the model's own loss."""
    total, tokens = 0.0, 0
    collate = PaddingFreeCollator(model)
    with torch.no_grad():
        for sample in samples:
            batch = collate([[sample]])
            count = int((batch["labels"] != -100).sum())
            if count:
                total, tokens = total + float(model(**batch).loss) * count, tokens + count
    return total / tokens


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_first_trainer_loss_is_the_token_mean_of_separate_losses(
    name: str, checkpointing: bool, tmp_path: Path
) -> None:
    """Without gradient checkpointing a plain Trainer leaks here for the vision models."""
    model = tiny_model(name, seed=1)
    samples = samples_for(name, model)
    expected = separate_mean(model, samples)
    result = run(
        tmp_path, model, samples, 200, max_steps=1, gradient_checkpointing=checkpointing, learning_rate=1e-3
    )
    assert result.losses[0][0] == 1
    assert result.losses[0][1] == pytest.approx(expected, abs=3e-5)
    assert result.proof is not None and result.proof.ok
    assert not (tmp_path / "model").exists()


def text_run(folder: Path, seed: int = 7, **training: Any) -> Any:
    samples = [text_sample(3 + i % 5, i) for i in range(16)]
    model = tiny_model("tiny:qwen3", seed=2)
    options = {"seed": seed, "learning_rate": 5e-3, "proof": False, "num_train_epochs": 2, **training}
    return run(folder, model, samples, 12, **options)


def test_same_seed_same_curve_and_weights(tmp_path: Path) -> None:
    one, two = (text_run(tmp_path / name, gradient_accumulation_steps=2) for name in ("a", "b"))
    assert one.losses == two.losses and len(one.losses) == one.metrics["steps"]
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    other = text_run(tmp_path / "c", seed=8, gradient_accumulation_steps=2)
    assert other.losses != one.losses
    assert one.losses[-1][1] < one.losses[0][1]
    worker = text_run(tmp_path / "d", gradient_accumulation_steps=2, dataloader_num_workers=1)
    assert worker.losses == one.losses
    rows = [json.loads(line) for line in one.log_file.read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == [loss for _, loss in one.losses]


def test_one_process_that_sees_several_gpus_trains_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    losses = []
    for count in (0, 4):
        samples = [text_sample(n, k) for k, n in enumerate((7, 4, 12, 2))]
        real = transformers.TrainingArguments.__post_init__

        def seen(self: Any, real: Any = real, count: int = count) -> None:
            real(self)
            self._n_gpu = count

        with monkeypatch.context() as patch:
            patch.setattr(transformers.TrainingArguments, "__post_init__", seen)
            torch.manual_seed(0)
            result = run(tmp_path / str(count), tiny_model("tiny:qwen3"), samples, 16, max_steps=2)
        losses.append(result.losses)
    assert losses[0] == losses[1]
    told = [record.getMessage() for record in caplog.records if "GPUs are seen" in record.getMessage()]
    assert len(told) == 1 and "4 GPUs" in told[0] and "CUDA_VISIBLE_DEVICES" in told[0]


def test_resume_in_the_second_epoch_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    """A plain Trainer replays the order of epoch 0 here."""
    whole = text_run(tmp_path / "whole", save_strategy="steps", save_steps=1)
    steps = int(whole.metrics["steps"])
    stop = steps // 2 + 2
    assert steps // 2 < stop < steps
    checkpoint = tmp_path / "whole" / f"checkpoint-{stop}"
    again = text_run(tmp_path / "again", resume_from_checkpoint=str(checkpoint))
    assert [loss for step, loss in again.losses if step > stop] == [
        loss for step, loss in whole.losses if step > stop
    ]
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def trainer_for(folder: Path, model: Any, samples: list[Any], view: Any, rank: int = 0) -> Any:
    from transformers import TrainingArguments

    from packtrain.train.trainer import PackTrainer

    data = PackedDataset(view, samples)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    return PackTrainer(model, arguments, data, data, rank=rank)


def test_pb03_pb82_gradient_does_not_depend_on_the_split(tmp_path: Path) -> None:
    """Packs with 90, 9 and 1 supervised tokens: three micro steps, three ranks, or one row."""
    model = tiny_model("tiny:qwen3", seed=3).double()
    counts = ((91, 90), (12, 9), (4, 1), (6, 0))  # the last: a rank without any supervised token
    packs = [text_sample(size, i, supervised=trained) for i, (size, trained) in enumerate(counts)]
    made, _ = planned(packs, 91)
    trainer = trainer_for(tmp_path, model, packs, made.align(world_size=1))
    collate = PaddingFreeCollator(model)

    def gradient(rows: list[Any], scale: float = 1.0) -> tuple[float, list[torch.Tensor]]:
        batches = iter([collate([row]) for row in rows])
        step, count = trainer.get_batch_samples(batches, len(rows), torch.device("cpu"))
        assert scale != 1 or int(count) == 100
        model.zero_grad()
        total = 0.0
        for batch in step:
            loss = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(100))
            (loss * scale).backward()
            total += float(loss.detach())
        return total, [parameter.grad.clone() for parameter in model.parameters()]

    accumulated, one_row = gradient([[pack] for pack in packs]), gradient([packs])
    ranks = [gradient([[pack]], scale=len(packs)) for pack in packs]  # each rank's, then averaged
    averaged = [torch.stack(grads).mean(0) for grads in zip(*(found for _, found in ranks), strict=True)]
    assert accumulated[0] == pytest.approx(one_row[0], abs=1e-10)
    for a, b, c in zip(accumulated[1], one_row[1], averaged, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        torch.testing.assert_close(a, c, rtol=0, atol=1e-10)
    assert ranks[3][0] == 0 and all(bool((grad == 0).all()) for grad in ranks[3][1])


def test_pb59_filler_weighs_nothing(tmp_path: Path) -> None:
    model = tiny_model("tiny:qwen3", seed=3)
    sample = text_sample(6, 0)
    made, _ = planned([sample], 8)
    trainer = trainer_for(tmp_path, model, [sample], made.align(world_size=1))
    collate = PaddingFreeCollator(model)
    batches = [collate([[sample]]), collate([trainer.train_dataset[FILLER]])]
    step, count = trainer.get_batch_samples(iter(batches), 2, torch.device("cpu"))
    assert step[1].filler and int(count) == 5
    trainer.compute_loss(model, step[1], num_items_in_batch=count).backward()
    assert all(bool((parameter.grad == 0).all()) for parameter in model.parameters())


def test_pb52_plain_trainer_cannot_remove_the_boundaries(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    samples = [text_sample(4, i) for i in range(6)]
    made, _ = planned(samples, 8)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=1, remove_unused_columns=True, use_cpu=True
    )
    trainer = Trainer(
        tiny_model("tiny:qwen3"),
        arguments,
        data_collator=PaddingFreeCollator(),
        train_dataset=PackedDataset(made, samples),
    )
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == 3 and all(batch["cu_seq_lens_q"].tolist() == [0, 4, 8] for batch in batches)


def test_a_step_without_supervised_tokens_is_zero_and_counted(tmp_path: Path) -> None:
    model = tiny_model("tiny:qwen3", seed=3)
    sample = text_sample(6, 0, supervised=0)
    made, _ = planned([sample], 8)
    trainer = trainer_for(tmp_path, model, [sample], made.align(world_size=1))
    batches, count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
    loss = trainer.compute_loss(model, batches[0], num_items_in_batch=count)
    assert float(loss.detach()) == 0 and trainer.unsupervised_steps == 1


def test_evaluation_is_the_exact_token_mean_and_repeats_have_no_weight(
    tmp_path: Path, tiny: dict[str, Any]
) -> None:
    model = tiny["tiny:qwen3"]
    samples = [text_sample(n, i) for i, n in enumerate((9, 3, 14, 6, 2, 11, 5))]
    made, _ = planned(samples, 16)
    expected = separate_mean(model, samples)
    view = made.align(world_size=3)
    assert len(view.repeated) > 0
    found = [trainer_for(tmp_path, model, samples, view, rank).evaluate() for rank in range(3)]
    tokens = sum(metrics["eval_tokens"] for metrics in found)
    loss = sum(metrics["eval_loss"] * metrics["eval_tokens"] for metrics in found) / tokens
    assert loss == pytest.approx(expected, abs=3e-5)
    assert sum(metrics["eval_samples"] for metrics in found) == len(samples)
    assert sum(metrics["eval_packs"] for metrics in found) == len(made)
    whole = trainer_for(tmp_path, model, samples, made.align(world_size=1)).evaluate()
    assert whole["eval_loss"] == pytest.approx(expected, abs=3e-5)
    compared = evaluate_packed_vs_unpacked(model, PackedDataset(view, samples))
    assert (
        abs(compared.difference) <= 3e-5 and compared.samples == len(samples) and compared.packs == len(made)
    )
    assert compared.tokens == tokens and compared.unpacked == pytest.approx(expected, abs=3e-5)


def test_train_evaluates_logs_and_saves(tmp_path: Path) -> None:
    samples = [text_sample(3 + i % 5, i) for i in range(8)]
    made, lengths = planned(samples, 12)
    config = load_config(
        {
            "model": {"name_or_path": "tiny:qwen3"},
            "training": {"output_dir": str(tmp_path), "num_train_epochs": 1, "effective_batch_size": 2},
        }
    )
    seen: list[tuple[int, int]] = []
    result = train(
        config,
        made,
        samples,
        Encoded(),
        lengths=lengths,
        val=(made, samples, lengths),
        progress=lambda done, total: seen.append((done, total)),
    )
    steps = -(-len(made) // 2)
    assert seen == [(step + 1, steps) for step in range(steps)]
    assert result.metrics["eval_samples"] == 8 and result.metrics["steps"] == steps
    assert result.metrics["eval_loss"] == pytest.approx(separate_mean(result.model, samples), abs=3e-5)
    assert (tmp_path / "model" / "config.json").is_file()
    from packtrain.train.model import load_model

    again = load_model(str(tmp_path / "model"))
    for a, b in zip(result.model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_leaking_setups_do_not_start(tmp_path: Path) -> None:
    samples = [text_sample(n, i) for i, n in enumerate((5, 4))]
    model = tiny_model("tiny:qwen3")
    model.config.use_cache = True
    with pytest.raises(IsolationError, match="use_cache is on"):
        run(tmp_path, model, samples, 16)
    model = tiny_model("tiny:qwen3")
    model.config.model_type = "new_kind"
    with pytest.raises(IsolationError, match=r"nobody has shown that new_kind .* training.proof is off"):
        run(tmp_path, model, samples, 16, proof=False, max_steps=1)
    assert run(tmp_path, model, samples, 16, max_steps=1).proof.ok
    leaking = tiny_model("tiny:qwen3")
    leaking.config.model_type = "new_kind"
    leaking.model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "use_cache": True}), with_kwargs=True
    )
    with pytest.raises(
        IsolationError, match=r"packed samples read each other in new_kind, first in .*layers\.0"
    ):
        run(tmp_path, leaking, samples, 16, max_steps=1)


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    samples = [text_sample(n, i) for i, n in enumerate((5, 4))]
    model = tiny_model("tiny:qwen3")
    with pytest.raises(ConfigError, match="samples_per_step 2 and"):
        run(tmp_path, model, samples, 16, samples_per_step=2, effective_batch_size=4)
    with pytest.raises(ConfigError, match=r"optim|typo"):
        run(tmp_path, model, samples, 16, optim="typo", proof=False)
    model.config.output_router_logits = True
    with pytest.raises(ConfigError, match="output_router_logits"):
        run(tmp_path, model, samples, 16)


def test_zeroed_samples_train_without_weight_and_are_written_down(tmp_path: Path) -> None:
    from packtrain.errors import SampleError

    class Faulty(Encoded):
        def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
            if sample["sample_id"] == 1:
                raise SampleError("missing_media", "gone.png does not exist")
            return super().encode(sample)

    samples = [text_sample(n, i) for i, n in enumerate((5, 4, 3))]
    made, lengths = planned(samples, 16)
    model = tiny_model("tiny:qwen3", seed=4)
    expected = separate_mean(model, [samples[0], samples[2]])
    config = load_config(
        {"training": {"output_dir": str(tmp_path), "save_strategy": "no", "max_steps": 1, "on_error": "zero"}}
    )
    result = train(config, made, samples, Faulty(), lengths=lengths, model=model)
    assert result.losses[0][1] == pytest.approx(expected, abs=3e-5)
    rows = [json.loads(line) for line in (tmp_path / "failed.jsonl").read_text().splitlines()]
    assert [(row["sample_id"], row["reason"]) for row in rows] == [(1, "missing_media")]
