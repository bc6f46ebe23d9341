"""What Trainer is told of a run, and what of the model's config its loss cannot keep."""

from __future__ import annotations

import functools
import inspect
import logging
from multiprocessing import get_all_start_methods
from pathlib import Path
from typing import Any

import torch

from ..checks import whole
from ..collate.model_traits import text_config
from ..errors import ConfigError, first_line, one_line
from ..files import parse_json
from ..template import ensure_torchvision
from ..world import World, world
from .config import RunConfig
from .config.sections import refuse

logger = logging.getLogger(__name__)

#: Keys of TrainingArguments that say how `training.compile` compiles; one of them asks for it.
_COMPILE = ("torch_compile_backend", "torch_compile_mode")

_HINT = "correct the key; it is one of TrainingArguments"

#: What an evaluation of packs gives, beside `loss/<source>`.
_METRICS = (
    *("loss", "token_acc", "tokens", "packs", "samples"),
    *("runtime", "samples_per_second", "steps_per_second"),
)

#: Files of which a checkpoint has at least one kind.
_CHECKPOINT = ("*.safetensors", "*.bin", "*.index.json", "global_step*", "pytorch_model_fsdp*", "*.distcp")

#: Optimizers that are made with the whole model in hand.
_OF_MODEL = ("galore", "apollo", "lomo")


