"""Write the annotated tree into docs/tree.md: the first sentence of every module's docstring.

Usage: python scripts/tree.py          (a test fails when the page is not up to date)
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src" / "packtrain"
PAGE = REPOSITORY / "docs" / "tree.md"
BEGIN, END = "<!-- tree -->\n```text\n", "```\n<!-- end of tree -->"

# In the order of the layers, the lowest first.
ORDER = [
    *(
        "errors",
        "checks",
        "moved",
        "extend",
        "world",
        "files",
        "version",
        "remote",
        "waiting",
        "workers",
        "packers",
        "planning",
        "media",
        "families",
    ),
    *("sources", "measuring", "execute", "store", "template", "collate", "packs", "data"),
    *("testing", "export", "report", "train", "pipeline", "hosts", "cli", "__main__"),
]


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=[^.])\.\s|\n\n", text.strip() + "\n\n")[0]
    return textwrap.shorten(sentence, 120, placeholder=" …").rstrip(".:")


def tree() -> str:
    known = {
        path.stem if path.suffix else path.name
        for path in SOURCE.iterdir()
        if not path.name.startswith("__p")
    }
    missing = known - set(ORDER) - {"__init__", "py"}
    assert not missing, f"not in the order of layers: {sorted(missing)}"
    lines: list[str] = []
    for name in ORDER:
        folder, module = SOURCE / name, SOURCE / f"{name}.py"
        if folder.is_dir():
            lines.append(f"{name + '/':<24}{first_sentence(folder / '__init__.py')}".rstrip())
            for path in sorted(folder.rglob("*.py")):
                if path.stem != "__init__":
                    name = path.relative_to(folder).with_suffix("").as_posix()
                    lines.append(f"  {name:<22}{first_sentence(path)}".rstrip())
        elif module.is_file():
            lines.append(f"{module.name:<24}{first_sentence(module)}".rstrip())
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tree()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
