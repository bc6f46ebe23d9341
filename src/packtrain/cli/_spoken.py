"""What the library says, in the words of its caller: options for a verb, keys for the YAML of a run.

The library names Python arguments: `overwrite=True`, `max_drop_fraction`. Here they become `--overwrite` and
`--max-drop-fraction` where the verb has such an option, and `data.max_drop_fraction` where it reads YAML.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import click

__all__ = ["spoken"]

_VALUE = r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}|[\w.+-]*\w"
_ASSIGNED = re.compile(rf"(?<![\w.-])([a-z]\w*)=({_VALUE})")
_KEY = re.compile(r" \((training|data|template|model|custom)\.\w+\)")  # in brackets, for readers of YAML
_NAMED = re.compile(r"(?<![\w./'{-])([a-z]+(?:_[a-z]+)+)(?![\w(=/.':])")


def spoken(text: str, command: click.Command | None) -> str:
    """`text` with Python arguments as options or keys of a verb; what it has no word for stays.

    >>> plan = click.Command("plan", params=[click.Option(["--drop-last"], is_flag=True)])
    >>> spoken("use drop_last=True, or leave drop_last out; see max_tokens", plan)
    'use --drop-last, or leave --drop-last out; see max_tokens'
    """
    if command is None:
        return text
    options = {param.name: param for param in command.params if isinstance(param, click.Option)}
    keys = _keys() if command.context_settings.get("ignore_unknown_options") else {}
    if not keys:
        text = _KEY.sub("", text)

    def assigned(found: re.Match[str]) -> str:
        name, value = found[1], _literal(found[2])
        if name in options:
            return _option(options[name], value)
        return f"{keys[name]}: {_yaml(value)}" if name in keys else found[0]

    def named(found: re.Match[str]) -> str:
        name = found[1]
        return _long(options[name]) if name in options else keys.get(name, name)

    return _NAMED.sub(named, _ASSIGNED.sub(assigned, text))


@functools.cache
def _keys() -> Mapping[str, str]:
    """Name of a key -> the key with its section; names of several sections are left out."""
    from ..train.config.data import KINDS
    from ..train.config.sections import ModelConfig, TemplateConfig, TrainingConfig

    sections: dict[str, Callable[[], set[str]]] = {
        "data": lambda: {name for kind in KINDS.values() for name in kind.model_fields},
        "template": lambda: set(TemplateConfig.model_fields),
        "training": lambda: set(TrainingConfig.model_fields),
        "model": lambda: set(ModelConfig.model_fields),
    }
    found: dict[str, str] = {}
    for section, names in sections.items():
        for name in names():
            found.setdefault(name, f"{section}.{name}")
    return found


def _long(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--"))


def _option(option: click.Option, value: Any) -> str:
    name = _long(option)
    if option.is_flag:
        return name if value else f"no {name}"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {key}={item}" for key, item in value.items())
    return " ".join(f"{name} {item}" for item in (value if isinstance(value, list) else [value]))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _yaml(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).partition("\n")[0]
