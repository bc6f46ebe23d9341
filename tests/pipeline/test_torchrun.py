"""Real launches on gloo: two ranks train, four ranks agree. Each costs seconds, so there are few."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warm
from packtrain.planning.packplan import PackPlan

HERE = Path(__file__).parent


def torchrun(ranks: int, *args: Any, python: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [
        *(
            python or warm.python(),
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ),
        *map(str, args),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.spec(
    "000",
    "the launch line on two ranks: one plan, equal steps",
    key="`torchrun … packtrain train`",
    api="`pipeline.run`",
)
def test_two_ranks_train_on_one_plan(text_run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """11 packs on 2 ranks: 6 micro steps each, 3 optimizer steps, every pack trained, one repeated."""
    import yaml

    values = text_run(60, effective_batch_size=4, per_device_train_batch_size=3, repeat_loss="zero")
    values["custom"]["val_jsonl"] = values["custom"]["train_jsonl"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    done = torchrun(2, "-m", "packtrain", "train", tmp_path / "run.yaml", "--json", python=sys.executable)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1  # rank 0 alone prints
    told = json.loads(lines[0])
    plan = PackPlan.load(tmp_path / "run" / "plan")
    assert told["raw_checksum"] == plan.checksum and told["world_size"] == 2
    assert told["n_aligned_packs"] == len(plan) + len(plan) % 2 == told["n_raw_packs"] + told["pad_needed"]
    assert (told["gradient_accumulation_steps"], told["packs_per_step_realised"]) == (2, 4)
    assert told["metrics"]["steps"] == told["steps_per_epoch"] == -(-told["n_aligned_packs"] // 4)
    assert told["metrics"]["eval_packs"] == len(plan) and told["metrics"]["eval_samples"] == 60
    rows = [json.loads(line) for line in (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()]
    assert rows[0]["raw_checksum"] == plan.checksum and rows[0]["n_raw_packs"] == len(plan)
    steps = [row for row in rows if "loss" in row]
    assert sum(row["packs"] for row in steps) == told["n_aligned_packs"]  # both ranks' packs
    keys = {"loss", "token_acc", "packs", "tokens_per_s", "slots_per_s", "samples_per_pack", "step_s"}
    assert all(keys <= set(row) and 0 <= row["token_acc"] <= 1 for row in steps)
    assert all(row["slots_per_s"] >= row["tokens_per_s"] > 0 for row in steps)
    assert all(0 < row["data_wait_s"] < row["step_s"] for row in steps)
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["result"]
    assert stored["aligned_checksum"] == plan.align(2).checksum
    assert f"N_raw_packs={len(plan)}" in done.stderr and done.stderr.count("raw_plan checksum") == 1


def test_four_ranks_start_on_files_and_their_union_is_the_plan(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(text_run(60)))
    done = torchrun(4, HERE / "gloo_script.py", tmp_path / "run.json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    plan = PackPlan.load(tmp_path / "run" / "plan")
    assert [row["made"] for row in rows] == [True, False, False, False]
    assert {row["checksum"] for row in rows} == {plan.align(4).checksum}
    assert len({row["text"] for row in rows}) == len({row["folder"] for row in rows}) == 1
    assert len({len(row["packs"]) for row in rows}) == 1
    assert sorted(pack for row in rows for pack in row["packs"]) == sorted(plan.align(4).pack_ids.tolist())


def test_rank_0s_refusal_ends_all_ranks_with_its_reason(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    import yaml

    values = text_run(20, max_drop_fraction=0.0, packing_allow_single_long=False, cap=16)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    done = torchrun(2, "-m", "packtrain", "train", tmp_path / "run.yaml")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("packtrain: ")]
    reason = "the plan has no pack; 20 of 20 samples (100.0%) are left out: over_long 20"
    said.remove(f"packtrain: {reason}")  # rank 0's own word, once
    # rank 1 reads the reason, unless the launcher ends it first
    assert said in ([], [f"packtrain: rank 0 failed: {reason}"], ["packtrain: stopped by SIGTERM"])
    assert "Traceback" not in done.stderr.split("torch/distributed")[0]


def test_a_stream_that_two_ranks_began_goes_on_with_one(
    text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The same samples in every step: 2 ranks of 2 micro steps, then 1 rank of 4."""
    import yaml

    keys: dict[str, Any] = {"packing_mode": "streaming", "stream_window": 16, "stream_splits": 2}
    keys |= {"max_steps": 6, "effective_batch_size": 4, "save_strategy": "steps", "save_steps": 3}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(text_run(90, **keys)))
    done = torchrun(2, "-m", "packtrain", "train", tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr

    def steps(folder: Path) -> dict[int, Any]:
        rows = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
        return {row["step"]: row for row in rows if "loss" in row}

    two = steps(tmp_path / "run")
    assert sorted(two) == [1, 2, 3, 4, 5, 6]
    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "run" / "checkpoint-3", tmp_path / "again" / "checkpoint-3")
    values = text_run(90, output_dir=tmp_path / "again", **keys)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(values))
    command = [warm.python(), "-m", "packtrain", "train", str(tmp_path / "again.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    one = steps(tmp_path / "again")
    assert sorted(one) == [4, 5, 6]
    for step, row in one.items():
        assert (row["packs"], row["samples_per_pack"]) == (two[step]["packs"], two[step]["samples_per_pack"])
        assert row["loss"] == pytest.approx(two[step]["loss"], rel=1e-4)
