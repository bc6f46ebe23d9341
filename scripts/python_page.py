"""Write docs/python.md: the public names with signature and first paragraph of their docstring.

python scripts/python_page.py          (a test fails when the page is not up to date)
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "python.md"
MODULES = ("packtrain", "packtrain.data", "packtrain.collate", "packtrain.template", "packtrain.train")
MODULES += ("packtrain.hosts.transformers", "packtrain.hosts.trl", "packtrain.export", "packtrain.testing")

_HEAD = """# Python

Public names, by module. `help(name)` prints the whole docstring: arguments, shapes, units, errors.
Names that are not listed here may change in any release. A name that goes keeps working for two minor
versions, with one DeprecationWarning that says the new one.
"""


def _entry(name: str, held: object) -> str:
    said = inspect.getdoc(held) or ""
    first = " ".join(said.split("\n\n")[0].split())
    if inspect.isclass(held) or inspect.isfunction(held):
        try:
            words = inspect.signature(held)
        except ValueError:
            words = None
        shown = ", ".join(
            f"{'*' * (p.kind == p.VAR_POSITIONAL)}{'**' * (p.kind == p.VAR_KEYWORD)}{p.name}"
            + ("=…" if p.default is not p.empty else "")
            for p in (words.parameters.values() if words else ())
        )
        return f"`{name}({shown})`\n:   {first}\n"
    return f"`{name}`\n:   {first if inspect.ismodule(held) else type(held).__name__}\n"


def page() -> str:
    """The page as it should be."""
    parts = [_HEAD]
    for dotted in MODULES:
        module = importlib.import_module(dotted)
        names = sorted(name for name in module.__all__ if not name.startswith("__"))
        parts.append(f"## `{dotted}`\n")
        parts += [_entry(name, getattr(module, name)) for name in names]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
