"""RunConfig: a whole run, as `load_config` gives it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from pydantic import Field

from ...errors import ConfigError
from ...world import world
from .aliases import ALIASES, alias_of
from .data import KINDS, DataConfig, Planned, TokenBudget
from .sections import ExportConfig, ModelConfig, ReportConfig, Section, TemplateConfig, Tokens, TrainingConfig

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Keys of Trainer that mean nothing without validation samples -> the value that asks for nothing.
_EVALUATES = ("eval_strategy", "eval_steps", "eval_delay", "eval_on_start")

#: Keys that need to know which model is the best one -> what would come of them without.
_OF_BEST = {
    "early_stopping_patience": "training would not stop",
    "load_best_model_at_end": "the last model would be kept for the best one",
}


class RunConfig(Section):
    """A whole run. Immutable. `custom`, and names of other layouts under `training`, can be read too."""

    global_max_length: Tokens | None = None
    """sets `template.max_length` and `model.max_model_len` unless they are given"""
    model: ModelConfig = Field(default_factory=ModelConfig)
    template: TemplateConfig = Field(default_factory=TemplateConfig)
    data: DataConfig = Field(default_factory=Planned)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)

    def model_post_init(self, context: Any, /) -> None:
        self.training.also_named(self._named("training"))

    @property
    def custom(self) -> Any:
        """The keys of `custom`, by their names there."""
        return SimpleNamespace(**self._named("custom"))

    def _named(self, section: str) -> dict[str, Any]:
        """Values of `data` by their names in a section of other layouts."""
        kind, held = self.data.kind, {}
        own = set(TrainingConfig.model_fields) if section == "training" else set()
        for row in ALIASES:
            name, _, key = row.old.partition(".")
            if name != section or key in held or key in own or not row.new.startswith("data."):
                continue
            here = alias_of(row.old, kind)
            if here is not None:
                held[key] = here.there(getattr(self.data, here.new.partition(".")[2]))
            elif row.new != "data.kind":
                held[key] = _unset(row.new.partition(".")[2], row)
        if section == "training":
            streams = kind in ("stream", "token_budget")
            held |= {
                "sharded_lazy": kind == "growing",
                "packing_mode": "streaming" if streams else "static",
                "packing": getattr(self.data, "packing", streams),
                "dyn_bsz": getattr(self.data, "dyn_bsz", False),
            }
        return held

    @property
    def pack_length(self) -> int:
        """Cap of a pack of several samples: template.max_length, else model.max_model_len.

        Raises:
            ConfigError: neither is set.
        """
        cap, hint = self.template.max_length or self.model.max_model_len, "set global_max_length"
        return _set(cap, "the pack length is not set", f"{hint} or template.max_length, in tokens")

    @property
    def row_length(self) -> int | None:
        """Tokens that rows are padded to; None: they are not padded."""
        data = self.data
        if data.pad_to_length is None and isinstance(data, TokenBudget) and data.pad_packed_input:
            return data.longest_row(self.pack_length)
        return data.pad_to_length

    @property
    def processor(self) -> str:
        """template.processor, else model.name_or_path.

        Raises:
            ConfigError: neither is set.
        """
        name = self.template.processor or self.model.name_or_path
        return _set(name, "no processor is named", "set template.processor or model.name_or_path")

    @property
    def model_name(self) -> str:
        """model.name_or_path.

        Raises:
            ConfigError: it is not set.
        """
        return _set(self.model.name_or_path, "no model is named", "set model.name_or_path")

    def accumulation(self, world_size: int) -> int:
        """Packs each rank takes per optimizer step, with one pack per device and micro step.

        `effective_batch_size` counts packs over all ranks; without it the product that the batch size
        and accumulation of the file imply is kept. `data.global_batch_size` counts rows times
        `micro_batch_size`.

        Raises:
            ConfigError: it is not divisible by the world size.
        """
        wanted, name, unit = self.training.effective_batch_size, "training.effective_batch_size", 1
        if wanted is None and isinstance(self.data, TokenBudget | Planned) and self.data.global_batch_size:
            unit = (
                self.data.micro_batch_size
                if isinstance(self.data, TokenBudget)
                else self.data.samples_per_row
            )
            wanted, name = self.data.global_batch_size, "data.global_batch_size"
        if wanted is None:
            return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps
        lower, rest = divmod(wanted, world_size * unit)
        if rest:
            what = "samples_per_row" if isinstance(self.data, Planned) else "micro_batch_size"
            of = f"the world size {world_size}" + (f" times {what} {unit}" if unit > 1 else "")
            near = " or ".join(str(n * world_size * unit) for n in (lower, lower + 1) if n)
            raise ConfigError(f"{name} {wanted} is not divisible by {of}", hint=f"use {near}")
        return lower

    def evaluated(self, has_val: bool) -> RunConfig:
        """The run as it is with, or without, validation samples: keys without effect are told and left out.

        Raises:
            ConfigError: the best model or an early stop is asked for, and nothing says which is the best.
        """
        trainer = self.training.trainer
        if has_val:
            return self
        asked = {**trainer, "early_stopping_patience": self.training.early_stopping_patience}
        for key, so in _OF_BEST.items():
            if asked.get(key):
                raise ConfigError(
                    f"training.{key} has no effect without validation samples: {so}",
                    hint="set custom.val_jsonl (data.val), or remove the key",
                )
        idle = [key for key in _EVALUATES if trainer.get(key) not in (None, "no", 0)]
        if not idle:
            return self
        if world().is_writer:
            logger.warning(
                "%s: no effect without validation samples (custom.val_jsonl, data.val)",
                ", ".join(f"training.{key}" for key in idle),
            )
        return self._with_trainer({key: value for key, value in trainer.items() if key not in idle})

    def resumed(self) -> RunConfig:
        """The run with `training.resume: auto` carried out: from a checkpoint in the output folder."""
        if self.training.resume is None or "resume_from_checkpoint" in self.training.trainer:
            return self
        if not any(Path(self.training.output_dir).glob("checkpoint-*/trainer_state.json")):
            return self
        if world().is_writer:
            logger.warning(
                "%s holds checkpoints: the run goes on from the last one (training.resume: null begins anew)",
                self.training.output_dir,
            )
        return self._with_trainer({**self.training.trainer, "resume_from_checkpoint": "auto"})

    def _with_trainer(self, trainer: dict[str, Any]) -> RunConfig:
        return self.model_copy(update={"training": self.training.model_copy(update={"trainer": trainer})})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as a file of this layout would hold them."""
        values: dict[str, Any] = self.model_dump(mode="json")
        values["training"].update(values["training"].pop("trainer"))
        return values


def _set(value: T | None, message: str, hint: str) -> T:
    """`value`; ConfigError where it is not set."""
    if value is None:
        raise ConfigError(message, hint=hint)
    return value


def _unset(key: str, row: Any) -> Any:
    """What a key says that this kind of data does not have: its default."""
    kinds: Mapping[str, type[Section]] = KINDS
    field = next(
        kind.model_fields[key] for name, kind in kinds.items() if key in kind.model_fields and row.holds(name)
    )
    return None if field.is_required() else row.there(field.get_default(call_default_factory=True))
