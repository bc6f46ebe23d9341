"""Keys of `training.packing_mode: streaming`, and what cannot stand beside them.

    training: {packing_mode: streaming, max_steps: 10000, stream_window: 1000, stream_shuffle_buffer: 10000}
    training: {packing_mode: streaming, dyn_bsz: true, micro_batch_size: 2, max_steps: 10000}

Nothing of the training samples is measured or planned, so everything that needs a whole plan is refused.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .eval_keys import check_eval_keys
from .sections import Section, TrainingConfig

__all__ = ["check_stream_keys"]

_OF_STREAMS = (
    "dyn_bsz",
    "micro_batch_size",
    "stream_window",
    "stream_shuffle_buffer",
    "stream_encode_workers",
)

#: Keys that only a plan of all samples can carry out.
_OF_PLANS = (
    *("packing_drop_last", "samples_per_step", "skip_samples", "replan", "repeat_loss", "max_drop_fraction"),
    *("dataloader_drop_last", "static_packing_cache", "encode_cache", "dummy_media", "on_error"),
)


def check_stream_keys(sections: dict[str, Any]) -> None:
    """Refuse what contradicts `packing_mode: streaming`, or has no effect with or without it.

    Raises:
        ConfigError: names the key and what to set.
    """
    training = sections["training"]
    if training.get("packing_mode") != "streaming":
        for key in _OF_STREAMS:
            if _is_set(TrainingConfig, training, key):
                raise ConfigError(
                    f"training.{key} has no effect without training.packing_mode: streaming",
                    hint="a static plan is made from measured lengths; remove the key",
                )
        return
    for key in _OF_PLANS:
        if _is_set(TrainingConfig, training, key):
            raise ConfigError(
                f"training.{key} needs a plan of all samples, which packing_mode: streaming has not",
                hint="remove the key, or set packing_mode: static",
            )
    for key in ("save_strategy", "logging_strategy"):
        if training.get(key, training["trainer"].get(key)) == "epoch":
            raise ConfigError(
                f"training.{key} epoch has no meaning here: a stream is not read in epochs",
                hint=f"set training.{key}: steps and training.{key.removesuffix('_strategy')}_steps",
            )
    check_eval_keys(training["trainer"])
    if not isinstance(training.get("max_steps"), int) or training["max_steps"] < 1:
        raise ConfigError(
            "training.packing_mode streaming needs training.max_steps: a stream has no length",
            hint="set max_steps; the stream begins its next epoch where one ends",
        )
    if training.get("num_train_epochs", 1) != 1:
        raise ConfigError(
            "training.num_train_epochs has no effect with packing_mode: streaming", hint="set max_steps"
        )
    if training.get("micro_batch_size", 1) != 1 and training.get("dyn_bsz") is not True:
        raise ConfigError(
            "training.micro_batch_size has no effect without training.dyn_bsz", hint="set dyn_bsz: true"
        )
    if training["trainer"].get("dataloader_num_workers"):
        raise ConfigError(
            "training.dataloader_num_workers would divide the stream into as many",
            hint="set training.stream_encode_workers, which changes nothing but the speed",
        )


def _is_set(kind: type[Section], given: dict[str, Any], key: str) -> bool:
    default = kind.model_fields[key].get_default(call_default_factory=True)
    default = default.model_dump() if isinstance(default, Section) else default
    return bool(given.get(key, default) != default)
