"""The training laws on the lowest, a middle and the newest torch and transformers (`make test-versions`).

Each in an environment of its own, kept in `PACKTRAIN_HOSTS`. What holds is written to the table of
docs/attention.md; every version of it must be listed in `packtrain.train.versions.TESTED`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from venvs import REPOSITORY, build, run

from packtrain.train.versions import TESTED

pytestmark = pytest.mark.versions

PAGE = REPOSITORY / "docs" / "attention.md"
BEGIN, END = "<!-- versions -->\n", "<!-- end of versions -->"

#: (name, torch and its torchvision, further packages)
ROWS = [
    ("lowest", ["torch==2.6.0", "torchvision==0.21.0"], ["transformers==4.57.6", "accelerate==1.10.1"]),
    ("middle", ["torch==2.9.1", "torchvision==0.24.1"], ["transformers==5.9.0", "accelerate==1.15.0"]),
    ("newest", ["torch==2.14.1", "torchvision==0.29.1"], ["transformers==5.24.0", "accelerate==1.15.0"]),
]
OURS = [
    "numba>=0.60",
    "pydantic>=2.7",
    "pyyaml>=6.0",
    "click>=8.1",
    "rich>=13.7",
    "pillow>=10.3",
    "psutil>=5.9",
]


@pytest.mark.parametrize(("name", "torch", "further"), ROWS, ids=[name for name, _, _ in ROWS])
def test_the_training_laws_hold(name: str, torch: list[str], further: list[str]) -> None:
    python = build(f"versions-{name}", [*torch, *further, *OURS], torch=None)
    script = (Path(__file__).parent / "version_laws.py").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in run(python, script, ours=True, timeout_s=1200).splitlines()]
    installed, laws = lines[0], {line["law"]: line["broken"] for line in lines[1:]}
    write(name, installed, laws)
    assert {law: broken for law, broken in laws.items() if broken} == {}
    for package, version in installed.items():
        minor = ".".join(version.split("+")[0].split(".")[:2])
        assert minor in TESTED[package], f"add {package} {minor} to train/versions.py"


def write(name: str, installed: dict[str, str], laws: dict[str, str | None]) -> None:
    """This row of the table, the others as they are."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    table, tail = rest.split(END)
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()[2:]}
    marks = " | ".join("holds" if broken is None else f"broken: {broken}" for broken in laws.values())
    rows[name] = f"| {name} | {installed['torch'].split('+')[0]} | {installed['transformers']} | {marks} |"
    titles = ["environment", "torch", "transformers", *laws]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [rows[row] for row, _, _ in ROWS if row in rows]
    PAGE.write_text(head + BEGIN + "\n".join(lines) + "\n" + END + tail, encoding="utf-8")
