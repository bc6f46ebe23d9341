"""The one YAML of a run: `model`, `template`, `data`, `training`, `report`, `export`; every key checked.

    config = load_config("run.yaml")          # or a mapping
    config.data.kind, config.data.path, config.pack_length, config.training.trainer

Keys of other layouts (`custom.train_jsonl`, `training.packing_strategy`, `training.sharded_lazy`, VeOmni's
names …) are mapped by the table of `aliases`. A key without effect is one warning; what would train something
else is refused in one line with a hint, before anything is measured. Unknown keys are refused with the
nearest name, a key that is given twice too: YAML itself would keep the last one silently.

Paths that are relative mean the current directory first, else the folder of the YAML file.
`training.output_dir` is always relative to the current directory. `demo:…` and `tiny:…` are names, not paths.

This module imports neither torch nor, unless a key needs the check, transformers.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ... import files
from ...errors import ConfigError, nearest, without_path
from ...world import world
from .aliases import ALIASES, FOREIGN, IGNORED, MOVED, alias_of, aliases_of, old_names
from .conflicts import MADE, REASONS, check_together, effect, kind_of, without_effect
from .data import KINDS, OF_ROWS, Records
from .run_config import RunConfig
from .sections import (
    ExportConfig,
    ModelConfig,
    ReportConfig,
    Section,
    TemplateConfig,
    TrainingConfig,
    plain_words,
)
from .trainer_keys import check_trainer_keys, trainer_fields

logger = logging.getLogger(__name__)

_SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "template": TemplateConfig,
    "training": TrainingConfig,
    "report": ReportConfig,
    "export": ExportConfig,
}

#: Sections a file may have; `custom` holds keys of another layout only.
_NAMES = ("model", "template", "data", "custom", "training", "report", "export")

#: Decide the kind of data, and are read there (`conflicts.kind_of`).
_OF_KIND = frozenset(row.old for row in ALIASES if row.new == "data.kind") | {
    "training.sharded_lazy_pre_packed"
}

_PATHS = {
    "data": ("path", "val", "mixture", "media_root", "skip_samples"),
    "template": ("processor",),
    "model": ("name_or_path",),
}


def load_config(
    path_or_mapping: str | Path | Mapping[str, Any], instead: Mapping[str, Mapping[str, Any]] | None = None
) -> RunConfig:
    """Read and check a run's configuration.

    Args:
        path_or_mapping: a YAML file, or what one would hold.
        instead: keys by section that take the place of the file's, whatever their names there.

    Raises:
        ConfigError: the file is absent or malformed (with its line), or a key or value cannot hold.
    """
    given = {section: dict(keys) for section, keys in (instead or {}).items() if keys}
    if isinstance(path_or_mapping, Mapping):
        values = {str(key): value for key, value in path_or_mapping.items()}
        return _Reading(values, given, base=None).config()
    if not isinstance(path_or_mapping, str | Path):
        raise ConfigError(
            f"a configuration is a path or a mapping, not {type(path_or_mapping).__name__}",
            hint="name a YAML file",
        )
    path = Path(path_or_mapping)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        absent = isinstance(error, FileNotFoundError)
        why = "does not exist" if absent else f"cannot be read: {without_path(error)}"
        raise ConfigError(f"{path} {why}", hint="name a YAML file") from None
    return _Reading(_parse(text, path), given, base=path.resolve().parent).config()


_KEY = re.compile(r"(?<![\w.])(?:training|data|template|model)\.\w+")


#: Keys that a whole file of another system has -> what reads it.
_OF_OTHERS = (
    ({"model_name_or_path", "stage"}, "LLaMA-Factory", "packtrain llamafactory FILE trains it on packs"),
    ({"base_model", "datasets"}, "axolotl", "packtrain is a plugin there: docs/hosts_yaml.md"),
)


class _Reading:
    """One file on its way to a RunConfig.

    Attributes:
        sections: our layout so far, by section.
        names: key of our layout -> the name under which the file has it.
        idle: names without effect on this kind of data.
        told: warnings.
    """

    def __init__(
        self, values: Mapping[str, Any], instead: Mapping[str, dict[str, Any]], base: Path | None
    ) -> None:
        self.base = base
        self.length = values.get("global_max_length")
        self.written: dict[str, dict[str, Any]] = {}
        self.strong: set[str] = set()
        if "train" in values:  # VeOmni's name of the section
            values = dict(values)
            values["training"] = _joined(values.pop("train"), values.get("training"))
        for keys, system, hint in _OF_OTHERS:
            if keys <= values.keys():
                raise ConfigError(f"this is a file of {system}", hint=hint)
        for key in values:
            if key not in _NAMES and key != "global_max_length":
                raise _unknown("", str(key), [*_NAMES, "global_max_length"])
        for name in _NAMES:
            held = values.get(name)
            if held is not None and not isinstance(held, Mapping):
                raise _no_section(name, held)
            self.written[name] = {str(key): value for key, value in (held or {}).items()}
            further = instead.get(name, {})
            self.written[name].update(further)
            self.strong.update(f"{name}.{key}" for key in further)
        if "padding_free" in self.written["training"]:  # ms-swift's files have no sections
            self.written["template"].setdefault("padding_free", self.written["training"].pop("padding_free"))
        self.sections: dict[str, dict[str, Any]] = {name: {} for name in _NAMES if name != "custom"}
        self.names: dict[str, str] = {}
        self.idle: list[str] = []
        self.told: list[str] = []

    def config(self) -> RunConfig:
        self.kind = kind_of(self.written, self.strong)
        self._pre_packed()
        for section in _NAMES:
            for key, value in self.written[section].items():
                self._take(section, key, value)
        self._null_is_empty()
        self.sections["data"]["kind"] = self.kind
        trainer, told = check_trainer_keys(self.sections["training"].pop("trainer", {}))
        self.sections["training"]["trainer"] = trainer
        self.told += told
        self._rows_of_a_batch()
        self._fill_lengths()
        self._resolve_paths()
        try:
            self.told += map(self._worded, check_together(self.kind, self.sections))
            self._only_of_validation()
            config = RunConfig.model_validate({"global_max_length": self.length, **self.sections})
        except ValidationError as error:
            raise self._one_line(error) from None
        except ConfigError as error:
            raise self._named(error) from None
        self.told += without_effect(config, self.names)
        self._tell()
        return config

    def _null_is_empty(self) -> None:
        """A list or mapping that is null, or named without a value, is not set."""
        for section, held in self.sections.items():
            fields = (KINDS[self.kind] if section == "data" else _SECTIONS[section]).model_fields
            for key in [key for key, value in held.items() if value is None and key in fields]:
                if fields[key].default_factory is not None:
                    del held[key]

    def _pre_packed(self) -> None:
        """`sharded_lazy_pre_packed` says of chunks that they hold packs."""
        value = self.written["training"].get("sharded_lazy_pre_packed")
        if value is None or (value is False and self.kind != "growing"):
            return
        if self.kind != "growing":
            self.idle.append("training.sharded_lazy_pre_packed")
        elif value is not True:
            raise ConfigError(
                "training.sharded_lazy_pre_packed is not true: a growing directory holds packs alone",
                hint="set it to true, and pack raw samples with packtrain produce",
            )

    def _rows_of_a_batch(self) -> None:
        """ms-swift's `padding_free` without packing: the samples of a batch are one row."""
        if self.written["template"].get("padding_free") is not True:
            return
        data, training = self.sections["data"], self.sections["training"]
        if self.kind != "planned" or data.get("packing") is not False:
            return  # so it is: packed rows never hold padding
        if "per_device_train_batch_size" in training:
            name = self.names.pop("training.per_device_train_batch_size")
            self._put("data.samples_per_row", training.pop("per_device_train_batch_size"), name, None)

    def _take(self, section: str, key: str, value: Any) -> None:
        """Put one key of the file where our layout has it."""
        name = f"{section}.{key}"
        if name in MOVED:
            raise ConfigError(f"{name} is not a key of this layout", hint=MOVED[name])
        row = alias_of(name, self.kind)
        if self._is_read_elsewhere(name, value):
            return
        if row is not None:
            self._put(row.new, row.here(value), name, value)
        elif key in self._fields(section):
            self._put(name, value, name, value)
        else:
            self._take_further(section, key, value)

    def _is_read_elsewhere(self, name: str, value: Any) -> bool:
        """A key that decided the kind, goes with the batch size (`_rows_of_a_batch`), or has no effect."""
        if name in _OF_KIND:
            if name == "training.packing_mode" and value == "static" and self.kind in MADE:
                self.idle.append(name)
            return True
        if name == "template.padding_free" and value is True:
            return True
        if name in IGNORED:
            self.told.append(f"{name} has no effect: {IGNORED[name]}")
        return name in IGNORED

    def _take_further(self, section: str, key: str, value: Any) -> None:
        """Put a key that this kind of data has not: of another kind, of transformers' Trainer, or unknown."""
        name = f"{section}.{key}"
        others = [row for row in aliases_of(name) if row.new.startswith("data.") and not row.passes]
        if section == "data" and any(key in kind.model_fields for kind in KINDS.values()):
            self._without(name, value, name)
        elif others:
            self._without(others[0].new, others[0].here(value), name)
        elif section == "training" and key in trainer_fields():
            self.sections["training"].setdefault("trainer", {})[key] = value
        else:
            raise self._unknown(section, key)

    def _fields(self, section: str) -> Collection[str]:
        if section == "custom":
            return []
        held = KINDS[self.kind] if section == "data" else _SECTIONS[section]
        return [key for key in held.model_fields if key != "trainer"]

    def _put(self, target: str, value: Any, name: str, written: Any) -> None:
        """Set a key; two names for it have to agree, and one from the command line wins."""
        section, _, key = target.partition(".")
        held = self.sections[section]
        before = self.names.get(target)
        if before is not None and held[key] is not None and before in self.strong and name not in self.strong:
            return
        if before is not None and value is not None and held[key] is not None and name not in self.strong:
            if held[key] != value:
                kept = target if target in (before, name) else before
                raise ConfigError(
                    f"{before} is {held[key]!r} but {name} is {written!r}: both say {target}",
                    hint=f"keep {kept}",
                )
            return
        if before is not None and value is None:
            return
        held[key] = value
        self.names[target] = name

    def _without(self, target: str, value: Any, name: str) -> None:
        if effect(target, value, self.kind, name):
            self.idle.append(name)

    def _fill_lengths(self) -> None:
        if self.length is None:
            return
        for section, key in (("template", "max_length"), ("model", "max_model_len")):
            if self.sections[section].get(key) is None:
                self.sections[section][key] = self.length

    def _resolve_paths(self) -> None:
        if self.base is None:
            return
        for section, keys in _PATHS.items():
            held = self.sections[section]
            for key in filter(held.__contains__, keys):
                value = held[key]
                if key == "val" and isinstance(value, Mapping):  # several sets by name
                    held[key] = {name: _resolved(one, self.base) for name, one in value.items()}
                else:
                    held[key] = _resolved(value, self.base)

    def _only_of_validation(self) -> None:
        """Packs that were made before need no reading of records; validation samples would."""
        data = self.sections["data"]
        if self.kind not in MADE or data.get("val"):
            return
        defaults = {
            key: held.get_default(call_default_factory=True)
            for key, held in Records.model_fields.items()
            if key not in OF_ROWS
        }
        defaults = {k: v.model_dump() if isinstance(v, Section) else v for k, v in defaults.items()}
        found = [key for key, default in defaults.items() if key in data and data[key] != default]
        if found:
            names = ", ".join(self.names[f"data.{key}"] for key in found)
            self.told.append(f"{names}: no effect without custom.val_jsonl (data.val)")

    def _tell(self) -> None:
        """One line for all keys without effect on this kind of data, and one for each other warning."""
        if not world().is_writer:
            return
        if self.idle:
            has = "has" if len(self.idle) == 1 else "have"
            logger.warning(
                "%s %s no effect on data of kind %s: %s",
                ", ".join(self.idle), has, self.kind, REASONS[self.kind],
            )  # fmt: skip
        for line in self.told:
            logger.warning("%s", line)

    def _unknown(self, section: str, key: str) -> ConfigError:
        known = [*self._fields(section), *old_names(section)]
        if section == "data":
            known += [name for kind in KINDS.values() for name in kind.model_fields]
        if section == "training":
            known += trainer_fields()
        return _unknown(section, key, known)

    def _one_line(self, error: ValidationError) -> ConfigError:
        first, *others = error.errors(include_url=False)
        inner = first.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            return self._named(inner)
        dotted = self._dotted(first)
        if first["type"] == "extra_forbidden":
            return ConfigError(f"unknown key {dotted!r}", hint="see docs/config.md for the keys")
        written = dict.fromkeys(self._dotted(other) for other in others if self._is_written(other))
        further = [name for name in written if not f"{dotted}.".startswith(f"{name}.")]
        more = f"; also wrong: {', '.join(further)}" if further else ""
        return ConfigError(
            f"{dotted} is {first['input']!r}: {plain_words(first)}{more}", hint=f"correct {dotted}"
        )

    def _is_written(self, error: Any) -> bool:
        """Does the file have the key of an error, or is it there by a default or another key?"""
        return ".".join(map(str, error["loc"][:2])) in self.names or error["loc"][0] == "data"

    def _worded(self, text: str) -> str:
        """A text with keys by the names that the file has for them."""
        return _KEY.sub(lambda found: self.names.get(found[0], found[0]), text)

    def _named(self, error: ConfigError) -> ConfigError:
        hint = None if error.hint is None else self._worded(error.hint)
        return ConfigError(self._worded(error.message), hint=hint)

    def _dotted(self, error: Any) -> str:
        """The key an error of pydantic speaks of, under the name that the file has for it."""
        held: Any = {"global_max_length": self.length, **self.sections}
        path = []
        for part in error["loc"]:
            listed = isinstance(held, list) and isinstance(part, int)
            if listed or (isinstance(held, Mapping) and part in held):
                held = held[part]
            elif error["type"] != "missing" or part != error["loc"][-1]:
                continue  # pydantic names the member of a union
            path.append(str(part))
        return ".".join([self.names.get(".".join(path[:2]), ".".join(path[:2])), *path[2:]])


