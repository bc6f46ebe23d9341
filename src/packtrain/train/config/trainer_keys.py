"""Which keys under `training` pass through to `transformers.TrainingArguments`, and which may not.

The field names are read from the file of the installed class, when a key first needs them. Settings that
would change the loss or the plan's own order are refused by name; those without effect on packs are told.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from ...checks import whole
from ...errors import ConfigError, MissingExtraError

logger = logging.getLogger(__name__)

#: Field -> (the only value it may have, why): another value would train something else.
_REFUSED: dict[str, tuple[Any, str]] = {
    "accelerator_config": (None, "the plan decides what each rank reads"),
    "average_tokens_across_devices": (True, "the loss is the mean over all supervised tokens of a step"),
    "data_seed": (None, "training.seed decides the order"),
    "do_train": (True, "packtrain train trains; use packtrain measure and plan to stop before"),
    "ignore_data_skip": (False, "a saved position is restored without reading data"),
    "parallelism_config": (None, "every rank is dealt packs of its own; other meshes are made in a script"),
    "label_smoothing_factor": (0, "the loss is computed in chunks, without label smoothing"),
}

#: Field -> (the value that a run has whatever the file says, why): another value has no effect.
_FIXED: dict[str, tuple[Any, str]] = {
    "auto_find_batch_size": (False, "a device step is one pack; a lower pack length takes less memory"),
    "batch_eval_metrics": (False, "evaluation sums token losses"),
    "eval_accumulation_steps": (None, "evaluation keeps no predictions"),
    "include_for_metrics": ([], "evaluation keeps no predictions"),
    "label_names": (None, "the labels of packs are named labels"),
    "length_column_name": ("length", "lengths are measured, not read from a column"),
    "prediction_loss_only": (True, "evaluation keeps no predictions"),
    "remove_unused_columns": (False, "it would remove the boundaries of the packs"),
    "train_sampling_strategy": (None, "the plan decides the order"),
    "use_cache": (False, "a cache switches the isolation of packed samples off"),
    "use_liger_kernel": (False, "packtrain brings its own chunked loss"),
}


#: Taken, and one whatever it says, as `per_device_train_batch_size`: a device step is one pack. Evaluation
#: sums over samples, so nothing else follows from it.
_ONE = "per_device_eval_batch_size"

#: Old name -> the name in newer transformers releases; both are accepted in the file.
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "no_cuda": "use_cpu",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
}

#: Field that newer releases lack -> (the value that says nothing, why nothing follows from another).
_GONE: dict[str, tuple[Any, str]] = {
    "group_by_length": (False, "the plan decides the order"),
    "logging_dir": (None, "transformers reads it from TENSORBOARD_LOGGING_DIR"),
    "overwrite_output_dir": (False, "training.resume decides whether a run goes on"),
    "save_safetensors": (True, "weights are always written as safetensors"),
}
_GONE |= {
    name: (said, "transformers has it no more")
    for name, said in {
        **dict.fromkeys(("include_inputs_for_metrics", "jit_mode_eval", "tpu_metrics_debug"), False),
        **dict.fromkeys(("use_legacy_prediction_loop", "use_mps_device"), False),
        **dict.fromkeys(("fp16_backend", "half_precision_backend"), "auto"),
        "fp16_opt_level": "O1",
        "past_index": -1,
        "ray_scope": "last",
        "tpu_num_cores": None,
    }.items()
}


@lru_cache(maxsize=1)
def _installed_fields() -> dict[str, str]:
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        raise MissingExtraError("transformers", "train")
    text = Path(found.origin).with_name("training_args.py").read_text(encoding="utf-8")
    (held,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    )
    rows = [node for node in held.body if isinstance(node, ast.AnnAssign)]
    named = {ast.unparse(row.target): ast.unparse(row.annotation) for row in rows}
    return {name: annotation for name, annotation in named.items() if not name.startswith("_")}


def trainer_fields() -> dict[str, str]:
    """Field name -> annotation of `TrainingArguments`, read from its file: an import takes seconds.

    Fields of other releases of transformers are among them, where they have a successor or no effect.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    fields = _installed_fields()
    renamed = {old: fields[new] for old, new in _RENAMED.items() if new in fields}
    return {"warmup_ratio": "float", **dict.fromkeys(_GONE, "Any"), **renamed, **fields}


