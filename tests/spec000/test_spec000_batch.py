"""Spec 000: packing keeps the effective batch when it forces one pack per device."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from packtrain.data import PackSampler
from packtrain.errors import ConfigError
from packtrain.planning.build import plan
from packtrain.train.config import load_config
from packtrain.train.runtime import Runtime, check_runtime, resolve_runtime, window_warnings


def runtime(world_size: int, packs: int = 96, **training: Any) -> Runtime:
    made = plan([8] * packs, pack_length=8)
    return resolve_runtime(load_config({"global_max_length": 8, "training": training}), made, world_size)


@pytest.mark.spec(
    "000",
    "`effective_batch_size` counts packs a step over all ranks",
    key="`training.effective_batch_size`",
    api="`RunConfig.accumulation`",
)
def test_effective_batch_size_is_honored_after_packing_forces_batch_size_1() -> None:
    told = runtime(2, effective_batch_size=32, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert (told.per_device_train_batch_size, told.gradient_accumulation_steps) == (1, 16)
    assert (told.packs_per_step_requested, told.packs_per_step_realised) == (32, 32)
    assert runtime(2, effective_batch_size=8).gradient_accumulation_steps == 4


@pytest.mark.spec(
    "000",
    "the product of the file is kept when the batch size becomes 1",
    key="`training.per_device_train_batch_size`",
    api="`RunConfig.accumulation`",
)
def test_global_effective_batch_is_preserved_when_effective_batch_size_is_unset() -> None:
    told = runtime(2, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert (told.per_device_train_batch_size, told.gradient_accumulation_steps) == (1, 12)
    assert (told.packs_per_step_requested, told.packs_per_step_realised) == (24, 24)


@pytest.mark.spec(
    "000",
    "not divisible by the ranks: fails fast, with what to set",
    key="`training.effective_batch_size`",
    api="`RunConfig.accumulation`",
)
def test_fail_fast_when_effective_batch_size_is_not_world_size_divisible() -> None:
    config = load_config({"global_max_length": 8, "training": {"effective_batch_size": 7}})
    with pytest.raises(
        ConfigError, match=r"training.effective_batch_size 7 .* world size 3 \(hint: use 6 or 9"
    ):
        check_runtime(config, 3)  # before anything is measured
    small = load_config({"global_max_length": 8, "training": {"effective_batch_size": 2}})
    with pytest.raises(ConfigError, match=r"\(hint: use 4\)"):
        check_runtime(small, 4)


@pytest.mark.spec(
    "000",
    "partial accumulation windows are warned of",
    key="`training.gradient_accumulation_steps`",
    api="`resolve_runtime`",
)
@pytest.mark.parametrize(
    ("batches", "accumulation", "parts"),
    [
        (
            15,
            32,
            ["15 packs per rank", "fewer than gradient_accumulation_steps 32", "30 packs instead of 64"],
        ),
        (15, 8, ["1.88 windows of gradient_accumulation_steps 8", "14 packs instead of 16"]),
        (16, 8, None),
        (16, 16, None),
        (1, 1, None),
    ],
)
def test_static_mode_warns_on_partial_epoch_accumulation_windows(
    batches: int, accumulation: int, parts: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    told = runtime(2, packs=2 * batches, gradient_accumulation_steps=accumulation)
    assert told.warnings == window_warnings(batches, accumulation, 2)
    assert len(told.warnings) == (0 if parts is None else 1)
    assert all(part in told.warnings[0] for part in parts or [])
    with caplog.at_level(logging.WARNING):
        told.log()
    assert [record.message for record in caplog.records] == told.warnings


@pytest.mark.parametrize(("drop", "packs", "per_rank", "steps"), [(False, 12, 3, 2), (True, 8, 2, 1)])
def test_pb21_lengths_told_are_what_a_pass_yields(drop: bool, packs: int, per_rank: int, steps: int) -> None:
    """10 packs, 4 ranks, accumulation 2: 12 packs and 2 steps, or 8 packs and 1 step."""
    told = runtime(4, packs=10, gradient_accumulation_steps=2, dataloader_drop_last=drop)
    assert (told.n_aligned_packs, told.steps_per_epoch) == (packs, steps)
    aligned = plan([8] * 10, pack_length=8).align(4, drop)
    for epoch in range(3):
        for rank in range(4):
            sampler = PackSampler(aligned, rank, seed=3)
            sampler.set_epoch(epoch)
            assert len(sampler) == len(list(sampler)) == per_rank
    assert bool(told.warnings) is not drop


def test_pb74_raw_samples_packs_and_steps_are_told_together(caplog: pytest.LogCaptureFixture) -> None:
    """558 samples in 20 packs, 8 packs a step: 2.5 windows, so 3 steps, and the rule is said."""
    made = plan([10] * 558, pack_length=280)
    config = load_config({"global_max_length": 280, "training": {"effective_batch_size": 8}})
    told = resolve_runtime(config, made, 1)
    assert (told.n_raw_packs, told.steps_per_epoch) == (20, 3) and told.samples_per_step == pytest.approx(
        223.2
    )
    assert "2.50 windows" in told.warnings[0] and "4 packs instead of 8" in told.warnings[0]
    with caplog.at_level(logging.INFO):
        told.log()
    assert "558 of 558 samples packed" in caplog.text and "3 steps an epoch" in caplog.text


@pytest.mark.parametrize(
    ("training", "world_size", "said"),
    [
        (
            {"samples_per_step": 8, "effective_batch_size": 8},
            2,
            "samples_per_step 8 and .*effective_batch_size",
        ),
        ({"samples_per_step": 8, "balance": "window"}, 2, "training.balance 'window'"),
        ({"sharded_lazy": True}, 1, "training.sharded_lazy needs custom.dataset"),
    ],
)
def test_requests_that_contradict_or_do_nothing_are_refused(
    training: dict[str, Any], world_size: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_runtime(load_config({"global_max_length": 8, "training": training}), world_size)


@pytest.mark.spec(
    "000",
    "`per_device_eval_batch_size` is adapted like the training one",
    key="`training.per_device_eval_batch_size`",
    api="`resolve_runtime`",
)
def test_both_batch_sizes_are_adapted_to_packs(caplog: pytest.LogCaptureFixture) -> None:
    """A device step is one pack: the training one goes into the accumulation, evaluation sums."""
    asked = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
    with caplog.at_level(logging.INFO):
        config = load_config({"global_max_length": 8, "training": asked})
    assert {record.levelname for record in caplog.records} == {"INFO"} and "8 is adapted to 1" in caplog.text
    made = plan([8] * 96, pack_length=8)
    told = resolve_runtime(config, made, 2, made)
    assert (told.per_device_train_batch_size, told.gradient_accumulation_steps) == (1, 4)
    assert told.eval is not None and told.eval["per_device_eval_batch_size"] == 1
    with pytest.raises(ConfigError, match="per_device_eval_batch_size is 0"):
        load_config({"training": {"per_device_eval_batch_size": 0}})
