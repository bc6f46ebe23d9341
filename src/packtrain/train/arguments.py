"""What Trainer is told of a run, and what of the model's config its loss cannot keep."""

from __future__ import annotations

import functools
import inspect
import logging
from pathlib import Path
from typing import Any

import torch

from ..collate.boundaries import text_config
from ..errors import ConfigError
from ..template import ensure_torchvision
from ..world import world
from .config import RunConfig

__all__ = ["check_arguments", "refuse_auxiliary_loss", "training_arguments"]

logger = logging.getLogger(__name__)

_HINT = "correct the key; it is one of TrainingArguments"


def training_arguments(
    config: RunConfig, accumulation: int, *, has_eval: bool, kind: type | None = None
) -> Any:
    """TrainingArguments of the run: ours first, then what the file passes through.

    Args:
        kind: a class derived from TrainingArguments; None: itself.

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
        "logging_nan_inf_filter": False,  # it waits for the device in every step, and hides what went wrong
        "logging_steps": 10,
        "report_to": "none",
        "use_cpu": not has_cuda,
    }
    further = {key: value for key, value in training.trainer.items() if key != "resume_from_checkpoint"}
    if world().size == 1:
        further.pop("ddp_backend", None)  # a single process has no group
    try:
        return (kind or TrainingArguments)(
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
    except (TypeError, ValueError, ImportError) as error:
        raise _refused(error) from error


def check_arguments(config: RunConfig, *, has_eval: bool) -> None:
    """Refuse what Trainer would refuse when it is built or begins, on any number of ranks; nothing begins.

    Raises:
        ConfigError: a value or a combination that Trainer refuses, a package that a key needs, or no such
            checkpoint to go on from.
    """
    ensure_torchvision()
    from accelerate.utils import DynamoBackend
    from transformers import Trainer, TrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks

    class Unstarted(TrainingArguments):  # type: ignore[misc]
        """Knows no device and no process group."""

        @functools.cached_property
        def _setup_devices(self) -> torch.device:
            self.distributed_state, self._n_gpu = None, 0
            return torch.device("cpu")

    made = training_arguments(config, 1, has_eval=has_eval, kind=Unstarted)
    resume = config.training.trainer.get("resume_from_checkpoint")
    if isinstance(resume, str) and resume.lower() != "true" and not Path(resume).is_dir():
        raise ConfigError(
            f"there is no checkpoint folder {resume}",
            hint=f"name one, or set it to true for the last one in {config.training.output_dir}",
        )
    if made.dataloader_num_workers < 0:
        raise ConfigError(
            f"training.dataloader_num_workers is {made.dataloader_num_workers}", hint="0 or more"
        )
    backend = config.training.trainer.get("ddp_backend")
    if backend and world().size == 1:
        logger.warning("training.ddp_backend has no effect on one rank")
    if backend and not torch.distributed.is_backend_available(backend):
        raise ConfigError(f"training.ddp_backend: torch has no backend {backend} here", hint="nccl or gloo")
    named = set(made.gradient_checkpointing_kwargs or {})
    unknown = named - set(inspect.signature(torch.utils.checkpoint.checkpoint).parameters)
    if made.gradient_checkpointing and unknown:
        raise ConfigError(
            f"training.gradient_checkpointing_kwargs: torch knows no {', '.join(sorted(unknown))}",
            hint="use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop",
        )
    try:
        if made.torch_compile and made.torch_compile_backend:
            DynamoBackend(made.torch_compile_backend.upper())
        for callback in get_reporting_integration_callbacks(made.report_to):
            callback()
        if not any(name in str(made.optim) for name in ("galore", "apollo", "lomo")):  # they ask the model
            Trainer.get_optimizer_cls_and_kwargs(made, torch.nn.Linear(1, 1))
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        raise _refused(error) from error


def _refused(error: Exception) -> ConfigError:
    told = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    missing = isinstance(error, (ImportError, RuntimeError))
    return ConfigError(f"training: {told}", hint="install it, or correct the key" if missing else _HINT)


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