def check_trainer_keys(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keyword arguments for `TrainingArguments`, numbers and switches as what they are; and warnings.

    YAML reads `1e-8` as text; a float field takes it as the number it is. A field that cannot be null is not
    set by it.

    Raises:
        ConfigError: a value would train something else, or is no number or switch where one is due.
    """
    checked: dict[str, Any] = {}
    told: list[str] = []
    passing = {*_installed_fields(), *_RENAMED, "warmup_ratio"} - {*_REFUSED, *_FIXED}
    for key, written in given.items():
        value = _value(key, written)
        if key in _REFUSED and value != _REFUSED[key][0]:
            raise ConfigError(
                f"training.{key} cannot be {value!r}", hint=f"{_REFUSED[key][1]}; remove the key"
            )
        why = _without_effect(key, value)
        if why is not None:
            told.append(f"training.{key} {value!r} has no effect: {why}")
        elif key == _ONE:
            whole(f"training.{key}", value, 1, hint=f"correct training.{key}", error=ConfigError)
            logger.info("training.%s %d is adapted to 1: a device step is one pack", key, value)
        elif key in passing and (value is not None or "None" in trainer_fields()[key]):
            new = _RENAMED.get(key, key)
            name = new if new in _installed_fields() else key
            if checked.setdefault(name, value) != value:
                raise ConfigError(
                    f"training.{key} is {value!r}, and training.{name} says another", hint=f"keep {name}"
                )
    if "warmup_ratio" not in _installed_fields():
        _share_of_steps(checked, told)
    return checked, told


def _value(key: str, given: Any) -> Any:
    if given is False and key.endswith("_strategy"):
        return "no"  # as YAML reads `no`
    reader = None if key == _ONE else _PLAIN.get(trainer_fields()[key].removesuffix(" | None"))
    return given if reader is None or given is None else reader(key, given)


def _without_effect(key: str, value: Any) -> str | None:
    """Why a field has no effect, where it has none."""
    said, why = {**_GONE, **_FIXED}.get(key, (value, None))
    return None if value in (said, None) or key in _installed_fields().keys() & _GONE.keys() else why


def _share_of_steps(checked: dict[str, Any], told: list[str]) -> None:
    """`warmup_ratio`, which newer releases write as `warmup_steps` below 1; steps go before the share."""
    share = checked.pop("warmup_ratio", 0)
    if not 0 <= share < 1:
        raise ConfigError(f"training.warmup_ratio is {share}, a share of all steps", hint="set 0 to below 1")
    if share and checked.get("warmup_steps"):
        told.append(f"training.warmup_ratio {share} has no effect: training.warmup_steps is set")
    elif share:
        checked["warmup_steps"] = share


def _number(key: str, given: Any) -> float:
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"training.{key} is {given!r}: expected a number", hint=f"correct training.{key}")
    if not isinstance(given, str):
        return cast("float", given)
    integer = trainer_fields()[key].removesuffix(" | None") == "int"
    return int(number) if number.is_integer() and integer else number


def _switch(key: str, given: Any) -> bool:
    """Any text is true to Python: also `false` in quotes."""
    try:
        return _SWITCH.validate_python(given)
    except ValidationError:
        raise ConfigError(
            f"training.{key} is {given!r}: expected true or false", hint=f"correct training.{key}"
        ) from None


_SWITCH = TypeAdapter(bool)

#: Annotation -> what reads a value of it; the other ones are read by Trainer.
_PLAIN: dict[str, Callable[[str, Any], Any]] = {"float": _number, "int": _number, "bool": _switch}
