"""One optimizer step of three packs by every reduction, under torchrun or alone: the weights it leaves.

reduction_script.py FOLDER      on N ranks: 3 / N packs each, SGD of learning rate 1, float64
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from train_samples import text_sample

from packtrain.planning.build import plan
from packtrain.testing.tiny import tiny_model
from packtrain.train.config import load_config
from packtrain.train.sft import train
from packtrain.world import world

#: Supervised tokens (90, 9, 1), and a long sample without any: one rank has nothing to train.
SAMPLES = [
    text_sample(length, i, supervised=n) for i, (length, n) in enumerate(((93, 90), (12, 9), (4, 1), (92, 0)))
]
KINDS = ("token", "sample", "sqrt")


class Rows:
    """Template for encoded samples."""

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        return dict(sample)


def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """RMS norm in the number type of the model: its own works in float32, where 3 x (g / 3) is not g."""
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def run(folder: Path, kind: str) -> Any:
    made = plan([len(sample["input_ids"]) for sample in SAMPLES], 95)
    assert sorted(pack.tolist() for pack in made) == [[0], [1, 2], [3]]
    options = {
        "output_dir": str(folder / kind), "loss_reduction": kind, "effective_batch_size": 3, "max_steps": 1,
        "learning_rate": 1.0, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
        "save_strategy": "no", "proof": False, "logging_steps": 1, "balance": None,
    }  # fmt: skip
    model = tiny_model("tiny:qwen3", seed=2).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(norm, module)
    val = (made, SAMPLES, None)
    return train(load_config({"training": options}), made, SAMPLES, Rows(), model=model, val=val)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    found = {}
    for name in KINDS:
        result = run(out, name)
        found[name] = (result.model.state_dict(), result.losses[0][1], result.metrics["eval_loss"])
    if world().rank == 0:
        torch.save(found, out / "found.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # as `packtrain train` ends: a library's thread may abort the interpreter while it shuts down
