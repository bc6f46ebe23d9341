"""`packtrain doctor --calibrate` on the card: what packs cost, and how far the prediction is off.

    python bench/gpu/calibrate.py LENGTHS [--groups text05 vl3b lora7b] [--tiny]

The samples and models of headline.py; a plan of packs of 8,192. `calibrate` fits a device profile from some
rows; then packs that it has not seen are the check. One line of JSON a group: the profile, seconds that it
took, largest errors of time and memory, and of every kind of row what was measured and predicted. `two_costs`
is max / mean over two ranks and over four, of the language model's share and of patches, as packs come and as
`balance` deals them (steps of sixteen packs a rank). `--tiny` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from headline import Samples, model_of
from speed import image_model

import packtrain as pt
from packtrain.planning.balance import Balance
from packtrain.planning.epoch_order import EpochOrder
from packtrain.planning.lengths import Lengths
from packtrain.train.calibrate import calibrate
from packtrain.train.config import load_config
from packtrain.train.loss import bare_model
from packtrain.train.varlen import use_varlen


class Drawn:
    """Samples of a group as a source, and the template that gives them as they are."""

    processor = None

    def __init__(self, samples: Samples, model: Any) -> None:
        self.samples, self.model = samples, model

    def __len__(self) -> int:
        return len(self.samples.lengths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"number": number}

    def encode(self, sample: dict[str, Any]) -> dict[str, Any]:
        return self.samples(int(sample["number"]), self.model)


def two_costs(plan: pt.PackPlan, cost: Any) -> dict[str, Any]:
    """Largest over mean of the ranks of a step, mean over steps."""
    held = {"tokens": plan.pack_tokens, "patches": plan.pack_costs.get("patches")}
    told: dict[str, Any] = {}
    for ranks in (2, 4):
        aligned, accum = plan.align(ranks), 16
        for name, balance in (
            ("as they come", None),
            ("balance", Balance(grad_accum=accum, cost=cost, sync="step")),
        ):
            order = EpochOrder(aligned, seed=0, grad_accum=accum, balance=balance)
            steps = len(aligned) // (ranks * accum)
            at = order.of_steps(0, steps, 0) if balance else order.at(np.arange(steps * ranks * accum), 0)
            packs = aligned.pack_ids_at(at)
            for what, values in held.items():
                if values is not None and np.any(values):
                    sums = np.asarray(values)[packs].reshape(steps, accum, ranks).sum(axis=1)
                    told[f"{ranks} ranks, {what}, {name}"] = round(
                        float((sums.max(1) / sums.mean(1)).mean()), 3
                    )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--groups", nargs="+", default=["text05", "vl3b"])
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    cuda, capacity = torch.cuda.is_available(), 256 if asked.tiny else 8192
    for group in asked.groups:
        samples = Samples(group, asked.lengths, capacity, asked.tiny)
        torch.manual_seed(0)
        with torch.device("cuda" if cuda else "cpu"):
            model = image_model() if group == "qwen3vl" else model_of(group, asked.tiny)
        model = model.to(torch.bfloat16 if cuda else None).train()
        if cuda:
            use_varlen(bare_model(model))
        costs = {}
        if samples.grids:
            merge = bare_model(model).config.vision_config.spatial_merge_size
            costs["patches"] = np.array([a * b * merge**2 for a, b in samples.grids])
        lengths = Lengths(np.array(samples.lengths), costs)
        plan = pt.plan(lengths, capacity)
        config = load_config(
            {
                "template": {"max_length": capacity},
                "training": {
                    "bf16": cuda, "gradient_checkpointing": True, "use_cpu": not cuda, "output_dir": "unused",
                    "gradient_accumulation_steps": 4,
                },
            }
        )  # fmt: skip
        source = Drawn(samples, bare_model(model))
        begun = time.perf_counter()
        made = calibrate(config, plan, source, source, lengths, model=model)
        row = {
            "group": group,
            "seconds": round(time.perf_counter() - begun, 1),
            "profile": made.profile.to_dict(),
            "time_error": made.time_error,
            "memory_error": made.memory_error,
            "two_costs": two_costs(plan, made.profile.cost),
        }
        print(json.dumps(row), flush=True)
        for one in made.rows:
            print("   ", json.dumps(one), flush=True)
        del model


if __name__ == "__main__":
    main()
