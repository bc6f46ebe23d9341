"""examples/own_loop.py as it stands: whole steps, exact loss, resume to the pack, evaluation, two ranks."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_examples_order import REPOSITORY, save_model, save_rows

import warm

SCRIPT = REPOSITORY / "examples" / "own_loop.py"
FEW = {"pack_length": 128, "epochs": 2, "grad_accum": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("loop")
    save_model(tokenizer_folder, folder / "model", "tiny:qwen3")
    return folder / "model", save_rows(folder, pictures=False)


def main(*args: Any, **more: Any) -> list[float]:
    losses: list[float] = runpy.run_path(str(SCRIPT))["main"](*args, **{**FEW, **more})
    return losses


def test_it_goes_on_where_it_stopped(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = main(*made, tmp_path / "whole", made[1])
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    evaluated = [row["eval_loss"] for row in said if "eval_loss" in row]
    assert len(evaluated) == 2 and evaluated[1] < evaluated[0]
    first = main(*made, tmp_path / "parts", stop_at=1)
    assert first + main(*made, tmp_path / "parts") == pytest.approx(whole, abs=1e-6)


def test_accumulation_changes_no_loss(made: tuple[Path, Path], tmp_path: Path) -> None:
    """The first loss is the mean over all supervised tokens of the step, however it is cut."""
    from packtrain.planning.packplan import PackPlan

    one = main(*made, tmp_path / "one", grad_accum=1, pack_length=4096, stop_at=1)
    assert len(PackPlan.load(tmp_path / "one" / "train" / "plan")) == 1
    whole = len(PackPlan.load(tmp_path / "one" / "train" / "plan")[0])
    many = main(*made, tmp_path / "many", pack_length=8, grad_accum=whole, stop_at=1)
    assert many == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_train_as_one(made: tuple[Path, Path], tmp_path: Path, fsdp: bool) -> None:
    alone = main(*made, tmp_path / "alone", grad_accum=4, epochs=1, stop_at=2)
    code = (
        f"import runpy, torch.distributed as d; torch = __import__('torch'); torch.set_num_threads(1); "
        f"main = runpy.run_path({str(SCRIPT)!r})['main']; "
        f"found = main({str(made[0])!r}, {str(made[1])!r}, {str(tmp_path / 'two')!r}, fsdp={fsdp}, "
        "pack_length=128, epochs=1, grad_accum=2, stop_at=2); d.destroy_process_group()"
    )
    (tmp_path / "start.py").write_text(code)
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "start.py"),
    ]
    done = subprocess.run(
        [warm.python(), *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["loss"] for row in rows] == pytest.approx(alone, abs=1e-4)
    assert torch.isfinite(torch.tensor(alone)).all()
