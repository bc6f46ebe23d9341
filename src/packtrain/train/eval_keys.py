"""When a run without a plan evaluates: `eval_steps`, and what has no meaning or no effect there.

    custom:   {val_jsonl: val.jsonl}
    training: {packing_mode: streaming, max_steps: 10000, eval_steps: 500}

`eval_steps` alone asks for it; without it the run is evaluated once, at its end. Streams and growing
directories have no epochs, so `eval_strategy: epoch` is refused. No torch here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from .config import RunConfig

__all__ = ["check_eval_keys", "check_evaluates"]

_KEYS = ("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "load_best_model_at_end")


def check_eval_keys(trainer: dict[str, Any]) -> None:
    """Refuse evaluation by epochs where there are none; `eval_steps` becomes `eval_strategy: steps`.

    Args:
        trainer: keys that pass through to `TrainingArguments`; changed.

    Raises:
        ConfigError: names `training.eval_steps`.
    """
    strategy = trainer.get("eval_strategy")
    if strategy == "epoch":
        raise ConfigError(
            "training.eval_strategy epoch has no meaning here: a stream is not read in epochs",
            hint="set training.eval_steps; the end of training is always evaluated",
        )
    if strategy is None and trainer.get("eval_steps"):
        trainer["eval_strategy"] = "steps"


def check_evaluates(config: RunConfig, has_val: bool) -> None:
    """Refuse keys of evaluation without anything to evaluate.

    Raises:
        ConfigError: names the key.
    """
    for key in () if has_val else _KEYS:
        if config.training.trainer.get(key) not in (None, "no", 0):
            raise ConfigError(
                f"training.{key} has no effect without validation samples",
                hint="set custom.val_jsonl, or remove the key",
            )
