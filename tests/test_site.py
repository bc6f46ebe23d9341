"""The pages as a site: the tutorial runs as it stands, pages are short, generated ones are up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import warm
from pages import script

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
#: Written by scripts, whole or nearly.
GENERATED = ("config.md", "keys.md", "python.md", "specs.md", "tree.md")


def nav(items: list[object]) -> list[str]:
    out: list[str] = []
    for item in items:
        for held in item.values() if isinstance(item, dict) else [item]:
            out += nav(held) if isinstance(held, list) else [str(held)]
    return out


def test_every_page_stands_in_the_navigation_once() -> None:
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(nav(site["nav"])) == sorted(path.name for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_no_page_is_longer_than_12_kb(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.S)
    assert page.name in GENERATED or len(by_hand.encode()) <= 12_288


def test_the_page_of_public_names_is_up_to_date() -> None:
    module = script("python_page")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python scripts/python_page.py"


def test_the_tables_of_options_are_up_to_date() -> None:
    module = script("cli_page")
    for page in module.PAGES:
        assert page.read_text(encoding="utf-8") == module.page(page), "run: python scripts/cli_page.py"


def test_pictures_are_up_to_date_and_each_stands_on_a_page_with_words_for_it() -> None:
    module = script("pictures")
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in module.FOLDER.glob("*.svg")}
    assert drawn == {name: module.svg(name) for name in module.PICTURES}, "run: python scripts/pictures.py"
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    shown = dict(re.findall(r"!\[([^\]]+)\]\(pictures/(\w+)\.svg\)", pages))
    assert sorted(shown.values()) == sorted(drawn) and all(len(words.split()) > 5 for words in shown)


def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """Its Python block is saved under the name that the text gives, its commands are typed in order."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    blocks = [
        (language, body)
        for apart, language, body in re.findall(r"(<!-- not run: [^\n]+-->\n)?```(\w+)\n(.*?)```", text, re.S)
        if not apart
    ]
    assert [language for language, _ in blocks] == ["python", *["sh"] * 6]
    name = re.search(r"Save it as `(\w+\.py)`", text)
    assert name is not None
    (tmp_path / name.group(1)).write_text(blocks[0][1])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(warm.python())
    (tmp_path / "bin" / "packtrain").write_text('#!/bin/sh\nexec python -m packtrain "$@"\n')
    (tmp_path / "bin" / "packtrain").chmod(0o755)
    place = {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # `scripts/setup.sh` puts this before a user's script where torchvision stands beside a CPU build of torch
    said = ""
    for _, body in blocks[1:]:
        for line in body.strip().splitlines():
            done = subprocess.run(
                line,
                shell=True,
                cwd=tmp_path,
                env={**os.environ, **place, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
                capture_output=True,
                text=True,
            )
            said += done.stdout + done.stderr
            assert done.returncode == 0, (line, done.stderr[-3000:])
    for words in (
        "200 samples, image",
        "trl and packtrain agree",
        "pack length 2,048",
        "32 samples encoded for real: 0 mismatches",
        "optimizer steps",
        "train: 200 of 200 samples in 21 packs of 2,048 tokens",
        "a step: 32 samples",
        "control",
        "packed - unpacked loss",
    ):
        assert words in said, words
    assert (tmp_path / "plan.html").exists() and (tmp_path / "first" / "packtrain" / "report.html").exists()


@pytest.mark.install
def test_the_site_is_built_without_warnings() -> None:
    done = subprocess.run(
        ["make", "docs"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 0 and "WARNING -" not in done.stderr, done.stderr[-3000:]
    page = (REPOSITORY / "build" / "site" / "tutorial.html").read_text(encoding="utf-8")
    assert "one hour" in page
