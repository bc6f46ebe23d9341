"""Keys that another key leaves without effect: one warning each, and none where they have one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from packtrain.train.config import load_config
from packtrain.train.config.conflicts import ROWS

#: Key -> (a value, further keys with which it has no effect, further keys with which it has one).
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "data.min_fill_ratio": (0.5, {}, {"data.drop_under_filled": True}),
    "data.encode_cache_workers": (2, {}, {"data.encode_cache": "cache"}),
    "data.max_skip_fraction": (0.1, {}, {"data.on_error": "skip"}),
    "data.repeat_loss": ("zero", {"data.drop_last": True}, {}),
    "data.replan": ("epoch", {}, {"training.num_train_epochs": 2}),
    "data.eval_packing": (False, {}, {"data.val": "demo:formulas-val"}),
    "training.early_stopping_threshold": (
        0.1,
        {},
        {"training.early_stopping_patience": 2, "data.val": "demo:formulas-val"},
    ),
    "data.text_options": ({"bos": True}, {}, {"data.task": "text"}),
    "data.overflow_ratio": (
        2.0,
        {"data.kind": "token_budget", "training.max_steps": 2},
        {"data.kind": "token_budget", "training.max_steps": 2, "data.count_mode": "effective"},
    ),
    "data.count_mode": (
        "effective",
        {"data.kind": "token_budget", "training.max_steps": 2, "data.overflow_ratio": 1.0},
        {"data.kind": "token_budget", "training.max_steps": 2},
    ),
    "data.warmup_tokens": (
        20,
        {"data.kind": "token_budget", "training.max_steps": 2},
        {"data.kind": "token_budget", "training.max_steps": 2, "data.warmup_ratio": 0.5},
    ),
    "training.per_device_train_batch_size": (2, {"training.effective_batch_size": 4}, {}),
    "training.gradient_accumulation_steps": (2, {"training.effective_batch_size": 4}, {}),
    "training.num_train_epochs": (3, {"training.max_steps": 4}, {}),
    "training.dataloader_prefetch_factor": (2, {}, {"training.dataloader_num_workers": 1}),
    "training.save_steps": (5, {"training.save_strategy": "no"}, {"training.save_strategy": "steps"}),
    "training.save_total_limit": (2, {"training.save_strategy": "no"}, {}),
    "training.save_only_model": (True, {"training.save_strategy": "no"}, {}),
}
OF_TEXT: dict[str, Any] = {
    "data.shape": "messages",
    "data.placeholders": ["<img>"],
    "data.media_root": "media",
    "data.media_prefix": "data/",
    "data.frame_rate": 2.0,
    "data.media_without_placeholder": "prepend",
    "template.system": "Be brief.",
    "template.chat_template": "trl",
    "template.train_on": "last",
    "template.allow_dropped": ["system"],
    "template.reasoning": "mask",
    "template.answer_end": "line",
    "template.min_pixels": 784,
    "template.max_pixels": 7840,
    "template.fps": 1.0,
    "template.max_frames": 8,
    "template.max_aspect_ratio": 20.0,
}
CASES |= {key: (value, {"data.task": "text"}, {}) for key, value in OF_TEXT.items()}


def told(keys: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    values: dict[str, Any] = {
        "global_max_length": 512,
        "model": {"name_or_path": "tiny:qwen2_5_vl"},
        "data": {"path": "demo:formulas"},
    }
    for key, value in keys.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="packtrain"):
        load_config(values)
    return [record.getMessage() for record in caplog.records]


def test_every_row_has_its_case() -> None:
    assert sorted(CASES) == sorted(row.key for row in ROWS)


@pytest.mark.parametrize("key", sorted(CASES))
def test_a_key_without_effect_is_one_warning(key: str, caplog: pytest.LogCaptureFixture) -> None:
    value, idle, busy = CASES[key]
    (line,) = [line for line in told({**idle, key: value}, caplog) if line.startswith(f"{key}: ")]
    assert " has no effect " in line
    assert not [line for line in told({**busy, key: value}, caplog) if "no effect" in line]
    assert not [line for line in told(idle, caplog) if line.startswith(f"{key}: ")]
