"""Examples as users run them: a process in which transformers and trl are imported before packtrain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
#: `scripts/setup.sh` makes Python import this finder at its start; then the user's script, on a CPU.
SCRIPT = """
import runpy, sys
sys.path.insert(0, "scripts")
import torchvision_beside_cpu_torch
assert not {"packtrain", "torch", "transformers"} & set(sys.modules)
name, model, rows, out = sys.argv[1:]
cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
trainer = runpy.run_path(f"examples/{name}.py", run_name="example")["main"](model, rows, out, **cpu)
trainer.train()
print("STEPS", trainer.state.global_step, trainer.state.log_history[0]["loss"])
"""


def save_model(tokenizer_folder: Path, folder: Path, name: str) -> None:
    """A tiny random model with its processor or tokenizer, as a user has one on disk."""
    from packtrain.template import load_processor
    from packtrain.testing.tiny import tiny_model

    pictures = "vl" in name
    processor = load_processor(str(tokenizer_folder.parent / "processor"))
    tiny_model(name, processor).save_pretrained(folder)
    (processor if pictures else load_processor(str(tokenizer_folder))).save_pretrained(folder)
    if not pictures:  # a tokenizer of its own, not a part of a processor
        path = folder / "tokenizer_config.json"
        told = json.loads(path.read_text(encoding="utf-8"))
        told.pop("processor_class", None)
        path.write_text(json.dumps(told), encoding="utf-8")


def save_rows(folder: Path, pictures: bool) -> Path:
    Image.new("RGB", (56, 84), "teal").save(folder / "one.png")
    rows = []
    for i in range(10):
        shown = pictures and i % 2 == 0
        turns = [
            {"role": "user", "content": "<image>" * shown + f"Count to {i}."},
            {"role": "assistant", "content": " ".join(map(str, range(i + 1)))},
        ]
        rows.append({"messages": turns, "images": [str(folder / "one.png")] * shown})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("example", "model"),
    [
        ("hf_trainer_text", "tiny:qwen3"),
        ("hf_trainer_vl", "tiny:qwen2_5_vl"),
        ("trl_sft", "tiny:qwen3"),
    ],
)
def test_an_example_trains_in_the_environment_of_setup(
    example: str, model: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    save_model(tokenizer_folder, tmp_path / "model", model)
    rows = save_rows(tmp_path, "vl" in model)
    words = [example, str(tmp_path / "model"), str(rows), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY / "src"),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.split("STEPS")[1].split()
    assert int(told[0]) >= 1 and 0 < float(told[1]) < 20


def test_setup_installs_the_finder() -> None:
    text = (REPOSITORY / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert "cp scripts/torchvision_beside_cpu_torch.py" in text and ".pth" in text
    assert "scripts/setup.sh" in (REPOSITORY / "Makefile").read_text(encoding="utf-8").split("STAMP):")[1]
