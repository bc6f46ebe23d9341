"""The real SFTTrainer in `examples/trl_sft.py`, with and without its packtrain lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_hf_trainer import EXAMPLES, MARK, files, order_of, recording, script, step_losses  # noqa: F401

from packtrain.errors import ConfigError

pytestmark = [
    # Scripts ask for pinned memory, as Trainer does by default, on a machine without an accelerator.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    # Names that transformers 5.24 has begun to rename, in TRL and peft.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CPU = {"bf16": False, "gradient_checkpointing": False, "use_cpu": True}


def test_the_users_script_changes_in_at_most_six_lines() -> None:
    text = (EXAMPLES / "trl_sft.py").read_text(encoding="utf-8")
    assert 1 <= len(MARK.findall(text)) <= 6


@pytest.mark.parametrize(("file", "model"), [("vl", "tiny:qwen2_5_vl"), ("text", "tiny:qwen3")])
def test_losses_equal_those_of_the_unpacked_script(
    file: str,
    model: str,
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from trl import SFTTrainer

    count = len(Path(files[file]).read_text().splitlines())
    batch = {"per_device_train_batch_size": -(-count // 5), **CPU}
    where = saved_model(model), files[file]
    packed = script("trl_sft").main(*where, str(tmp_path / "a"), trainer_class=recording(SFTTrainer), **batch)
    order = order_of(packed)
    assert sorted(order) == list(range(count))
    packed.train()
    assert sorted(packed.seen) == list(range(count))
    assert packed.state.global_step == 5
    counted = [row["num_tokens"] for row in packed.state.log_history if "num_tokens" in row]
    assert counted[-1] == packed.packs.plan.pack_tokens.sum()

    plain = script("trl_sft", packed=False).main(
        *where, str(tmp_path / "b"), trainer_class=recording(SFTTrainer, order), **batch
    )
    plain.train()
    assert step_losses(packed) == pytest.approx(step_losses(plain), rel=1e-4)


def test_resume_equals_the_uninterrupted_run(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from trl import SFTTrainer

    where = saved_model("tiny:qwen3"), files["few_text"], str(tmp_path / "a")
    saves = {
        "save_strategy": "steps",
        "save_steps": 1,
        "trainer_class": recording(SFTTrainer),
        "num_train_epochs": 2,
        **CPU,
    }
    whole = script("trl_sft").main(*where, **saves)
    whole.train()
    again = script("trl_sft").main(*where, **saves)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert step_losses(again) == step_losses(whole)[2:]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"packing": True}, "packed already, by TRL"),
        ({"padding_free": True, "max_length": None}, "their own boundaries"),
        ({"label_smoothing_factor": 0.1}, "mean over rows"),
    ],
)
def test_settings_that_packs_cannot_keep_are_refused_in_one_line(
    settings: Any,
    told: str,
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from packtrain.integrations.trl import pack

    where = saved_model("tiny:qwen3"), files["few_text"], str(tmp_path)
    trainer = script("trl_sft", packed=False).main(*where, **{**CPU, **settings})
    with pytest.raises(ConfigError, match=told) as caught:
        pack(trainer, 1024, samples_per_step="same")
    assert "\n" not in str(caught.value)
