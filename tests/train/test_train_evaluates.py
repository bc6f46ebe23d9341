"""Evaluation while training without a plan: it counts every sample once and leaves training as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from train_samples import text_sample

from packtrain.cli import main
from packtrain.errors import ConfigError
from packtrain.planning.build import plan
from packtrain.planning.lengths import Lengths
from packtrain.testing.tiny import tiny_model
from packtrain.train.config import load_config
from packtrain.train.sft import train
from packtrain.world import World

SAMPLES = [{**text_sample(3 + i % 5, i), "sample_id": i} for i in range(30)]
HELD_OUT = [{**text_sample(2 + i * 5 % 9, 100 + i), "sample_id": i} for i in range(13)]
LENGTHS = Lengths([len(sample["input_ids"]) for sample in HELD_OUT])
PLAN = plan(LENGTHS, pack_length=16)
STEPS = 8


class Encoded:
    """A template for samples that are encoded already."""

    config: dict[str, Any] = {}  # noqa: RUF012 - as a template has it

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        return dict(sample)


def network() -> Any:
    """With dropout, so that a single random number more or less changes the weights."""
    model = tiny_model("tiny:qwen3", seed=2)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    return model


def values(folder: Path, **training: Any) -> dict[str, Any]:
    options = {
        "output_dir": str(folder), "packing_mode": "streaming", "logging_steps": 1, "learning_rate": 5e-3,
        "save_strategy": "no", "proof": False, "max_steps": STEPS, "stream_window": 8,
        "stream_shuffle_buffer": 4, "gradient_accumulation_steps": 2, **training,
    }  # fmt: skip
    return {"global_max_length": 16, "training": options}


def run(folder: Path, *, val: Any = None, place: World | None = None, **training: Any) -> Any:
    config = load_config(values(folder, **training))
    return train(config, SAMPLES, Encoded(), val=val, model=network(), place=place)


def evaluations(result: Any) -> dict[int, float]:
    return {row["step"]: row["eval_loss"] for row in result.history if "eval_loss" in row}


def same_weights(a: Any, b: Any) -> bool:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def planned_evaluation(folder: Path, model: Any, val: Any) -> dict[str, float]:
    """What a planned run says of a model: one of a single step that changes nothing."""
    options = {"output_dir": str(folder), "max_steps": 1, "learning_rate": 0.0, "save_strategy": "no"}
    config = load_config({"global_max_length": 16, "training": {**options, "eval_strategy": "no"}})
    metrics = train(config, PLAN, HELD_OUT, Encoded(), lengths=LENGTHS, val=val, model=model).metrics
    return {key: value for key, value in metrics.items() if key.startswith("eval_")}


def test_evaluation_leaves_training_as_it_was(tmp_path: Path) -> None:
    """Samples, their losses and the final weights, with evaluations every 3 steps, at the end, and none."""
    val = (PLAN, HELD_OUT, LENGTHS)
    none, ended = run(tmp_path / "none"), run(tmp_path / "ended", val=val)
    often = run(tmp_path / "often", val=val, eval_steps=3, eval_on_start=True)
    assert list(evaluations(often)) == [0, 3, 6, STEPS] and list(evaluations(ended)) == [STEPS]
    assert not evaluations(none) and "eval_loss" not in none.metrics
    traces = [(tmp_path / name / "sample_loss" / "rank-0.jsonl").read_bytes() for name in ("none", "often")]
    assert traces[0] == traces[1] and len(traces[0].splitlines()) == STEPS
    assert same_weights(none, often) and same_weights(none, ended)
    assert not torch.equal(next(network().parameters()), next(none.model.parameters()))
    assert often.metrics["eval_samples"] == len(HELD_OUT) and often.metrics["eval_packs"] == len(PLAN)
    expected = planned_evaluation(tmp_path / "planned", often.model, val)
    found = {key: value for key, value in often.metrics.items() if key.startswith("eval_")}
    assert found == expected == {k: v for k, v in ended.metrics.items() if k.startswith("eval_")}


def test_resume_right_after_an_evaluation_is_exact(tmp_path: Path) -> None:
    val = {"a": (PLAN, HELD_OUT, LENGTHS), "b": (PLAN, HELD_OUT, None)}
    options = {"val": val, "eval_steps": 2, "save_steps": 4, "save_strategy": "steps"}
    whole = run(tmp_path / "a", **options)
    again = run(tmp_path / "b", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"), **options)
    assert same_weights(whole, again) and whole.losses == again.losses
    for name in ("eval_a_loss", "eval_b_loss"):
        seen = [[(row["step"], row[name]) for row in r.history if name in row] for r in (whole, again)]
        assert seen[0] == seen[1] and [step for step, _ in seen[0]] == [2, 4, 6, 8]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_sample_counts_once_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    """Each rank by itself, with weights that stay: their sums are those of one rank."""
    val = (PLAN, HELD_OUT, LENGTHS)
    options = {"val": val, "learning_rate": 0.0, "max_steps": 1}
    whole = run(tmp_path / "whole", **options).metrics
    parts = [run(tmp_path / f"{r}", place=World(r, ranks), **options).metrics for r in range(ranks)]
    for name in ("eval_samples", "eval_packs", "eval_tokens"):
        assert sum(part[name] for part in parts) == whole[name]
    for name in ("eval_loss", "eval_token_acc"):
        total = sum(part[name] * part["eval_tokens"] for part in parts)
        assert total / whole["eval_tokens"] == pytest.approx(whole[name], abs=1e-6)


def test_the_best_model_of_a_stream_is_kept(tmp_path: Path) -> None:
    options = {"eval_steps": 2, "save_steps": 2, "save_strategy": "steps", "load_best_model_at_end": True}
    result = run(tmp_path, val=(PLAN, HELD_OUT, LENGTHS), **options)
    best = min(evaluations(result).items(), key=lambda pair: pair[1])
    assert planned_evaluation(tmp_path / "p", result.model, (PLAN, HELD_OUT, LENGTHS))["eval_loss"] == best[1]


@pytest.mark.parametrize(
    ("change", "match", "hint"),
    [
        ({"eval_strategy": "epoch"}, "eval_strategy epoch has no meaning", "eval_steps"),
        ({"load_best_model_at_end": True}, r"the last model would be kept", r"custom\.val_jsonl"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], match: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        run(tmp_path, **change)
    assert error.value.hint is not None and hint.replace("\\", "") in error.value.hint


@pytest.mark.parametrize("keys", [{"eval_strategy": "steps"}, {"eval_steps": 4}, {"eval_on_start": True}])
def test_nothing_to_evaluate_is_one_warning(
    tmp_path: Path, keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        assert evaluations(run(tmp_path, **keys)) == {}
    told = [r.getMessage() for r in caplog.records if "without validation samples" in r.getMessage()]
    assert len(told) == 1 and all(key in told[0] for key in keys)


def test_growing_directories_refuse_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lazy = {"sharded_lazy": True, "sharded_lazy_pre_packed": True, "packing": False}
    with pytest.raises(ConfigError, match="eval_strategy epoch has no meaning"):
        load_config({"custom": {"dataset": "x"}, "training": {**lazy, "eval_strategy": "epoch"}})
    columns = {"dataset": "x", "columns": {"prompt": "q", "response": "a"}}
    with caplog.at_level("WARNING"):
        load_config({"custom": columns, "training": lazy})
    assert "custom.columns: no effect without custom.val_jsonl" in caplog.text
    config = load_config({"custom": {**columns, "val_jsonl": "v"}, "training": {**lazy, "eval_steps": 5}})
    assert config.training.trainer["eval_strategy"] == "steps"
    assert load_config(config.to_dict()) == config


def call(folder: Path, given: dict[str, Any], capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    (folder / "run.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["train", str(folder / "run.yaml"), "--json", *more])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {**told, "code": int(stop.value.code or 0)}


def test_the_command_on_a_stream(
    tmp_path: Path, text_run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The validation file is measured and planned once; `eval_strategy: no` of YAML is what it says."""
    val = text_run(samples=9, name="val")["custom"]["train_jsonl"]
    given = text_run(packing_mode="streaming", max_steps=4, eval_steps=2)
    given["custom"]["val_jsonl"] = val
    told = call(tmp_path, given, capsys)
    assert told["code"] == 0 and told["eval_samples"] == 9 and told["eval_packs"] >= 1
    rows = (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, rows) if "eval_loss" in row] == [2, 4]
    assert (tmp_path / "run" / "val_plan" / "plan.json").is_file()
    assert not (tmp_path / "run" / "plan").exists()
    given["training"].update(eval_strategy=False)
    given["training"].pop("eval_steps")
    assert call(tmp_path, given, capsys)["eval_loss"] == told["eval_loss"]
    rows = (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, rows) if "eval_loss" in row] == [4]
    given["custom"]["val_jsonl"] = given["custom"]["train_jsonl"]
    assert call(tmp_path, given, capsys)["code"] == 2
    assert call(tmp_path, given, capsys, "--overwrite")["eval_samples"] == 40