def training_arguments(
    config: RunConfig,
    accumulation: int,
    *,
    has_eval: bool,
    steps: int | None = None,
    kind: type | None = None,
) -> Any:
    """TrainingArguments of the run: ours first, then what the file passes through.

    Args:
        steps: of an epoch; None: not known.
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
        "logging_steps": _rows_every(config, steps),
        "report_to": "none",
        "use_cpu": not has_cuda,
    }
    best = training.trainer.get("metric_for_best_model")
    if best is None and training.early_stopping_patience is not None:
        defaults["metric_for_best_model"] = best = "loss"
    if "loss/" in str(best):  # of a source; Trainer takes the end of the name for what it is
        defaults["greater_is_better"] = False
    apart = ("resume_from_checkpoint", *_COMPILE)  # Trainer would compile the whole model, row by row
    further = {key: value for key, value in training.trainer.items() if key not in apart}
    if not further.get("dataloader_num_workers"):
        further.pop("dataloader_prefetch_factor", None)  # told as without effect; Trainer would refuse it
    if world().size == 1:
        further.pop("ddp_backend", None)  # a single process has no group
    try:
        made = (kind or TrainingArguments)(
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
    except Exception as error:  # what it makes of the file's own values
        from transformers.integrations import deepspeed

        # A half-made config that transformers finds as long as the trace of this error lives: every model
        # built meanwhile would ask it.
        deepspeed.unset_hf_deepspeed_config()
        raise _refused(error) from error
    if made.n_gpu > 1:  # Trainer would cut packs over them
        logger.warning(
            "%d GPUs are seen, and one process trains on one of them (%s): start it with torchrun "
            "--nproc-per-node %d for all, or choose one with CUDA_VISIBLE_DEVICES",
            *(made.n_gpu, made.device, made.n_gpu),
        )
        made._n_gpu = 1
    return made


def _rows_every(config: RunConfig, steps: int | None) -> int:
    """Steps of a row of the log: 10, fewer where the run would have less than about 10 rows."""
    training = config.training
    whole = training.max_steps if training.max_steps > 0 else (steps or 100) * training.num_train_epochs
    return max(1, min(10, int(whole / 10)))


def check_arguments(config: RunConfig, *, has_eval: bool, place: World | None = None) -> None:
    """Refuse what Trainer would refuse when it is built, begins or ends, on any number of ranks.

    Nothing begins: no process group, no logger, no repository.

    Args:
        has_eval: packs are evaluated between steps.
        place: rank and ranks that will train; None: from the launcher.

    Raises:
        ConfigError: a value or a combination that Trainer refuses, a package that a key needs, no such
            checkpoint to go on from, or a hub that cannot be pushed to.
    """
    place = place or world()
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
    _check_resumed(config)
    _check_ranks(config, made, place)
    _check_loaders(made)
    _check_metric(config, made)
    named = set(made.gradient_checkpointing_kwargs or {})
    unknown = named - set(inspect.signature(torch.utils.checkpoint.checkpoint).parameters)
    if made.gradient_checkpointing and unknown:
        raise ConfigError(
            f"training.gradient_checkpointing_kwargs: torch knows no {', '.join(sorted(unknown))}",
            hint="use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop",
        )
    try:
        made.get_process_log_level()
        DynamoBackend(str((compile_options(config) or {}).get("backend", "inductor")).upper())
        for callback in get_reporting_integration_callbacks(made.report_to):
            callback()
        if not any(name in str(made.optim) for name in _OF_MODEL):
            _rehearse(Trainer, made)
    except Exception as error:  # what libraries make of the file's own values
        raise _refused(error) from error
    _check_hub(config, made, place)


def _rehearse(trainer: Any, made: Any) -> None:
    """The optimizer and the scheduler of the run, over one weight."""
    from transformers import get_scheduler

    with torch.random.fork_rng([]):
        tiny = torch.nn.Linear(1, 1, bias=False)
    kind, options = trainer.get_optimizer_cls_and_kwargs(made, tiny)
    steps = made.max_steps if made.max_steps > 0 else 100
    get_scheduler(
        made.lr_scheduler_type,
        optimizer=kind(tiny.parameters(), **options),
        num_warmup_steps=made.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=made.lr_scheduler_kwargs,
    )


def _check_resumed(config: RunConfig) -> None:
    """A checkpoint that is named is one; of which packs it is, is seen when they are there."""
    from .resume import asks_for_last, named_checkpoint

    asked, output = config.training.trainer.get("resume_from_checkpoint"), config.training.output_dir
    folder = named_checkpoint(
        asked, output, lambda place: place if any(place.glob("checkpoint-*/trainer_state.json")) else None
    )
    if folder is None or asks_for_last(asked):
        return
    why = None
    if not any(any(folder.glob(kind)) for kind in _CHECKPOINT):
        why = "it holds no weights"
    else:
        try:
            parse_json((folder / "trainer_state.json").read_bytes())
        except (OSError, ValueError) as error:
            why = f"its trainer_state.json cannot be read ({one_line(error, 80)})"
    if why is not None:
        raise ConfigError(
            f"{folder} is no whole checkpoint: {why}",
            hint=f"name one that was saved to its end, or set it to true for the last one in {output}",
        )


def _check_ranks(config: RunConfig, made: Any, place: World) -> None:
    backend = config.training.trainer.get("ddp_backend")
    if backend and place.size == 1:
        logger.warning("training.ddp_backend has no effect on one rank")
    if backend and not torch.distributed.is_backend_available(backend):
        raise ConfigError(f"training.ddp_backend: torch has no backend {backend} here", hint="nccl or gloo")
    if made.fsdp and place.size == 1:
        raise ConfigError(
            "training.fsdp shards over ranks, and this is one", hint="start it with torchrun, or leave it out"
        )


def _check_loaders(made: Any) -> None:
    workers, ahead = made.dataloader_num_workers, made.dataloader_prefetch_factor
    whole("training.dataloader_num_workers", workers, 0, hint="0 reads in this process", error=ConfigError)
    if workers and ahead is not None:
        whole("training.dataloader_prefetch_factor", ahead, 1, hint="leave it out for 2", error=ConfigError)
    chosen, known = getattr(made, "dataloader_multiprocessing_context", None), get_all_start_methods()
    if workers and chosen is not None and chosen not in known:
        raise ConfigError(
            f"training.dataloader_multiprocessing_context is {chosen!r}", hint=f"use {', '.join(known)}"
        )


def _check_metric(config: RunConfig, made: Any) -> None:
    """The metric by which the best checkpoint is known: Trainer looks for it after every evaluation."""
    best = str(getattr(made.save_strategy, "value", made.save_strategy)) == "best"
    name = made.metric_for_best_model
    evaluates = str(getattr(made.eval_strategy, "value", made.eval_strategy)) != "no"
    stops = config.training.early_stopping_patience is not None
    needs = "training.early_stopping_patience needs evaluations while training"
    unnamed = "training.save_strategy best needs metric_for_best_model"
    refuse(
        (stops and not evaluates, needs, "set training.eval_steps (eval_strategy)"),
        (best and name is None, unnamed, "set it to loss, for example"),
    )
    sets = [f"{held}_" if held else "" for held in config.data.validations()]
    if name is None or not sets:
        return
    plain, known = name.removeprefix("eval_"), [f"{held}{metric}" for held in sets for metric in _METRICS]
    if plain not in known and not plain.startswith(tuple(f"{held}loss/" for held in sets)):
        named = ", ".join(f"{held}{metric}" for held in sets for metric in _METRICS[:2])
        raise ConfigError(
            f"training.metric_for_best_model is {name!r}, and no evaluation gives it",
            hint=f"use {named}, or {sets[0]}loss/<source> with log_source_loss",
        )


def _check_hub(config: RunConfig, made: Any, place: World) -> None:
    """The hub can be reached, and takes a model of this name from this user."""
    if not made.push_to_hub:
        given = [key for key in config.training.trainer if key.startswith("hub_")]
        if given and place.is_writer:
            logger.warning("training.%s has no effect without push_to_hub", ", training.".join(given))
        return
    if made.save_strategy.value == "no" and place.is_writer:
        logger.warning("training.push_to_hub has no effect: save_strategy is no, so no model is written")
    if not place.is_writer:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(made.hub_model_id or Path(made.output_dir).absolute().name)
        HfApi().whoami(token=made.hub_token)
    except Exception as error:  # its errors are of several libraries
        raise ConfigError(
            f"training.push_to_hub: {one_line(error, 160)}",
            hint="name a repository (hub_model_id), log in and be online, or leave push_to_hub out",
        ) from None


def compile_options(config: RunConfig) -> dict[str, Any] | None:
    """Options of `torch.compile` for the layers; None: they are not compiled."""
    training = config.training
    options = {key.removeprefix("torch_compile_"): training.trainer.get(key) for key in _COMPILE}
    given = {key: value for key, value in options.items() if value is not None}
    return given if training.compile or given else None


def _refused(error: Exception) -> ConfigError:
    missing = isinstance(error, (ImportError, RuntimeError))
    told = first_line(error).strip() + (" is not known" if isinstance(error, KeyError) else "")
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
