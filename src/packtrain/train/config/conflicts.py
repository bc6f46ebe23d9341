"""What keys say together: the kind of `data`, what cannot be, and what has no effect.

Refused is what is impossible or would train something else. A key that has no effect is told in one warning
line; one that says what is so anyway (`packing: false` on packs that were made before) is not told at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import ConfigError, nearest
from .data import KINDS, OF_ROWS, Records

if TYPE_CHECKING:
    from .run_config import RunConfig


Sections = Mapping[str, Mapping[str, Any]]

MADE = ("exported", "growing")  # their packs were made before
_STREAMS = ("stream", "token_budget")
_NO_PLAN = ("growing", "stream", "token_budget")

#: Keys without which other samples would be trained, or in other rows or steps -> what to use instead.
_OF_PLANS = {
    "data.samples_per_step": "training.effective_batch_size counts packs of a step",
    "data.drop_under_filled": "remove the key",
    "data.samples_per_row": "data: {kind: token_budget, dyn_bsz: false, micro_batch_size: N} for such rows",
}

#: Kind -> why keys of others have no effect on it.
REASONS = {
    "planned": "samples are measured and planned before training",
    "exported": "their packs were made before; packtrain export has the options of packing",
    "growing": "their packs were made before; packtrain produce has the options of packing",
    "stream": "samples are packed as they come; only a plan of all samples could do that",
    "token_budget": "samples are packed as they come; only a plan of all samples could do that",
}


def kind_of(sections: Sections, given: Collection[str] = ()) -> str:
    """The kind of data that a file means, by `data.kind` or by the keys of other layouts.

    Args:
        sections: what the file holds.
        given: keys with their section that take the place of the file's, as the command line gives them.

    Raises:
        ConfigError: two keys say different kinds, or none is known.
    """
    training, data = sections["training"], sections["data"]
    lazy, mode, kind = training.get("sharded_lazy"), training.get("packing_mode"), data.get("kind")
    budget = training.get("dyn_bsz", data.get("dyn_bsz"))
    if mode is not None and mode not in ("static", "streaming"):
        raise ConfigError(
            f"training.packing_mode {mode!r} is not supported: packs are planned before training",
            hint="set training.packing_mode: static, or streaming for samples that nobody measured",
        )
    if kind is not None and kind not in tuple(KINDS):  # it may be a list
        close = nearest(str(kind), KINDS)
        hint = f"did you mean {close}?" if close else f"use one of {', '.join(KINDS)}"
        raise ConfigError(f"data.kind is {kind!r}", hint=hint)
    streams = mode == "streaming" or training.get("streaming") is True
    if lazy is True and "training.sharded_lazy" in given:
        return "growing"
    if kind is not None:
        _agree(str(kind), lazy, mode, streams, budget)
        return str(kind)
    if lazy is True:
        if streams:
            raise ConfigError(
                "training.sharded_lazy and training.packing_mode: streaming say different kinds of data",
                hint="sharded_lazy reads packs that were made before, streaming packs samples; keep one",
            )
        return "growing"
    if mode == "static":
        _agree("planned", lazy, mode, streams, budget)
        return "planned"
    sized = "micro_batch_size" in training or "micro_batch_size" in data
    if streams:
        return _kind_of_stream(budget, training.get("micro_batch_size", data.get("micro_batch_size")))
    if budget is not None or sized:
        return "planned" if budget is False and not _goes_on(training, data) else "token_budget"
    return _kind_by_place(sections, lazy)


def _goes_on(training: Mapping[str, Any], data: Mapping[str, Any]) -> bool:
    """Do steps end the run? Rows of a number of samples are planned where epochs do."""
    steps = training.get("max_steps")
    padded = any(held.get("pad_packed_input") or held.get("pad_to_length") for held in (training, data))
    return padded or (isinstance(steps, int) and steps >= 1)


def _kind_of_stream(budget: Any, size: Any) -> str:
    if budget is True or (budget is False and size is not None):
        return "token_budget"
    if budget is None and size not in (None, 1):
        raise ConfigError(
            f"training.micro_batch_size {size} has no effect without training.dyn_bsz",
            hint=f"set dyn_bsz: true (rows of {size} * max_length tokens) or false (rows of {size} samples)",
        )
    return "stream"


def _kind_by_place(sections: Sections, lazy: Any) -> str:
    """Only a directory of chunks is named: it is read."""
    custom, data = sections["custom"], sections["data"]
    named = [custom.get("train_jsonl"), custom.get("fusion_config"), data.get("path"), data.get("mixture")]
    if not custom.get("dataset") or any(named):
        return "planned"
    if lazy is False:
        raise ConfigError(
            "custom.dataset has no effect without training.sharded_lazy, and no samples are named",
            hint="set training.sharded_lazy: true to train on a directory of chunks",
        )
    return "growing"


def _agree(kind: str, lazy: Any, mode: Any, streams: bool, budget: Any) -> None:
    """Keys of other layouts beside a kind that is named."""
    said = None
    if isinstance(lazy, bool) and lazy != (kind == "growing"):
        said = f"training.sharded_lazy {str(lazy).lower()}" if lazy or kind == "growing" else None
    elif streams and kind not in _STREAMS:
        said = "training.packing_mode: streaming"
    elif mode == "static" and kind in _STREAMS:
        said = "training.packing_mode: static"
    elif budget is True and kind != "token_budget":
        said = "training.dyn_bsz: true"
    if said is not None:
        static = kind == "planned" and mode == "static"
        named = "training.packing_mode: static" if static else f"data.kind {kind}"
        raise ConfigError(f"{said} and {named} say different kinds of data", hint="keep one of them")


def effect(target: str, value: Any, kind: str, name: str) -> bool:
    """Is a key told to have no effect, which data of this kind do not have?

    Args:
        target: the key as our layout has it.
        name: as the file has it.

    Returns:
        True: it has no effect, and is told. False: it says what is so anyway.

    Raises:
        ConfigError: without it something else would be trained.
    """
    if target == "data.packing":
        return _packing(value, kind, name)
    if target == "data.shuffle" and kind == "growing":
        if value is False:
            return False
        raise ConfigError(
            f"{name} is true: chunks are read in the order in which they come", hint=f"set {name}: false"
        )
    if target in _OF_PLANS:
        if value in (None, False) or (target == "data.samples_per_row" and value == 1):
            return False
        if kind in MADE:
            return True  # who made the packs has decided it: they are never cut, steps are of packs
        raise ConfigError(
            f"{name} needs a plan of all samples, and has no effect on data of kind {kind} "
            f"({REASONS[kind].partition(';')[0]}): other samples, rows or steps would be trained",
            hint=f"{_OF_PLANS[target]}; or use data.kind: planned",
        )
    if target == "data.dyn_bsz":
        return value is not False
    return True


def _packing(value: Any, kind: str, name: str) -> bool:
    if kind in MADE:
        if value is False:
            return False
        raise ConfigError(
            f"{name} is true, but the data are packs already: packing them again would put samples "
            "of different packs into one",
            hint=f"set {name}: false",
        )
    if value is False:
        raise ConfigError(
            f"{name} is false, and data of kind {kind} are packed as they come",
            hint="use data: {kind: token_budget, dyn_bsz: false, micro_batch_size: 1} for one sample a row",
        )
    return False


def check_together(kind: str, sections: dict[str, dict[str, Any]]) -> list[str]:
    """Keys across sections, all in our layout. Keys that have no effect are removed and told.

    Returns:
        Warnings.

    Raises:
        ConfigError: names the keys and what to set.
    """
    training, data = sections["training"], sections["data"]
    told = []
    if kind in MADE and not data.get("path"):
        raise ConfigError(
            "training.sharded_lazy needs custom.dataset (data.kind growing: data.path)"
            if kind == "growing"
            else "data.kind exported needs data.path",
            hint=f"name the directory that packtrain {'produce' if kind == 'growing' else 'export'} writes",
        )
    if kind in _NO_PLAN:
        told += _without_epochs(kind, training)
    _padding(kind, data, sections["template"].get("max_length"))
    if kind == "planned":
        told += _planned(training, data)
    if kind == "token_budget":
        told += _token_budget(training, data, sections["template"].get("max_length"))
    return told


def _padding(kind: str, data: Mapping[str, Any], length: Any) -> None:
    """Rows that may be longer than what they are padded to."""
    padded = data.get("pad_to_length")
    if kind in MADE or type(padded) is not int or type(length) is not int or data.get("dyn_bsz") is False:
        return
    longest = length * data.get("micro_batch_size" if kind == "token_budget" else "samples_per_row", 1)
    if data.get("count_mode") == "effective":
        longest = math.ceil(longest * data.get("overflow_ratio", 1.5))
    if padded < longest:
        raise ConfigError(
            f"data.pad_to_length is {padded}, a row may have {longest} tokens",
            hint=f"set data.pad_to_length to {longest} or more, or a lower template.max_length",
        )


def _planned(training: dict[str, Any], data: dict[str, Any]) -> list[str]:
    told = []
    _agreed_steps(training, data)
    samples, packs = data.get("samples_per_step"), training.get("effective_batch_size")
    if samples is not None and packs is not None:
        raise ConfigError(
            f"data.samples_per_step {samples} and training.effective_batch_size {packs} both say what a "
            "step is",
            hint="data.samples_per_step counts samples, training.effective_batch_size packs; keep one",
        )
    if data.get("packer", "auto") != "auto" and (samples is not None or data.get("packing") is False):
        why = "packing: false: a row is one sample"
        if samples is not None:
            why = "samples_per_step: the samples of a step are spread evenly over its packs"
        told.append(f"data.packer {data.pop('packer')!r} has no effect with {why}")
    return told


def _agreed_steps(training: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    if data.get("global_batch_size") is not None and training.get("effective_batch_size") is not None:
        raise ConfigError(
            "data.global_batch_size and training.effective_batch_size both say what a step is",
            hint="data.global_batch_size counts micro batches times data.micro_batch_size, "
            "training.effective_batch_size rows",
        )


def _token_budget(training: dict[str, Any], data: dict[str, Any], length: Any) -> list[str]:
    told = []
    size, first = data.get("micro_batch_size", 1), data.get("warmup_tokens")
    if all(type(value) is int for value in (size, first, length)) and first > size * length:
        raise ConfigError(
            f"data.warmup_tokens is {first}, the budget it grows to {size * length}",
            hint=f"set data.warmup_tokens to {size * length} or less",
        )
    _agreed_steps(training, data)
    if data.get("dyn_bsz") is False:
        of_budgets = ("buffer_size", "count_mode", "overflow_ratio", "order", "warmup_ratio", "warmup_tokens")
        found = [key for key in (*of_budgets, "packer", "long_samples") if data.pop(key, None) is not None]
        if found:
            keys = ", ".join(f"data.{key}" for key in found)
            told.append(f"{keys}: no effect with dyn_bsz: false, where a row holds a number of samples")
    return told


def _without_epochs(kind: str, training: dict[str, Any]) -> list[str]:
    """Streams and growing directories are read once and have no epochs."""
    told, trainer = [], training["trainer"]
    steps = training.get("max_steps")
    for key in ("eval", "save", "logging"):
        if trainer.get(f"{key}_strategy") == "epoch" and (kind in _STREAMS or key == "eval"):
            hint = f"set training.{key}_strategy: steps and training.{key}_steps"
            if key == "eval":
                hint = "set training.eval_steps; the end of training is always evaluated"
            why = f"training.{key}_strategy epoch has no meaning here: a stream is not read in epochs"
            raise ConfigError(why, hint=hint)
    if trainer.get("eval_strategy") is None and trainer.get("eval_steps"):
        trainer["eval_strategy"] = "steps"
    ends = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
    if kind in _STREAMS and not ends:
        what, more = "a stream", ""
        if kind == "token_budget":
            what = "a token budget (dyn_bsz)"
            more = (
                " (rows of a number of samples in epochs: data.kind planned, packing: false, samples_per_row)"
            )
        raise ConfigError(
            f"{what} needs training.max_steps: it has no length",
            hint=f"set training.max_steps; the stream begins its next epoch where one ends{more}",
        )
    epochs = training.get("num_train_epochs", 1)
    if epochs != 1:
        if not ends:
            raise ConfigError(
                f"training.num_train_epochs is {epochs}: a stream is read once",
                hint="set training.max_steps, or produce the data again",
            )
        training.pop("num_train_epochs")
        told.append(
            f"training.num_train_epochs {epochs} has no effect beside max_steps on data of kind {kind}"
        )
    return told


# --------------------------------------------------------------------------------------------
# Keys that another key of the same file leaves without effect: told once, never refused
# --------------------------------------------------------------------------------------------
# One row a key. Keys without effect on a kind of data follow from the keys that the kind has (`aliases`), and
# what only the plan or the ranks can tell is told where they are known (`train.runtime`).


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


def _stops_never(config: RunConfig) -> bool:
    return config.training.early_stopping_patience is None


def _has_no_workers(config: RunConfig) -> bool:
    return not config.training.trainer.get("dataloader_num_workers")


def _saves_nothing(config: RunConfig) -> bool:
    return config.training.trainer.get("save_strategy") == "no"


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
    Row("data.replan", "in a run of one epoch", _one_epoch),
    Row("data.eval_packing", "without validation samples (data.val)", lambda c: c.data.val is None),
    Row("training.early_stopping_threshold", "without training.early_stopping_patience", _stops_never),
    Row("data.text_options", "without data.task: text", lambda c: not _of_text(c)),
    *(Row(key, _TEXT, _of_text) for key in _OF_TEXT),
    Row("data.overflow_ratio", "with data.count_mode: total", lambda c: c.data.count_mode == "total"),
    Row(
        "data.count_mode",
        "with data.overflow_ratio: 1: a row is full of tokens before it is full of supervised ones",
        lambda c: c.data.overflow_ratio == 1 and not c.data.drop_last,
    ),
    Row("data.warmup_tokens", "without data.warmup_ratio", lambda c: not c.data.warmup_ratio),
    Row("training.per_device_train_batch_size", "beside training.effective_batch_size", _steps_of_packs),
    Row("training.gradient_accumulation_steps", "beside training.effective_batch_size", _steps_of_packs),
    Row("training.num_train_epochs", "beside training.max_steps", lambda c: c.training.max_steps >= 1),
    Row("training.dataloader_prefetch_factor", "without training.dataloader_num_workers", _has_no_workers),
    *(
        Row(f"training.{key}", "with training.save_strategy: no", _saves_nothing)
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
        if section == "data" and config.data.kind in MADE and of_records:
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
