"""Keys of training on a directory of chunks that may still grow, and what cannot stand beside them.

    custom:   {dataset: packed/}
    training: {sharded_lazy: true, sharded_lazy_pre_packed: true, packing: false,
               train_dataloader_shuffle: false, max_steps: 1000}

One switch says that the data are packs already (`sharded_lazy`); the others of the launch recipe have to
agree with it, because two switches that disagree train across samples without a sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .eval_keys import check_eval_keys
from .sections import CustomConfig, Section, TrainingConfig

__all__ = ["check_lazy_keys"]

#: Keys of a static plan: they have no effect on packs that were made before.
_OF_PLANS = (
    *("packing_mode", "packing_strategy", "packing_allow_single_long", "packing_drop_last"),
    *("packing_min_fill_ratio", "samples_per_step", "skip_samples", "replan", "balance", "repeat_loss"),
    *("dataloader_drop_last", "on_error", "max_drop_fraction", "static_packing_cache", "dummy_media"),
)
_OF_SOURCES = ("train_jsonl", "fusion_config", "columns", "placeholders", "media_root", "kind")
_OF_VALIDATION = _OF_SOURCES[2:]  # how the records of custom.val_jsonl are read


def check_lazy_keys(sections: Mapping[str, dict[str, Any]]) -> None:
    """Refuse what contradicts `training.sharded_lazy`, or has no effect with or without it.

    `training.packing` becomes false with it. A key with its default value says nothing.

    Raises:
        ConfigError: names the key and what to set.
    """
    custom, training = sections["custom"], sections["training"]
    if training.get("sharded_lazy") is not True:
        for section, key in (
            ("training", "sharded_lazy_pre_packed"),
            ("training", "sharded_lazy_max_wait_s"),
            ("training", "sharded_lazy_poll_s"),
            ("training", "sharded_lazy_start"),
            ("training", "train_dataloader_shuffle"),
            ("custom", "dataset"),
        ):
            if sections[section].get(key, _default(section, key)) != _default(section, key):
                raise ConfigError(
                    f"{section}.{key} has no effect without training.sharded_lazy",
                    hint="set training.sharded_lazy: true to train on a directory of chunks",
                )
        return
    if not custom.get("dataset"):
        raise ConfigError(
            "training.sharded_lazy needs custom.dataset",
            hint="name the directory that packtrain produce writes",
        )
    if training.get("sharded_lazy_pre_packed") is not True:
        raise ConfigError(
            "training.sharded_lazy_pre_packed is not true: only packs can be read from a growing directory",
            hint="set it to true, and pack raw samples with packtrain produce",
        )
    if training.get("packing", False) is not False:
        raise ConfigError(
            "training.packing is true, but the data are packs already: packing them again would put samples "
            "of different packs into one",
            hint="set training.packing: false",
        )
    if training.get("train_dataloader_shuffle", False) is not False:
        raise ConfigError(
            "training.train_dataloader_shuffle is true: chunks are read in the order in which they come",
            hint="set training.train_dataloader_shuffle: false",
        )
    for section, keys in (("training", _OF_PLANS), ("custom", _OF_SOURCES)):
        for key in keys:
            if key in _OF_VALIDATION and custom.get("val_jsonl"):
                continue
            if sections[section].get(key, _default(section, key)) != _default(section, key):
                raise ConfigError(
                    f"{section}.{key} has no effect on packs that were made before",
                    hint="remove the key; packtrain produce has the options of packing",
                )
    training["packing"] = False
    check_eval_keys(training["trainer"])
    if training.get("num_train_epochs", 1) != 1:
        raise ConfigError(
            f"training.num_train_epochs is {training['num_train_epochs']}: a stream is read once",
            hint="set max_steps, or produce the data again",
        )


def _default(section: str, key: str) -> Any:
    kind: type[Section] = TrainingConfig if section == "training" else CustomConfig
    default = kind.model_fields[key].get_default(call_default_factory=True)
    return default.model_dump() if isinstance(default, Section) else default
