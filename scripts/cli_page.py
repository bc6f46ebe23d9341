"""Write the option tables of docs/cli.md and docs/cli_packs.md from the commands themselves.

python scripts/cli_page.py          (a test fails when a table is not up to date)
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from packtrain.cli._app import app

PAGES = [Path(__file__).resolve().parent.parent / "docs" / name for name in ("cli.md", "cli_packs.md")]
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->\n"
_SECTION = re.compile(r"(?<=^## `packtrain )(\w+)((?:(?!^## ).)*?)" + f"{BEGIN}.*?{END}", re.M | re.S)


def _options(verb: str) -> list[click.Option]:
    command = app.get_command(click.Context(app), verb)
    assert command is not None, verb
    return [one for one in command.params if isinstance(one, click.Option) and one.name != "as_json"]


def _names(option: click.Option) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _meaning(option: click.Option) -> str:
    said = " ".join((option.help or "").split()).rstrip(".").replace("|", "\\|")
    said = re.sub(r" \[(default: [^\]]*)\]$", r"; \1", said)
    if isinstance(option.type, click.Choice) and "`" not in said:
        said = "; ".join(filter(None, (said, ", ".join(f"`{one}`" for one in option.type.choices))))
    if option.required:
        return f"{said}; required"
    default = option.to_info_dict()["default"]
    shown = option.show_default is None and not (option.is_flag or option.multiple)
    if shown and default is not None and "default" not in said:
        return f"{said}; default `{default}`"
    return said


def table(verb: str) -> str:
    """The options of a verb but `--json`, which all have; those that mean what `measure` says are one row."""
    known = {} if verb == "measure" else {one.name: one.help for one in _options("measure")}
    same = [one for one in _options(verb) if one.help and known.get(one.name) == one.help]
    same = same if len(same) > 3 else []
    rows = [f"| {_names(one)} | {_meaning(one)} |" for one in _options(verb) if one not in same]
    if same:
        rows.append(f"| {', '.join(map(_names, same))} | as for `measure` |")
    return "\n".join(["| option | meaning |", "|---|---|", *rows, ""])


def page(path: Path) -> str:
    """The page as it should be."""
    return _SECTION.sub(
        lambda found: f"{found[1]}{found[2]}{BEGIN}{table(found[1])}{END}", path.read_text(encoding="utf-8")
    )


if __name__ == "__main__":
    for one in PAGES:
        one.write_text(page(one), encoding="utf-8")
