"""One training run for tests of resume, under torchrun or alone; each rank notes what it trains on.

    resume_script.py FOLDER KILL_STEP [CHECKPOINT]

At KILL_STEP > 0 rank 1 kills itself between two micro steps of that optimizer step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from train_samples import text_sample

from packtrain.planning.build import plan
from packtrain.planning.lengths import Lengths
from packtrain.testing.tiny import tiny_model
from packtrain.train.config import load_config
from packtrain.train.sft import train
from packtrain.train.trainer import PackTrainer
from packtrain.world import world

SAMPLES = [{**text_sample(3 + (i * 7) % 11, i), "sample_id": i} for i in range(64)]
LENGTHS = Lengths([len(sample["input_ids"]) for sample in SAMPLES])


class Rows:
    """Template for encoded samples."""

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        return dict(sample)


def note(trainer: PackTrainer, path: Path, kill: int) -> None:
    """Append (optimizer step, sample ids) of every micro step, and die in the middle of step `kill`."""
    step = trainer.training_step

    def noted(model: Any, inputs: Any, *rest: Any) -> Any:
        row = {"run": os.getpid(), "step": trainer.state.global_step + 1, "ids": list(inputs.sample_ids)}
        with open(path, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
        result = step(model, inputs, *rest)
        if trainer.rank == 1 and trainer.state.global_step + 1 == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    trainer.training_step = noted


def run(folder: Path, kill: int = 0, checkpoint: str | None = None, **training: Any) -> Any:
    place = world()
    options = {
        "output_dir": str(folder), "logging_steps": 1, "num_train_epochs": 3, "learning_rate": 5e-3,
        "save_strategy": "steps", "save_steps": 3, "proof": False, "effective_batch_size": 4,
        "eval_strategy": "steps", "eval_steps": 4, "resume_from_checkpoint": checkpoint, **training,
    }  # fmt: skip
    made = plan(LENGTHS, 24)
    begun = PackTrainer.train

    def noting(self: PackTrainer, *rest: Any, **options: Any) -> Any:
        note(self, folder / f"read.{place.rank}.jsonl", kill)
        return begun(self, *rest, **options)

    PackTrainer.train = noting
    try:
        model = tiny_model("tiny:qwen3", seed=2)
        val = (plan(LENGTHS, 40), SAMPLES, None)
        return train(
            load_config({"training": options}), made, SAMPLES, Rows(), model=model, val=val, place=place
        )
    finally:
        PackTrainer.train = begun


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    result = run(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    if world().rank == 0:
        torch.save(result.model.state_dict(), Path(sys.argv[1]) / "weights.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # as `packtrain train` ends: a library's thread may abort the interpreter while it shuts down
