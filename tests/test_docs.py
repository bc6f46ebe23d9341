"""What the documentation shows is true: doctests of modules and pages run, README's first snippet too."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src" / "packtrain"
SHOWN = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])


@pytest.mark.parametrize("path", SHOWN, ids=lambda p: str(p.relative_to(SOURCE)))
def test_examples_in_docstrings(path: Path) -> None:
    dotted = ".".join(["packtrain", *path.relative_to(SOURCE).with_suffix("").parts])
    result = doctest.testmod(importlib.import_module(dotted), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_in_pages(page: Path) -> None:
    assert not doctest.testfile(str(page), module_relative=False).failed


def test_the_first_python_of_the_readme_runs() -> None:
    block = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.S)[
        0
    ]
    names: dict[str, object] = {}
    exec(block, names)
    packs = [pack.tolist() for pack in names["plan"]]  # type: ignore[attr-defined]
    assert packs == eval(re.search(r"# (\[\[.*\]\])", block).group(1))  # type: ignore[union-attr]
    assert str(len(packs)) in block


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert [
        page.name for page in PAGES[1:] if page.name != "README.md" and f"docs/{page.name}" not in readme
    ] == []
