"""Pick the plug-in that opens a source: by the option `kind`, by suffix, then by content."""

from __future__ import annotations

import inspect
import os
from typing import Any

from ..errors import ConfigError, SourceError, nearest
from ..extend import Source, lookup, names

__all__ = ["open_source"]


def open_source(path: str | os.PathLike[str], *, kind: str | None = None, **options: Any) -> Source:
    """Open a source of samples.

    Args:
        path: a file, or a folder of pairs.
        kind: name of a module in `packtrain.sources`; default: by suffix, then by content.
        **options: passed to the plug-in, for example `cache_dir` and `verify_content`.

    Raises:
        SourceError: the source is missing, empty or of no known kind.
        ConfigError: an option the plug-in does not have.
    """
    module = lookup("sources", kind if kind is not None else _kind_of(os.fspath(path)))
    known = inspect.signature(module.open_source).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for option in options:
            if option not in known:
                allowed = [name for name in known if name != "path"]
                close = nearest(option, allowed)
                hint = f"did you mean {close!r}?" if close else f"options: {', '.join(allowed)}"
                name = module.__name__.rpartition(".")[2]
                raise ConfigError(f"sources of kind {name!r} have no option {option!r}", hint=hint)
    source: Source = module.open_source(path, **options)
    return source


def _kind_of(path: str) -> str:
    """The plug-in whose `SUFFIXES` hold the path's suffix; by content otherwise."""
    if os.path.isdir(path):
        return "pairs"
    lower = path.lower()
    for name in names("sources"):
        if lower.endswith(tuple(getattr(lookup("sources", name), "SUFFIXES", ()))):
            return name
    if not os.path.isfile(path):
        return "jsonl"  # whose message says what is missing
    try:
        with open(path, "rb") as handle:
            text = handle.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise SourceError(f"{path} cannot be opened: {error.strerror}") from None
    if text.startswith((b"{", b"[")):
        return "json" if text.startswith(b"[") else "jsonl"
    raise SourceError(
        f"{path} is of no known kind", hint=f"kinds: {', '.join(names('sources'))}; or pass kind="
    )
