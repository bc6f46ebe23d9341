"""docs/specs.md is whole and up to date, and the launch lines of the documents run on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import warm
from packtrain.moved import THEIRS
from packtrain.pipeline.export import export
from packtrain.pipeline.prepare import prepare
from packtrain.train.config import load_config
from pages import script

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def pages() -> Any:
    return script("specs_page")


def test_the_page_is_up_to_date_and_has_no_empty_cell(pages: Any) -> None:
    text = pages.PAGE.read_text(encoding="utf-8")
    assert text == pages.page(), "run: python scripts/specs_page.py"
    assert not re.search(r"\|[ \t]*\|", text)
    text, names = text.split("## Names in Python")
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| requirement")
    ]
    assert len(rows) == len(pages.marks())
    assert all(f"`{theirs}`" in names for row in THEIRS.values() for theirs in row)
    for number in pages.TITLES:
        assert sum(row[0] == number for row in pages.marks()) >= 9
    assert len({row[1:2] + row[4:] for row in pages.marks()}) == len(rows)


@pytest.mark.spec(
    "001",
    "the launch line (`streaming`, `packing`, `packing_interval`) on two ranks",
    key="`training.streaming`, `training.packing_interval`",
    api="`train`",
)
@pytest.mark.spec(
    "003", "training on an export on two ranks", key="`data.kind: exported`", api="`open_packs`, `train`"
)
@pytest.mark.spec(
    "004",
    "the launch lines (`--train.dyn_bsz true`, and false in epochs) on two ranks",
    key="`training.dyn_bsz`",
    api="`train`, `pipeline.run`",
)
def test_launch_lines_on_two_ranks(text_run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """One pair of processes trains them all; the plan and the growing directory have their own tests."""
    values = text_run(40, proof=False)
    config = load_config(values)
    made = prepare(config, tmp_path / "prepared")
    export(made.plan_folder, tmp_path / "packs", format="webdataset", source=made.source)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")

    def line(name: str, *further: str) -> list[str]:
        out = ["--training.output_dir", str(tmp_path / name)]
        return ["train", str(tmp_path / "run.yaml"), *out, *further, "--json"]

    exported = {**values, "data": {"kind": "exported", "path": str(tmp_path / "packs")}}
    exported.pop("custom")
    (tmp_path / "exported.yaml").write_text(yaml.safe_dump(exported), encoding="utf-8")
    lines = {
        "stream": line("stream", "--streaming", "true", "--packing", "true",
                       "--packing_interval", "16", "--padding_free=true", "--max_steps", "3"),
        "budget": line("budget", "--train.dyn_bsz", "true", "--train.micro_batch_size", "2",
                       "--data.dyn_bsz_buffer_size", "20", "--train.pad_to_length=true", "--max_steps", "3"),
        "rows": line("rows", "--train.dyn_bsz", "false", "--train.micro_batch_size", "4"),
        "exported": ["train", str(tmp_path / "exported.yaml"), "--training.output_dir",
                     str(tmp_path / "exported"), "--json"],
    }  # fmt: skip
    (tmp_path / "words.json").write_text(json.dumps(list(lines.values())), encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [warm.python(), *launch, str(HERE / "spec_lines_script.py"), str(tmp_path / "words.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    assert [Path(row["run"]).name for row in told] == list(lines)
    logs = {
        name: [json.loads(row) for row in (tmp_path / name / "train_log.jsonl").read_text().splitlines()]
        for name in lines
    }
    steps = {name: [row for row in rows if "loss" in row] for name, rows in logs.items()}
    assert len(steps["stream"]) == len(steps["budget"]) == 3
    assert len(steps["rows"]) == 5  # 40 samples in rows of 4 on 2 ranks
    aligned = made.plan.align(2)
    assert len(steps["exported"]) == aligned.steps
