"""What users of the real SFTTrainer do beside training: LoRA, checkpointing, evaluation, several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_trainer import (
    BEST,
    check_best,
    files,  # noqa: F401
    order_of,
    recording,
    script,
    step_losses,
    two_ranks,
)
from test_trl import CPU, pytestmark  # noqa: F401


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.matrix("LoRA, gradient checkpointing on and off")
def test_lora_and_gradient_checkpointing_change_nothing_in_the_equality(
    checkpointing: bool,
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from peft import LoraConfig
    from trl import SFTTrainer

    batch = {
        "per_device_train_batch_size": 12,
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        **CPU,
        "gradient_checkpointing": checkpointing,
    }
    where = saved_model("tiny:qwen2_5_vl"), files["few"]
    packed = script("trl_sft").main(*where, str(tmp_path / "a"), trainer_class=recording(SFTTrainer), **batch)
    order = order_of(packed)
    packed.train()
    trained = [name for name, value in packed.model.named_parameters() if value.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    plain = script("trl_sft", packed=False).main(
        *where, str(tmp_path / "b"), trainer_class=recording(SFTTrainer, order), **batch
    )
    plain.train()
    assert step_losses(packed) == pytest.approx(step_losses(plain), rel=1e-4)


@pytest.mark.matrix("exact eval loss")
def test_eval_loss_is_the_token_mean(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    where = saved_model("tiny:qwen2_5_vl"), files["few"]
    packed = script("trl_sft").main(*where, str(tmp_path / "a"), files["few"], **CPU)
    plain = script("trl_sft", packed=False).main(*where, str(tmp_path / "b"), files["few"], **CPU)
    total = tokens = 0.0
    plain.model.eval()
    for row in plain.eval_dataset:
        batch = plain.data_collator([row])
        count = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(plain.model(**batch).loss) * count
        tokens += count
    told = packed.evaluate()
    assert told["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert 0 <= told["eval_mean_token_accuracy"] <= 1  # a metric of TRL's own


@pytest.mark.matrix("metrics of the user over rows")
def test_metrics_of_the_user_get_the_rows_they_expect(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from packtrain.hosts.trl import pack

    where = saved_model("tiny:qwen3"), files["few_text"], str(tmp_path), files["few_text"]
    trainer = script("trl_sft", packed=False).main(*where, **CPU)
    trainer.compute_metrics = lambda found: {"rows": len(found.label_ids)}
    before = trainer.evaluate()
    pack(trainer, samples_per_step="same")
    after = trainer.evaluate()
    assert before["eval_rows"] == after["eval_rows"] == 24
    assert after["eval_loss"] == before["eval_loss"]


@pytest.mark.matrix("best model at the end")
def test_the_best_model_is_loaded_at_the_end(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    where = saved_model("tiny:qwen2_5_vl"), files["few"], str(tmp_path), files["few"]
    trainer = script("trl_sft").main(*where, **{**CPU, "per_device_train_batch_size": 12, **BEST})
    trainer.train()
    check_best(trainer)


@pytest.mark.matrix("two ranks")
def test_two_gloo_ranks_train_and_evaluate_as_one_unpacked(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    from trl import SFTTrainer

    where = saved_model("tiny:qwen2_5_vl"), files["few"]
    ranks = two_ranks("trl_sft", *where, tmp_path)
    told = "ranks hold different numbers of tokens"
    assert all(told in rank["refused"] and "\n" not in rank["refused"] for rank in ranks)
    record_property("refused", ("loss averaged per rank", told, ranks[0]["refused"]))
    assert sorted(ranks[0]["ids"] + ranks[1]["ids"]) == list(range(24))
    batch = {"per_device_train_batch_size": 8, **CPU}
    packed = script("trl_sft").main(*where, str(tmp_path / "a"), files["few"], **batch)
    plain = script("trl_sft", packed=False).main(
        *where, str(tmp_path / "b"), trainer_class=recording(SFTTrainer, order_of(packed)), **batch
    )
    plain.train()
    together = [(a + b) / 2 for a, b in zip(ranks[0]["losses"], ranks[1]["losses"], strict=True)]
    assert together == pytest.approx(step_losses(plain), rel=1e-4)
    packed.model = packed.model_wrapped = plain.model
    assert ranks[0]["eval_loss"] == pytest.approx(packed.evaluate()["eval_loss"], rel=1e-4)
