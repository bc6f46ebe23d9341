"""The bench runs, and its law checks hold on random instances."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "planner.py"

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The bench with these words, in this process; what it prints."""

    def planner(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(BENCH), *arguments])
        with mock.patch.dict(os.environ), pytest.raises(SystemExit) as stop:
            runpy.run_path(str(BENCH), run_name="__main__")
        assert not stop.value.code, stop.value.code
        return capsys.readouterr().out

    return planner


def test_laws_on_random_instances_threads_and_two_cpus(run: Run) -> None:
    """Compiled on threads, plain, and compiled for a processor without vector extensions: equal bytes."""
    assert "laws hold on 40 random instances" in run("--laws", "40")


def test_limits_and_windows_are_held_against_their_bounds(run: Run, tmp_path: Path) -> None:
    np.save(
        tmp_path / "some.npy", np.clip(np.random.default_rng(0).lognormal(5, 1, 3000), 1, 9000).astype(int)
    )
    run("--n", "3000", "--limits", "--real", str(tmp_path), "--json", str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 6 and rows[-1]["kind"] == "some" and all(row["over"] >= 0 for row in rows)


def test_rows(run: Run, tmp_path: Path) -> None:
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
