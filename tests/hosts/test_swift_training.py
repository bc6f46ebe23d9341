"""What users of the real ms-swift do: LoRA, checkpointing, evaluation, the best model, `packtrain init`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from swift_env import swift_python
from swift_sft import environment, losses, refused, sft

pytestmark = pytest.mark.hosts

STEPS = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
#: Evaluate and save after every step; the "best" model is the one with the highest loss: the first.
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": "true",
    "metric_for_best_model": "loss",
    "greater_is_better": "true",
}


def evaluations(seen: Any) -> list[float]:
    return [row["eval_loss"] for row in seen["log"] if "eval_loss" in row]


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.matrix("LoRA, gradient checkpointing on and off", "exact eval loss")
def test_lora_checkpointing_and_evaluation_change_nothing_in_the_equality(
    checkpointing: str, model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """Unpacked, one batch holds all rows of the evaluation: its mean is the mean over tokens."""
    shared = {
        "model": model,
        "dataset": files["few"],
        "val_dataset": files["few"],
        "tuner_type": "lora",
        "target_modules": "q_proj",
        "gradient_checkpointing": checkpointing,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    settings = {"plugin": True, "install": {"samples_per_step": "same"}}
    (packed,) = sft(tmp_path, "packed", {**shared, **STEPS, "packing": "true"}, **settings)
    alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}
    plain_eval = {"per_device_eval_batch_size": 23}
    (plain,) = sft(tmp_path, "plain", {**shared, **alone, **plain_eval}, order=packed["ids"])
    assert sorted(packed["ids"]) == list(range(23))
    assert losses(packed) == pytest.approx(losses(plain), rel=1e-4)
    assert len(evaluations(packed)) == 2
    assert evaluations(packed) == pytest.approx(evaluations(plain), rel=1e-4)


@pytest.mark.matrix("best model at the end")
def test_the_best_model_is_loaded_at_the_end(model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    words = {"model": model, "dataset": files["few"], "val_dataset": files["few"], "packing": "true"}
    settings = {"plugin": True, "install": {"samples_per_step": "same"}, "best": True}
    (seen,) = sft(tmp_path, "best", {**words, **STEPS, **BEST}, **settings)
    assert len(seen["losses"]) == 2
    assert seen["best"] == ["checkpoint-1", True]


def test_what_init_writes_trains(model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """`packtrain init --host swift`, and the `train.sh` it wrote: the real `swift sft` with our plugin."""
    shim = tmp_path / "shim"
    shim.mkdir()
    # torchvision lacks its operators beside a CPU build of torch; a user's environment has them.
    start = "from packtrain.template import ensure_torchvision\nensure_torchvision()\n"
    (shim / "sitecustomize.py").write_text(start)
    kept = environment()
    kept["PYTHONPATH"] = f"{shim}:{kept['PYTHONPATH']}"
    del kept["IMAGE_MAX_TOKEN_NUM"]  # the processor's own limits, which both templates read
    kept["PATH"] = f"{swift_python().parent}:{kept['PATH']}"
    out = tmp_path / "out"
    asked = ["--model", str(model), "--host", "swift", "--template", "qwen2_5_vl", "-o", str(out), "--json"]
    words = [str(swift_python()), "-m", "packtrain", "init", str(files["few"]), *asked]
    done = subprocess.run(words, capture_output=True, text=True, env=kept, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["samples"] == 23 and told["host"] == "swift" and told["agreed_tokens"] > 50
    assert told["answer_end"] == "line"  # ms-swift trains the line break behind an answer, too
    _assert_the_yaml_trains_the_same(files["few"], model, out / "packtrain.yaml", kept)

    more = {"use_cpu": "true", "torch_dtype": "float32", "use_hf": "true", "report_to": "none"}
    more |= {"check_model": "false"}
    more |= {"add_version": "false", "tuner_type": "full", "per_device_train_batch_size": "8"}
    more |= {"model_type": "qwen2_5_vl", "logging_steps": "1", "gradient_checkpointing": "false"}
    words = ["bash", str(out / "train.sh"), *(word for key in more for word in (f"--{key}", more[key]))]
    done = subprocess.run(words, capture_output=True, text=True, env=kept, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    plan = next((out / "runs" / "packs" / "train").glob("plan-*/plan.json"))
    assert json.loads(plan.read_text())["stats"]["samples"] == 23
    (log,) = (out / "runs").glob("logging.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["loss"] > 0 for row in rows if "loss" in row] == [True] * 3


def _assert_the_yaml_trains_the_same(rows: Path, model: Path, yaml: Path, env: dict[str, str]) -> None:
    """Trained tokens of every row, by ms-swift's own template and by that of the YAML."""
    script = """
import json, sys
from packtrain.template import ensure_torchvision
ensure_torchvision()
from swift.model import get_processor
from swift.template import get_template
from packtrain.pipeline.inputs import Inputs
from packtrain.train.config import load_config

rows, model, yaml = sys.argv[1:]
own = get_template(get_processor(model), template_type="qwen2_5_vl")
own.set_mode("train")
inputs = Inputs.of_config(load_config(yaml))
source = inputs.open_source()
template = inputs.open_template(source)
for index, line in enumerate(open(rows)):
    theirs = [int(label) for label in own.encode(json.loads(line))["labels"]]
    ours = template.encode(source[index])["labels"].tolist()
    assert theirs == ours, index
    assert any(label != -100 for label in ours)
print(index + 1)
"""
    words = [str(swift_python()), "-c", script, str(rows), str(model), str(yaml)]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "23"


def test_rows_in_order_are_the_steps_in_order(model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """`--train_dataloader_shuffle false`: the first step holds the first rows."""
    words = {"model": model, "dataset": files["few"], "packing": "true", **STEPS}
    settings = {"plugin": True, "install": {"samples_per_step": "same"}}
    (seen,) = sft(tmp_path, "order", {**words, "train_dataloader_shuffle": "false"}, **settings)
    assert sorted(seen["ids"][:12]) == list(range(12)) and sorted(seen["ids"][12:]) == list(range(12, 23))
    said = refused(tmp_path, "strategy", {**words, "packing_strategy": "sequential"}, **settings)
    why = "the samples of a step are spread over its packs"
    assert f"ConfigError: --packing_strategy sequential with packing: {why} (hint: " in said


@pytest.mark.matrix("model of no listed family")
def test_a_model_that_no_family_lists_is_proven_first(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """A tiny DeepSeek-V3: the proof of its isolation runs before the first step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = DeepseekV3Config(
        vocab_size=len(tokenizer) + 64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(files["few"].read_text().splitlines(keepends=True)[-5:]), encoding="utf-8")
    words = {
        "model": tmp_path / "model",
        "model_type": "deepseek_v3",
        "template": "qwen2_5",
        "dataset": rows,
        "packing": "true",
        "per_device_train_batch_size": 1,
    }
    (seen,) = sft(tmp_path, "unlisted", words, plugin=True)
    assert sorted(seen["ids"]) == list(range(5)) and all(loss > 0 for loss in losses(seen))
