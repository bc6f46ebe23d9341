"""The one YAML of a run: five sections, every key checked, every refusal one line with a hint.

    config = load_config("run.yaml")          # or a mapping
    config.training.packing_strategy, config.pack_length, config.training.trainer

Keys that are neither ours nor true fields of `transformers.TrainingArguments` are refused with the
nearest name; so are keys of older layouts (`custom.packing`, `training.packing_length`, …), naming
the key to use. A duplicate key in the file is an error: YAML itself would keep the last one silently.

Paths (`custom.*_jsonl`, `custom.media_root`, `template.processor`, a model folder) that are relative
mean the current directory first, else the folder of the YAML file. `training.output_dir` is always
relative to the current directory. `demo:…` and `tiny:…` are names, not paths.

This module imports neither torch nor, unless a key needs the check, transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError, nearest
from ._yaml import parse_yaml
from .lazy_keys import check_lazy_keys
from .sections import (
    ATTENTIONS,
    CacheConfig,
    CustomConfig,
    ExportConfig,
    ModelConfig,
    ReportConfig,
    Section,
    TemplateConfig,
    Tokens,
    TrainingConfig,
)
from .stream_keys import check_stream_keys
from .trainer_keys import check_trainer_keys, trainer_fields

__all__ = [
    "ATTENTIONS",
    "CacheConfig",
    "CustomConfig",
    "ModelConfig",
    "ReportConfig",
    "RunConfig",
    "TemplateConfig",
    "TrainingConfig",
    "load_config",
]

_ATTENTION_ALIASES = {"flash_attn": "flash_attention_2", "flash_attn_2": "flash_attention_2"}


class RunConfig(Section):
    """A whole run. Immutable."""

    global_max_length: Tokens | None = None
    """Sets template.max_length and model.max_model_len unless they are given."""
    model: ModelConfig = ModelConfig()
    template: TemplateConfig = TemplateConfig()
    custom: CustomConfig = CustomConfig()
    training: TrainingConfig = TrainingConfig()
    report: ReportConfig = ReportConfig()
    export: ExportConfig = ExportConfig()

    @property
    def pack_length(self) -> int:
        """Hard cap of a pack: template.max_length, else model.max_model_len.

        Raises:
            ConfigError: neither is set.
        """
        cap = self.template.max_length or self.model.max_model_len
        if cap is None:
            raise ConfigError(
                "the pack length is not set", hint="set global_max_length or template.max_length, in tokens"
            )
        return cap

    @property
    def processor(self) -> str:
        """template.processor, else model.name_or_path."""
        name = self.template.processor or self.model.name_or_path
        if name is None:
            raise ConfigError("no processor is named", hint="set template.processor or model.name_or_path")
        return name

    def accumulation(self, world_size: int) -> int:
        """Packs each rank takes per optimizer step, with one pack per device and micro step.

        `effective_batch_size` counts packs over all ranks; without it the product that the batch size
        and accumulation of the file imply is kept.

        Raises:
            ConfigError: effective_batch_size is not divisible by the world size.
        """
        wanted = self.training.effective_batch_size
        if wanted is None:
            return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps
        lower = wanted // world_size
        if wanted % world_size:
            raise ConfigError(
                f"training.effective_batch_size {wanted} is not divisible by the world size {world_size}",
                hint="use " + " or ".join(str(n * world_size) for n in (lower, lower + 1) if n),
            )
        return lower

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as a file of this layout would hold them."""
        values: dict[str, Any] = self.model_dump(mode="json")
        values["training"].update(values["training"].pop("trainer"))
        return values


_SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "template": TemplateConfig,
    "custom": CustomConfig,
    "training": TrainingConfig,
    "report": ReportConfig,
    "export": ExportConfig,
}

_LENGTH_HINT = "set template.max_length (or global_max_length): it is the pack length"

#: Keys of other layouts -> what to do instead.
_MOVED = {
    "custom.packing": "use training.packing",
    "custom.packing_length": _LENGTH_HINT,
    "training.packing_length": _LENGTH_HINT,
    "training.packing_buffer": "a static plan has no buffer; remove the key",
    "training.encoded_sample_cache": "samples are measured from metadata and encoded when they are fetched; "
    "remove the key",
    "custom.val_sample_with_replacement": "evaluation reads every sample exactly once; remove the key",
}


