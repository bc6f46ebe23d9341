"""The bench runs, and its law checks hold on random instances."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "planner.py"


def run(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, str(BENCH), *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_laws_on_random_instances() -> None:
    assert "laws hold on 150 random instances" in run("--laws", "150")


def test_rows(tmp_path: Path) -> None:
    run(
        "--n",
        "3000",
        "--kinds",
        "sft",
        "triplet",
        "--packers",
        "bfd",
        "auto",
        "--json",
        str(tmp_path / "rows.json"),
    )
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["kind"], row["packer"]) for row in rows] == [
        ("sft", "bfd"), ("sft", "auto"), ("triplet", "bfd"), ("triplet", "auto"),
    ]  # fmt: skip
    assert all(row["over"] >= 0 and row["floor_s"] > 0 for row in rows)
