"""The bench runs, and its law checks hold on random instances."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

BENCH = Path(__file__).resolve().parents[2] / "bench" / "planner.py"


def run(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, str(BENCH), *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_laws_on_random_instances_threads_and_two_cpus() -> None:
    """Compiled on threads, plain, and compiled for a processor without vector extensions: equal bytes."""
    assert "laws hold on 250 random instances" in run("--laws", "250")


def test_limits_and_windows_are_held_against_their_bounds(tmp_path: Path) -> None:
    np.save(
        tmp_path / "some.npy", np.clip(np.random.default_rng(0).lognormal(5, 1, 3000), 1, 9000).astype(int)
    )
    run("--n", "3000", "--limits", "--real", str(tmp_path), "--json", str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 6 and rows[-1]["kind"] == "some" and all(row["over"] >= 0 for row in rows)


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
