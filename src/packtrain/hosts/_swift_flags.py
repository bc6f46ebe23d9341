"""Flags of `swift sft` whose meaning packs cannot keep, told before anything is planned."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import ConfigError
from ._checks import NOISE

logger = logging.getLogger(__name__)

#: Attention for which packs are kept apart by restarting positions.
_BY_POSITIONS = ("sdpa", "eager", "flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def check_flags(args: Any, samples_per_step: int | str | None) -> None:
    """Refuse flags that cannot keep their meaning."""
    size = args.per_device_train_batch_size
    for flag, wrong, why, hint in (
        ("streaming", args.streaming and samples_per_step, "a stream has no steps of a number of samples",
         "leave samples_per_step out, or remove it"),
        ("group_by_length", getattr(args, "group_by_length", False), "packs have equal lengths", "remove it"),
        ("label_smoothing_factor", getattr(args, "label_smoothing_factor", 0), "its loss is a mean over rows",
         "remove it"),
        ("auto_find_batch_size", getattr(args, "auto_find_batch_size", False),
         "a plan has its row length", "remove it"),
        ("average_tokens_across_devices", getattr(args, "global_world_size", 1) > 1
         and not getattr(args, "average_tokens_across_devices", True),
         "ranks hold different numbers of tokens, and the loss would not be the mean over them", "remove it"),
        ("neftune_noise_alpha", getattr(args, "neftune_noise_alpha", None), NOISE, "remove it"),
        ("sequence_parallel_size", getattr(args, "sequence_parallel_size", 1) > 1,
         "packs are not cut over ranks", "set it to 1"),
        ("truncation_strategy", args.truncation_strategy == "split", "packs hold whole rows",
         "use delete, left or right"),
        ("task_type", args.task_type not in (None, "causal_lm"), "packs are for causal language models",
         "train it unpacked"),
        ("rlhf_type", getattr(args, "rlhf_type", None), "packs are for supervised training",
         "train it unpacked"),
        ("packing_strategy", samples_per_step and args.packing_strategy == "sequential",
         "the samples of a step are spread over its packs", "remove it, or leave samples_per_step out"),
        ("attn_impl", args.attn_impl not in (None, *_BY_POSITIONS), "nobody has shown that it isolates",
         "use sdpa or flash_attention_2"),
        ("per_device_train_batch_size", size != 1 and samples_per_step is None,
         "a row is one pack, and two would exceed packing_length",
         'set it to 1, or install(samples_per_step="same")'),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(f"--{flag} {getattr(args, flag)} with packing: {why}", hint=hint)
    if args.packing_num_proc != 1:
        logger.warning(
            "--packing_num_proc %s has no effect: a plan is made in one process", args.packing_num_proc
        )
