"""Real launches on gloo: two ranks train, four ranks agree. Each costs seconds, so there are few."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain.planning.packplan import PackPlan

HERE = Path(__file__).parent


def torchrun(ranks: int, *args: Any) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
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
    done = torchrun(2, "-m", "packtrain", "train", tmp_path / "run.yaml", "--json")
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
    keys = {"loss", "token_acc", "packs", "tokens_per_s", "slots_per_s", "samples_per_pack"}
    assert all(keys <= set(row) and 0 <= row["token_acc"] <= 1 for row in steps)
    assert all(row["slots_per_s"] >= row["tokens_per_s"] > 0 for row in steps)
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
    assert "packtrain: rank 0 failed:" in done.stderr or done.stderr.count("packtrain: ") == 1
    assert "left out" in done.stderr and "Traceback" not in done.stderr.split("torch/distributed")[0]
