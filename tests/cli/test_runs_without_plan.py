"""`which`, `verify` and `diff` of runs whose packs were made as they came."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import packtrain as pt
from packtrain.cli import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        return (int(stop.value.code or 0), *capsys.readouterr())

    return run


def test_the_losses_of_a_stream_answer_for_its_plan(
    call: Call, text_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A step has the samples that were written down, a sample the steps; verify and diff name the kind."""
    values = text_run(max_steps=3, log_sample_loss=True)
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({**values, "data": {"kind": "stream"}}), encoding="utf-8"
    )
    assert call("train", tmp_path / "run.yaml")[0] == 0
    run, losses = tmp_path / "run", tmp_path / "run" / "sample_loss" / "rank-0.jsonl"
    rows = {row["step"]: row for row in map(json.loads, losses.read_text().splitlines())}
    for words in ((), ("--losses",)):
        code, out, _ = call("which", run, "--step", 2, *words, "--json")
        told = json.loads(out)
        assert code == 0 and told["run_step"] == 2 and told["ids"] == sorted(rows[2]["ids"])
        assert {row["id"]: row["loss"] for row in told["losses"]} == dict(
            zip(rows[2]["ids"], rows[2]["loss"], strict=True)
        )
    sample = rows[1]["ids"][0]
    code, out, _ = call("which", run, "--sample", sample, "--json")
    steps = json.loads(out)["steps"]
    assert code == 0 and [row["run_step"] for row in steps] == [s for s in rows if sample in rows[s]["ids"]]
    assert steps[0]["loss"] == rows[1]["loss"][0]
    code, out, err = call("which", run, "--sample", 10**6, "--epoch", 0)
    assert code == 0 and "no step of this run holds it" in out and "--epoch" in err
    assert call("which", run, "--step", 9)[::2] == (2, f"packtrain: {run} holds no losses of step 9\n"
                                                       "  hint: steps count from 0\n")  # fmt: skip
    for words in (("verify", run), ("diff", run, run), ("show", run, "--sample", 1)):
        code, _, err = call(*words)
        assert code == 2 and f"{run} is a run of kind stream: it has no " in err
        assert "only runs of kind planned and exported" in err


def test_without_losses_the_setting_is_named(call: Call, tmp_path: Path) -> None:
    config = {"data": {"kind": "growing", "path": "packed"}}
    (tmp_path / "run.json").write_text(json.dumps({"config": config, "result": {}}), encoding="utf-8")
    for words in (("--step", 0), ("--step", 0, "--losses"), ("--sample", 3)):
        code, _, err = call("which", tmp_path, *words)
        assert code == 2 and "holds no losses of samples, and a run of kind growing has no plan" in err
        assert "training.log_sample_loss: true" in err
    code, _, err = call("verify", tmp_path)
    assert code == 2 and "can be verified: packtrain verify packed" in err


def test_a_stopped_run_without_a_plan_says_how_to_go_on(call: Call, tmp_path: Path) -> None:
    """Its validation plan is none of what it trains on."""
    (tmp_path / "run_config.json").write_text("{}", encoding="utf-8")
    pt.plan([3, 4], 8).save(tmp_path / "val_plan")
    code, _, err = call("show", tmp_path)
    assert code == 2 and "a run that has not ended" in err and "the same command goes on with it" in err
    pt.plan([3, 4], 8).save(tmp_path / "plan")
    code, _, err = call("show", tmp_path)
    assert code == 2 and f"it has {tmp_path / 'plan'}" in err and "val_plan" not in err


def test_a_run_that_has_not_ended_answers_as_far_as_it_can(call: Call, tmp_path: Path) -> None:
    """A stopped stream has the samples of its steps, or the key that writes them; a planned run its plan."""
    code, _, err = call("which", tmp_path / "NOPE", "--step", 0)
    assert code == 2 and f"{tmp_path / 'NOPE'} does not exist" in err
    (tmp_path / "train_log.jsonl").write_text('{"loss": 1.0, "step": 1}\n', encoding="utf-8")
    code, _, err = call("which", tmp_path, "--step", 0)
    assert code == 2 and "has not ended; training.log_sample_loss: true writes down" in err
    (tmp_path / "sample_loss").mkdir()
    row = {"step": 0, "rank": 0, "ids": [7, 3], "loss": [1.5, 0.5], "tokens": [4, 2]}
    (tmp_path / "sample_loss" / "rank-0.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    code, out, _ = call("which", tmp_path, "--step", 0, "--losses", "--json")
    assert code == 0 and json.loads(out)["ids"] == [3, 7]
    assert json.loads(call("which", tmp_path, "--sample", 7, "--json")[1])["steps"][0]["loss"] == 1.5
    pt.plan([3, 4], 8).save(tmp_path / "plan")
    code, out, _ = call("which", tmp_path, "--step", 0, "--losses", "--json")  # which sample made it jump?
    assert code == 0 and [row["id"] for row in json.loads(out)["losses"]] == [7, 3]
    shutil.rmtree(tmp_path / "sample_loss")
    code, _, err = call("which", tmp_path, "--step", 0)
    assert code == 2 and f"the run has not ended; its plan is {tmp_path / 'plan'}" in err