def _no_section(name: str, held: Any) -> ConfigError:
    """A value where a section belongs, with the key that it most likely is."""
    key = {"data": "path", "model": "name_or_path", "template": "processor"}.get(name)
    hint = "a section holds keys, one a line, indented"
    if key and isinstance(held, str):
        hint = f"write {name}: {{{key}: {held}}}"
    elif name == "data" and isinstance(held, list):
        hint = "one path, or a pattern as in data: {path: 'part-*.jsonl'}; several sets: data.mixture"
    return ConfigError(f"{name} is {held!r}, expected a section with keys", hint=hint)


def _unknown(section: str, key: str, known: Iterable[str]) -> ConfigError:
    dotted = f"{section}.{key}" if section else key
    places: dict[str, Collection[str]] = {
        **{name: kind.model_fields for name, kind in _SECTIONS.items()},
        "data": {name for kind in KINDS.values() for name in kind.model_fields},
        "custom": old_names("custom"),
    }
    elsewhere = [name for name, keys in places.items() if key in keys and name != section]
    elsewhere += [name for name in _SECTIONS if section and key in old_names(name) and name != section]
    known = list(known)
    close = nearest(key, known)
    foreign = nearest(key, FOREIGN, 0.85)
    if foreign is not None and foreign not in known:
        key = foreign  # a name of another layout, misspelt
    if key in FOREIGN and not (section and elsewhere):
        hint = FOREIGN[key]
    elif elsewhere:
        hint = f"did you mean {elsewhere[0]}.{key}?"
    elif close:
        hint = f"did you mean {section + '.' if section else ''}{close}?"
    elif not section and key in trainer_fields():
        hint = f"did you mean training.{key}?"
    else:
        hint = f"keys: {', '.join(known[:24])}"
    return ConfigError(f"unknown key {dotted!r}", hint=hint)


def _joined(train: Any, training: Any) -> Any:
    """The sections `train` and `training` as one."""
    if training is None or not isinstance(train, Mapping) or not isinstance(training, Mapping):
        return train if training is None else training
    both = sorted(set(train) & set(training))
    if both:
        raise ConfigError(f"train.{both[0]} and training.{both[0]} are one key", hint="keep one of them")
    return {**train, **training}


def _resolved(value: Any, base: Path) -> Any:
    """A path that is there, as it stands or beside the file; anything else as it is."""
    if not isinstance(value, str) or value.startswith(("demo:", "tiny:")):
        return value
    path = Path(os.path.expanduser(value))
    if not path.is_absolute() and not os.path.exists(path) and os.path.exists(base / path):
        path = base / path
    return str(path) if os.path.exists(path) else value  # False for a name that no file can have


def _parse(text: str, path: Path) -> dict[str, Any]:
    """The mapping a YAML text holds; an empty text is an empty mapping.

    Raises:
        ConfigError: malformed, with file, line and column; or not a mapping.
    """
    values = files.parse_yaml(text, str(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, expected sections with keys")
    return values