def load_config(
    path_or_mapping: str | Path | Mapping[str, Any],
    instead: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunConfig:
    """Read and check a run's configuration.

    Args:
        path_or_mapping: a YAML file, or what one would hold.
        instead: keys by section that take the place of the file's.

    Raises:
        ConfigError: the file is absent or malformed (with its line), or a key or value cannot hold.
    """
    if isinstance(path_or_mapping, Mapping):
        values = {str(key): value for key, value in path_or_mapping.items()}
        return _build(_replaced(values, instead or {}), base=None)
    if not isinstance(path_or_mapping, str | Path):
        raise ConfigError(
            f"a configuration is a path or a mapping, not {type(path_or_mapping).__name__}",
            hint="name a YAML file",
        )
    path = Path(path_or_mapping)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", hint="name a YAML file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return _build(_replaced(parse_yaml(text, path), instead or {}), base=path.resolve().parent)


def _replaced(values: dict[str, Any], instead: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    for section, keys in instead.items():
        held = values.get(section)
        if keys and (held is None or isinstance(held, Mapping)):
            values = {**values, section: {**(held or {}), **keys}}
    return values


def _build(values: dict[str, Any], base: Path | None) -> RunConfig:
    sections: dict[str, Any] = {"global_max_length": values.get("global_max_length")}
    for key in values:
        if key not in _SECTIONS and key != "global_max_length":
            raise _unknown("", str(key), [*_SECTIONS, "global_max_length"])
    for name in _SECTIONS:
        given = values.get(name)
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"{name} is {given!r}, expected a section with keys")
        sections[name] = {str(key): value for key, value in (given or {}).items()}
    _move_aliases(sections)
    for name, kind in _SECTIONS.items():
        _check_keys(name, kind, sections[name])
    check_lazy_keys(sections)
    check_stream_keys(sections)
    _fill_lengths(sections)
    if base is not None:
        _resolve_paths(sections, base)
    try:
        return RunConfig.model_validate(sections)
    except ValidationError as error:
        raise _one_line(error) from None


def _move_aliases(sections: dict[str, Any]) -> None:
    """Accept or refuse the spellings of other layouts."""
    training, template, model = sections["training"], sections["template"], sections["model"]
    if "attn_impl" in training:
        alias = training.pop("attn_impl")
        if model.get("attn") not in (None, alias):
            raise ConfigError(
                f"training.attn_impl is {alias!r} but model.attn is {model['attn']!r}", hint="keep model.attn"
            )
        model["attn"] = alias
    if isinstance(model.get("attn"), str):
        model["attn"] = _ATTENTION_ALIASES.get(model["attn"], model["attn"])
    if "padding_free" in template and template.pop("padding_free") is not True:
        raise ConfigError(
            "template.padding_free is not true", hint="packed rows never hold padding; remove the key"
        )
    mode = training.get("packing_mode")
    if mode is not None and mode not in ("static", "streaming"):
        raise ConfigError(
            f"training.packing_mode {mode!r} is not supported: packs are planned before training",
            hint="set training.packing_mode: static, or streaming for samples that nobody measured",
        )


def _check_keys(section: str, kind: type[Section], given: dict[str, Any]) -> None:
    known = [name for name in kind.model_fields if name != "trainer"]
    further = {}
    for key in list(given):
        dotted = f"{section}.{key}"
        if dotted in _MOVED:
            raise ConfigError(f"{dotted} is not a key of this layout", hint=_MOVED[dotted])
        if key in known:
            continue
        if section != "training" or key not in trainer_fields():
            names = [*known, *trainer_fields()] if section == "training" else known
            raise _unknown(section, key, names)
        further[key] = given.pop(key)
    if section == "training":
        given["trainer"] = check_trainer_keys(further)


def _unknown(section: str, key: str, known: Iterable[str]) -> ConfigError:
    dotted = f"{section}.{key}" if section else key
    elsewhere = [name for name, kind in _SECTIONS.items() if key in kind.model_fields and name != section]
    close = nearest(key, known)
    if elsewhere:
        hint = f"did you mean {elsewhere[0]}.{key}?"
    elif close:
        hint = f"did you mean {section + '.' if section else ''}{close}?"
    else:
        hint = f"keys: {', '.join(list(known)[:24])}"
    return ConfigError(f"unknown key {dotted!r}", hint=hint)


def _fill_lengths(sections: dict[str, Any]) -> None:
    length = sections["global_max_length"]
    if length is None:
        return
    for name, key in (("template", "max_length"), ("model", "max_model_len")):
        if sections[name].get(key) is None:
            sections[name][key] = length


def _resolve_paths(sections: dict[str, Any], base: Path) -> None:
    places = [
        ("custom", key) for key in ("train_jsonl", "val_jsonl", "media_root", "fusion_config", "dataset")
    ]
    for name, key in [
        *places,
        ("template", "processor"),
        ("model", "name_or_path"),
        ("training", "skip_samples"),
    ]:
        value = sections[name].get(key)
        if not isinstance(value, str) or value.startswith(("demo:", "tiny:")):
            continue
        path = Path(value).expanduser()
        if not path.is_absolute() and not path.exists() and (base / path).exists():
            path = base / path
        if path.exists():
            sections[name][key] = str(path)


def _one_line(error: ValidationError) -> ConfigError:
    first, *others = error.errors(include_url=False)
    dotted = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown key {dotted!r}", hint="see docs/config.md for the keys")
    more = f" (and {len(others)} more)" if others else ""
    return ConfigError(f"{dotted} is {first['input']!r}: {_plain(first)}{more}", hint=f"correct {dotted}")


def _plain(detail: Any) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]
