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
from packtrain.train.arguments import training_arguments
from packtrain.train.config import load_config
from packtrain.train.early import check_early
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


SETS = {"far.2": (PLAN, HELD_OUT, None), "near": (PLAN, HELD_OUT, LENGTHS)}


def test_the_best_model_is_that_of_a_named_set(tmp_path: Path) -> None:
    options = {"eval_steps": 2, "save_steps": 2, "save_strategy": "steps", "load_best_model_at_end": True}
    other = [{**text_sample(3 + i % 4, 900 + i), "sample_id": i} for i in range(9)]
    lengths = Lengths([len(sample["input_ids"]) for sample in other])
    of = plan(lengths, pack_length=16)
    val = {"a": (PLAN, HELD_OUT, LENGTHS), "b": (of, other, lengths)}
    result = run(tmp_path, val=val, metric_for_best_model="b_loss", learning_rate=0.1, **options)
    seen = {row["step"]: row["eval_b_loss"] for row in result.history if "eval_b_loss" in row}
    assert sorted(seen) == [2, 4, 6, 8]
    ended = planned_evaluation(tmp_path / "p", result.model, (of, other, lengths))["eval_loss"]
    assert ended == result.metrics["eval_b_loss"] == min(seen.values()) < max(seen.values())
    tmp_path.rename(moved := tmp_path.with_name("moved"))
    last = {"resume_from_checkpoint": str(moved / "checkpoint-8"), "learning_rate": 0.1}
    again = run(moved, val=val, metric_for_best_model="b_loss", **options, **last)
    assert again.metrics["steps"] == 8 and "train_loss" not in again.metrics
    assert same_weights(again, result) and again.metrics["eval_b_loss"] == ended
    best = next(moved / f"checkpoint-{step}" for step, loss in seen.items() if loss == min(seen.values()))
    best.rename(moved / "elsewhere")
    with pytest.raises(ConfigError, match=f"best checkpoint of this run is gone: {best}"):
        run(moved, val=val, metric_for_best_model="b_loss", **options, **last)


@pytest.mark.parametrize("val", [SETS, SETS["near"]])
def test_training_stops_early_and_goes_on_counting_behind_a_resume(
    tmp_path: Path, val: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that stay never get better: the first evaluation is the best, and so many more are made."""
    options: dict[str, Any] = {
        "val": val, "eval_steps": 1, "save_steps": 1, "save_strategy": "steps", "learning_rate": 0.0,
        "early_stopping_patience": 3,
    }  # fmt: skip
    if isinstance(val, dict):
        options["metric_for_best_model"] = "eval_near_loss"
    with caplog.at_level("INFO"):
        assert run(tmp_path / "a", **options).metrics["steps"] == 4
    name = options.get("metric_for_best_model", "eval_loss")
    assert f"training stops early, at step 4: {name} was not better in 3 evaluations; best " in caplog.text
    again = run(tmp_path / "b", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"), **options)
    assert again.metrics["steps"] == 4
    once = run(tmp_path / "a", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"), **options)
    assert once.metrics["steps"] == 4 and "train_loss" not in once.metrics
    more = {**options, "early_stopping_patience": 4}
    again = run(tmp_path / "c", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"), **more)
    assert again.metrics["steps"] == 5


@pytest.mark.parametrize(
    ("keys", "match", "hint"),
    [
        ({"metric_for_best_model": "acc"}, "no evaluation gives it", "a_loss, a_token_acc, b_loss"),
        ({"load_best_model_at_end": True}, "is 'loss', and no evaluation gives it", "a_loss"),
        ({"early_stopping_patience": 2}, "is 'loss', and no evaluation gives it", "b_loss"),
        ({"metric_for_best_model": "c_loss", "early_stopping_patience": 2}, "no evaluation gives", "a_loss"),
        (
            {"metric_for_best_model": "a_loss", "early_stopping_patience": 2, "eval_strategy": "no"},
            "needs evaluations",
            "eval_steps",
        ),
    ],
)
def test_a_metric_that_no_set_gives_is_refused_early(
    tmp_path: Path, keys: dict[str, Any], match: str, hint: str
) -> None:
    saved = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    training = {"output_dir": str(tmp_path), **saved, **keys}
    given = {"data": {"path": "t", "val": {"a": "x", "b": "y"}}, "training": training}
    with pytest.raises(ConfigError, match=match) as error:
        check_early(load_config(given), needs_model=False)
    assert error.value.hint is not None and hint in error.value.hint


def test_the_direction_of_a_metric_follows_what_it_is(tmp_path: Path) -> None:
    """`loss/SOURCE` of a set is a loss, although its name ends otherwise."""
    for name, greater in (("loss", False), ("a_loss/chat", False), ("loss_b_token_acc", True)):
        training = {"output_dir": str(tmp_path), "metric_for_best_model": name}
        config = load_config({"training": training})
        assert training_arguments(config, 1, has_eval=True).greater_is_better is greater


@pytest.mark.parametrize("val", [{}, {"": "x"}, {"a/b": "x"}, {"a": ["x"]}, 3])
def test_names_of_sets_are_names(val: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.val"):
        load_config({"data": {"path": "t", "val": val}})


def test_early_stopping_without_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would not stop"):
        run(tmp_path, early_stopping_patience=2)


@pytest.mark.parametrize("kind", ["planned", "exported", "growing", "stream", "token_budget"])
def test_several_sets_in_yaml_for_every_kind(
    tmp_path: Path, text_run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Each set says what it says alone, with the same weights; in folders of their own."""
    counts = {"a": 7, "b.1": 9}
    sets = {name: text_run(samples=n, name=name)["custom"]["train_jsonl"] for name, n in counts.items()}
    given = text_run(max_steps=3)
    path = given.pop("custom")["train_jsonl"]
    given["training"].pop("packing_length_precompute_workers", None)
    source: dict[str, Any] = {"kind": kind, "path": path}
    if kind in ("exported", "growing"):
        made = {**given, "data": {"path": path}, "export": {"format": "chunks", "out": str(tmp_path / "x")}}
        (tmp_path / "made.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
        with pytest.raises(SystemExit):
            main(["run", str(tmp_path / "made.yaml"), "--json"])
        source["path"] = str(tmp_path / "x")
    if kind == "growing":
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "one.jsonl").write_bytes(Path(path).read_bytes())
        produced = ["produce", str(tmp_path / "in"), str(tmp_path / "g"), "--end", "--pack-length", "64"]
        with pytest.raises(SystemExit) as stop:
            main([*produced, "--processor", given["template"]["processor"], "--json"])
        assert not stop.value.code
        source["path"] = str(tmp_path / "g")
    capsys.readouterr()
    seen = {}
    for name, val in (("all", sets), *sets.items()):
        given["training"]["output_dir"] = str(tmp_path / name)
        told = call(tmp_path, {**given, "data": {**source, "val": val}}, capsys)
        assert told["code"] == 0, told
        seen[name] = told.get("metrics", told)
    for name, count in counts.items():
        assert seen["all"][f"eval_{name}_loss"] == seen[name]["eval_loss"]
        assert seen["all"][f"eval_{name}_samples"] == seen[name]["eval_samples"] == count
        assert (tmp_path / "all" / f"val_{name}_plan" / "plan.json").is_file()
    assert "eval_loss" not in seen["all"]
