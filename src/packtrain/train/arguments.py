"""What Trainer is told of a run, and what of the model's config its loss cannot keep."""

from __future__ import annotations

from typing import Any

import torch

from ..collate.boundaries import text_config
from ..errors import ConfigError
from ..template import ensure_torchvision
from .config import RunConfig

__all__ = ["refuse_auxiliary_loss", "training_arguments"]


def training_arguments(config: RunConfig, accumulation: int, *, has_eval: bool) -> Any:
    """TrainingArguments of the run: ours first, then what the file passes through.

    Raises:
        ConfigError: a value that TrainingArguments refuses.
    """
    ensure_torchvision()
    from transformers import TrainingArguments

    training = config.training
    has_cuda = torch.cuda.is_available()
    defaults = {
        "disable_tqdm": True,
        "eval_strategy": "epoch" if has_eval else "no",
        "logging_first_step": True,
        "logging_steps": 10,
        "report_to": "none",
        "use_cpu": not has_cuda,
    }
    further = {key: value for key, value in training.trainer.items() if key != "resume_from_checkpoint"}
    try:
        return TrainingArguments(
            **{**defaults, **further},
            output_dir=training.output_dir,
            seed=training.seed,
            num_train_epochs=training.num_train_epochs,
            max_steps=training.max_steps,
            learning_rate=training.learning_rate,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=accumulation,
            remove_unused_columns=False,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"training: {str(error).splitlines()[0]}", hint="correct the key; it is one of TrainingArguments"
        ) from error


def refuse_auxiliary_loss(config: Any) -> None:
    """A router loss is a mean over the tokens of a row.

    Raises:
        ConfigError: the model's config asks for one.
    """
    if getattr(text_config(config), "output_router_logits", False):
        raise ConfigError(
            "the model adds a router loss (output_router_logits)",
            hint="set output_router_logits to false in the model's config",
        )
