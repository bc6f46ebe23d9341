"""One rank of a two-rank run of a script of `examples/`: torchrun two_ranks.py NAME MODEL ROWS OUT."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from packtrain.errors import ConfigError
from packtrain.template import ensure_torchvision

ensure_torchvision()

import torch  # noqa: E402

torch.set_num_threads(1)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: What the scripts set for a GPU, or by default, and must not here.
CPU = {"trl_sft": {"bf16": False, "gradient_checkpointing": False}}
LOSSES: dict[int, float] = {}
IDS: list[int] = []


def recording(base):
    class Recording(base):
        def training_step(self, model, inputs, *args, **kwargs):
            loss = super().training_step(model, inputs, *args, **kwargs)
            step = self.state.global_step
            LOSSES[step] = LOSSES.get(step, 0.0) + float(loss)
            IDS.extend(inputs.sample_ids)
            return loss

    return Recording


def main() -> None:
    name, model, rows, out = sys.argv[1:]
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    settings = {
        "trainer_class": recording(names["SFTTrainer" if name == "trl_sft" else "Trainer"]),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "use_cpu": True,
        "ddp_find_unused_parameters": True,
        **CPU.get(name, {}),
    }
    try:
        names["main"](model, rows, out, rows, **settings, average_tokens_across_devices=False)
        refused = None
    except ConfigError as error:
        refused = str(error)
    trainer = names["main"](model, rows, out, rows, **settings)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    report = {"losses": list(LOSSES.values()), "ids": IDS, "eval_loss": loss, "refused": refused}
    Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort an interpreter that winds down


if __name__ == "__main__":
    main()
