"""The real SFTTrainer in `examples/trl_sft.py`, with and without its packtrain lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_hf_trainer import (
    EXAMPLES,
    MARK,
    files,  # noqa: F401
    order_of,
    recording,
    script,
    step_losses,
)

from packtrain.errors import ConfigError, IsolationError

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


@pytest.mark.parametrize(
    ("file", "model"),
    [
        pytest.param(
            "vl",
            "tiny:qwen2_5_vl",
            marks=pytest.mark.matrix(
                "pictures (Qwen-VL), losses as unpacked", "every sample once", "lengths without encoding"
            ),
        ),
        pytest.param(
            "text",
            "tiny:qwen3",
            marks=pytest.mark.matrix(
                "text, losses as unpacked", "every sample once", "tokenised before, lengths taken"
            ),
        ),
    ],
)
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


@pytest.mark.matrix("resume")
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
    ("settings", "told", "feature"),
    [
        (
            {"padding_free": True, "max_length": None},
            "packs bring their own boundaries",
            "padding_free beside packs",
        ),
        ({"eval_packing": True}, "the rows are packed already, by TRL", "the host's own packing"),
        ({"packing": True}, "the rows are packed already, by TRL", "the host's own packing"),
        ({"auto_find_batch_size": True}, "a plan has its row length", "batch size found by trying"),
        (
            {"neftune_noise_alpha": 5},
            "its noise is scaled by the length of a row",
            "noise on embeddings (NEFTune)",
        ),
        ({"label_smoothing_factor": 0.1}, "its loss is a mean over rows", "label smoothing"),
        ({"train_sampling_strategy": "group_by_length"}, "packs have equal lengths", "group by length"),
    ],
)
def test_settings_that_packs_cannot_keep_are_refused_in_one_line(
    settings: Any,
    told: str,
    feature: str,
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    from packtrain.hosts.trl import pack

    where = saved_model("tiny:qwen3"), files["few_text"], str(tmp_path)
    trainer = script("trl_sft", packed=False).main(*where, **{**CPU, **settings})
    with pytest.raises(ConfigError, match=told) as caught:
        pack(trainer, 1024, samples_per_step="same")
    line = str(caught.value)
    assert "\n" not in line
    record_property("refused", (feature, told, line))


def test_a_stream_and_rows_of_several_packs_are_refused(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    from packtrain.hosts.trl import pack

    where = saved_model("tiny:qwen3"), files["few_text"], str(tmp_path)
    trainer = script("trl_sft", packed=False).main(*where, **CPU)
    with pytest.raises(ConfigError, match="a row is one pack") as caught:
        pack(trainer, 1024)
    record_property("refused", ("batch of several packs", "a row is one pack", str(caught.value)))
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    with pytest.raises(ConfigError, match="it cannot be planned") as caught:
        pack(trainer, 1024, samples_per_step="same")
    record_property("refused", ("streams", "it cannot be planned", str(caught.value)))
    trainer = script("trl_sft", packed=False).main(*where, **CPU)
    trainer.args._n_gpu = 2
    with pytest.raises(ConfigError, match="n_gpu=2 cannot be kept") as caught:
        pack(trainer, 1024, samples_per_step="same")
    told = "one process would split packs over GPUs"
    record_property("refused", ("several GPUs in one process", told, str(caught.value)))
    trainer.args._n_gpu = 1
    trainer.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(IsolationError, match="carry a state") as stopped:
        pack(trainer, 1024, samples_per_step="same")
    record_property("refused", ("layers that carry a state", "carry a state", str(stopped.value)))


@pytest.mark.matrix("model of no listed family")
def test_a_model_that_no_family_lists_is_proven_first(
    files: Any,  # noqa: F811
    saved_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from packtrain.hosts.trl import pack

    where = saved_model("tiny:qwen3"), files["few_text"], str(tmp_path)
    trainer = script("trl_sft", packed=False).main(*where, **CPU)
    trainer.model.config.model_type = "nobody_knows"
    pack(trainer, samples_per_step="same")
    trainer.train()
    assert trainer.packs.plan.stats()["samples"] == 24
