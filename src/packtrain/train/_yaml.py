"""YAML text to a mapping: errors with their line, and no key given twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError

__all__ = ["parse_yaml"]


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:merge" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def parse_yaml(text: str, path: Path) -> dict[str, Any]:
    """The mapping a YAML text holds; an empty text is an empty mapping.

    Raises:
        ConfigError: malformed, with file, line and column; or not a mapping.
    """
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}, line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}: {problem}", hint="mend the YAML at this place") from None
    except (TypeError, ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError(f"{path}: {problem}", hint="a key is plain text, a value a plain value") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, expected sections with keys")
    return values
