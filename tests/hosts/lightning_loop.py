"""Run by two ranks: `torchrun lightning_loop.py SPEC.json`; what `examples/lightning_module.py` trained.

spec: example, arguments of its `main` (words, options), report; site: where Lightning is installed; leak:
attention that forgets the boundaries.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate_run import leak

from packtrain.template import ensure_torchvision

torch.set_num_threads(1)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.path.append(spec["site"])  # beside the development environment
    warnings.filterwarnings("ignore")
    ensure_torchvision()  # Lightning's metrics import it
    if spec.get("leak"):
        leak()
    example: Any = runpy.run_path(spec["example"])
    trained, seen = example["Model"].training_step, []

    def training_step(self: Any, batch: Any, number: int) -> Any:
        seen.append([self.current_epoch, self.global_step, [int(number) for number in batch.sample_ids]])
        return trained(self, batch, number)

    example["Model"].training_step = training_step
    losses = example["main"](*spec["words"], accelerator="cpu", devices=2, **spec["options"])
    path = Path(spec["report"])
    path.with_name(f"{path.name}.{os.environ['RANK']}").write_text(
        json.dumps({"losses": losses, "seen": seen})
    )


if __name__ == "__main__":
    main()
