"""Keys that another key of the same file leaves without effect: told once, never refused.

One row a key. Keys without effect on a kind of data follow from the keys that the kind has (`aliases`), and
what only the plan or the ranks can tell is told where they are known (`train.runtime`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .data import OF_ROWS, Records

if TYPE_CHECKING:
    from .run_config import RunConfig

__all__ = ["ROWS", "without_effect"]

_READ_BEFORE = ("exported", "growing")


class Row(NamedTuple):
    """`key` has no effect where `idle` says so."""

    key: str
    why: str
    idle: Callable[[Any], Any]  # of a RunConfig


def _of_text(config: RunConfig) -> bool:
    return config.data.task == "text"


def _steps_of_packs(config: RunConfig) -> bool:
    return config.training.effective_batch_size is not None


def _one_epoch(config: RunConfig) -> bool:
    return config.training.num_train_epochs <= 1 and config.training.max_steps < 1


def _trainer(config: RunConfig, key: str) -> Any:
    return config.training.trainer.get(key)


_TEXT = "with data.task: text: documents are trained as they are"
_OF_TEXT = (
    *("data.shape", "data.placeholders", "data.media_root", "data.media_prefix", "data.frame_rate"),
    *("data.media_without_placeholder", "template.system", "template.chat_template", "template.train_on"),
    *("template.allow_dropped", "template.reasoning", "template.answer_end"),
    *("template.min_pixels", "template.max_pixels"),
    *("template.fps", "template.max_frames", "template.max_aspect_ratio"),
)

ROWS = (
    Row("data.min_fill_ratio", "without data.drop_under_filled", lambda c: not c.data.drop_under_filled),
    Row("data.encode_cache_workers", "without data.encode_cache", lambda c: c.data.encode_cache is None),
    Row(
        "data.max_skip_fraction",
        "with data.on_error: raise, which stops at the first failure",
        lambda c: c.data.on_error == "raise",
    ),
    Row("data.repeat_loss", "with data.drop_last: no pack is repeated", lambda c: c.data.drop_last),
    Row(
        "data.replan",
        "in a run of one epoch",
        _one_epoch,
    ),
    Row("data.eval_packing", "without validation samples (data.val)", lambda c: c.data.val is None),
    Row(
        "training.early_stopping_threshold",
        "without training.early_stopping_patience",
        lambda c: c.training.early_stopping_patience is None,
    ),
    Row("data.text_options", "without data.task: text", lambda c: not _of_text(c)),
    *(Row(key, _TEXT, _of_text) for key in _OF_TEXT),
    Row("data.overflow_ratio", "with data.count_mode: total", lambda c: c.data.count_mode == "total"),
    Row(
        "data.count_mode",
        "with data.overflow_ratio: 1: a row is full of tokens before it is full of supervised ones",
        lambda c: c.data.overflow_ratio == 1 and not c.data.drop_last,
    ),
    Row("data.warmup_tokens", "without data.warmup_ratio", lambda c: not c.data.warmup_ratio),
    Row(
        "training.per_device_train_batch_size",
        "beside training.effective_batch_size",
        _steps_of_packs,
    ),
    Row(
        "training.gradient_accumulation_steps",
        "beside training.effective_batch_size",
        _steps_of_packs,
    ),
    Row("training.num_train_epochs", "beside training.max_steps", lambda c: c.training.max_steps >= 1),
    Row(
        "training.dataloader_prefetch_factor",
        "without training.dataloader_num_workers",
        lambda c: not _trainer(c, "dataloader_num_workers"),
    ),
    *(
        Row(
            f"training.{key}",
            "with training.save_strategy: no",
            lambda c: _trainer(c, "save_strategy") == "no",
        )
        for key in ("save_steps", "save_total_limit", "save_only_model")
    ),
)


def without_effect(config: RunConfig, names: Mapping[str, str]) -> list[str]:
    """One line for every key that was given another value than its default, and changes nothing.

    Args:
        names: key -> the name under which the file has it, where that is another one.
    """
    told = []
    for row in ROWS:
        section, _, key = row.key.partition(".")
        of_records = key in Records.model_fields and key not in OF_ROWS
        if section == "data" and config.data.kind in _READ_BEFORE and of_records:
            continue  # told with the other keys of reading records
        held = getattr(config, section)
        fields: Any = type(held).model_fields
        if key in fields:
            value = getattr(held, key)
            given = value != fields[key].get_default(call_default_factory=True)
        else:
            value = held.trainer.get(key) if section == "training" else None
            given = value is not None
        if given and row.idle(config):
            told.append(f"{names.get(row.key, row.key)}: {value} has no effect {row.why}")
    return told
