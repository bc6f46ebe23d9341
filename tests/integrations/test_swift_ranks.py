"""What our ms-swift plugin refuses, without ms-swift: unknown ranks, and tasks that are not packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import ConfigError


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_ranks_that_the_trainer_does_not_know_are_refused_in_one_line(
    saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without `--use_cpu true` two CPU processes are two trainers of one rank each: both would train all."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from packtrain.hosts.ms_swift import SwiftPacks, _take_over

    plan = pt.plan(pt.Lengths(np.array([5, 6, 7, 8], np.int64)), pack_length=8)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(saved_model("tiny:qwen3")),
        args=TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True),
        train_dataset=SwiftPacks(plan.align(2), [None] * 4),
    )
    before = type(trainer)
    pipeline = SimpleNamespace(args=SimpleNamespace(attn_impl="sdpa"), template=None)
    with pytest.raises(ConfigError, match="2 processes were started but the trainer knows of 1") as caught:
        _take_over(pipeline, trainer, None)
    assert "--use_cpu true" in caught.value.hint and "\n" not in str(caught.value)
    trainer.train_dataset = SwiftPacks(plan.align(1), [None] * 4)
    trainer.args._n_gpu = 2
    with pytest.raises(ConfigError, match="n_gpu=2 cannot be kept: one process would split packs over GPUs"):
        _take_over(pipeline, trainer, None)
    assert type(trainer) is before


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_every_model_must_pass_the_proof_when_training_begins(
    saved_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from packtrain.hosts.ms_swift import SwiftPacks, _take_over
    from packtrain.train.mixin import ProofAtBegin

    plan = pt.plan(pt.Lengths(np.array([5] * 4, np.int64)), pack_length=10)
    rows = [{"input_ids": [5 + i, 9, 7, 11 + i, 3], "labels": [-100, 9, 7, 11 + i, 3]} for i in range(4)]
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(saved_model("tiny:qwen3"), dtype="float32"),
        args=TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True),
        train_dataset=SwiftPacks(plan.align(1), rows),
    )
    _take_over(SimpleNamespace(args=SimpleNamespace(attn_impl="sdpa"), template=None), trainer, None)
    kinds = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert kinds.index("CacheOff") < kinds.index("ProofAtBegin")  # it is proven as it trains
    (proof,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, ProofAtBegin)]
    first = [tuple(member["input_ids"]) for pack in proof.packs() for member in pack]
    assert sorted(first) == sorted(tuple(row["input_ids"]) for row in rows)


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("sequence_parallel_size", 2, "packs are not cut over ranks"),
        ("task_type", "seq_cls", "packs are for causal language models"),
        ("rlhf_type", "dpo", "packs are for supervised training"),
        ("neftune_noise_alpha", 5.0, "its noise is scaled by the length of a row"),
    ],
)
def test_tasks_that_are_not_packed_are_refused_in_one_line(flag: str, value: object, told: str) -> None:
    from packtrain.hosts.ms_swift import check_flags

    kept = {
        "per_device_train_batch_size": 1,
        "streaming": False,
        "packing_num_proc": 1,
        "truncation_strategy": "delete",
        "task_type": "causal_lm",
        "attn_impl": "sdpa",
    }
    check_flags(SimpleNamespace(**kept), None)
    with pytest.raises(ConfigError, match=f"--{flag} {value} with packing: {told}") as caught:
        check_flags(SimpleNamespace(**{**kept, flag: value}), None)
    assert "\n" not in str(caught.value)


def test_a_packing_strategy_is_followed_or_refused() -> None:
    """With `samples_per_step` it has no effect."""
    from packtrain.hosts.ms_swift import check_flags, install

    kept = {
        "per_device_train_batch_size": 8,
        "streaming": False,
        "packing_num_proc": 1,
        "truncation_strategy": "delete",
        "task_type": "causal_lm",
        "attn_impl": "sdpa",
        "packing_strategy": "binpack",
    }
    check_flags(SimpleNamespace(**kept), "same")
    with pytest.raises(
        ConfigError, match="--packing_strategy sequential with packing: the samples of a step"
    ):
        check_flags(SimpleNamespace(**{**kept, "packing_strategy": "sequential"}), "same")
    check_flags(
        SimpleNamespace(**{**kept, "packing_strategy": "sequential", "per_device_train_batch_size": 1}), None
    )
    with pytest.raises(ConfigError, match="samples_per_step is 0"):
        install(samples_per_step=0)


def _flags(**given: Any) -> SimpleNamespace:
    plain = {
        "per_device_train_batch_size": 1, "streaming": False, "truncation_strategy": "delete",
        "packing_strategy": "binpack", "attn_impl": "sdpa",
        "packing_num_proc": 1, "task_type": None,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **given})


def test_streams_and_processes_of_packing(caplog: pytest.LogCaptureFixture) -> None:
    """`--streaming` is packed, but not by a number of samples; `--packing_num_proc` is one line."""
    from packtrain.hosts.ms_swift import check_flags

    check_flags(_flags(streaming=True), None)
    assert not caplog.records
    with pytest.raises(ConfigError, match="--streaming True with packing: a stream has no steps of a number"):
        check_flags(_flags(streaming=True), "same")
    check_flags(_flags(packing_num_proc=4), None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "--packing_num_proc 4 has no effect: a plan is made in one process"
