"""From the loaded model to the first step, and what an epoch's boundary costs, in `packtrain train`.

    python bench/gpu/first_step.py PROCESSOR [--workers 8] [--tiny]

A 0.5 B Qwen2.5-VL with random weights trains two epochs on packs of 8,192 tokens of text that loader workers
encode with a real processor. Prints one line of JSON: seconds until the first step is done (the start-up
proof in it), the longest step at the boundary of the epochs, the median step, and a logged row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from loader_start import chats
from proof import vision_model

import packtrain as pt
from packtrain.template import HFTemplate, load_processor
from packtrain.train.config import load_config
from packtrain.train.sft import train
from packtrain.train.varlen import use_varlen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("processor")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    template = HFTemplate(load_processor(asked.processor))
    samples = chats(asked.samples)
    lengths = np.array([len(template.encode(one)["input_ids"]) for one in samples])
    planned = pt.plan(lengths, 1024 if asked.tiny else 8192)
    cuda = torch.cuda.is_available()
    model = vision_model(asked.tiny).to("cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32)
    if cuda:
        use_varlen(model)
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            {
                "training": {
                    "output_dir": folder, "save_strategy": "no", "logging_steps": 5, "num_train_epochs": 2,
                    "dataloader_num_workers": asked.workers, "bf16": cuda,
                }
            }
        )  # fmt: skip
        begun = time.perf_counter()
        result = train(
            config, planned, samples, template, model=model,
            progress=lambda done, total: ends.append(time.perf_counter() - begun),
        )  # fmt: skip
    steps = np.diff(ends).tolist()
    half = len(ends) // 2
    row: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "workers": asked.workers,
        "steps": len(ends),
        "first_step_s": round(ends[0], 1),
        "boundary_s": round(max(steps[half - 2 : half + 1]), 2),
        "median_step_ms": round(1000 * statistics.median(steps[5:]), 1),
        "rows": {name: value for name, value in result.history[-2].items() if isinstance(value, int | float)},
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
