"""Two cards: DDP and FSDP2 train what one card trains, runs go on over other ranks, what balance saves.

    python bench/gpu/ranks.py [--cases ddp fsdp resume balance] [--tiny]

A 0.5 B Qwen3 of random weights (bf16, varlen) trains on packs of 8,192 in this package's trainer, eight packs
a step. One line of JSON a case: steps, tokens a second over both cards, and the largest difference of a
logged loss from the run on one card. `resume` trains four steps on two cards, four on one, four on two.
`balance` times each pack of 32,768 alone on one card and adds them up to steps of two ranks, as they come
and as `balance` arranges them: largest over mean of the ranks, measured and as predicted. `--tiny`: on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from host_time import samples_of
from proof import text_model

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.planning.costs import costs_of
from packtrain.sources.encoded import EncodedTemplate
from packtrain.train.config import load_config
from packtrain.train.loss import token_loss_sum
from packtrain.train.sft import train
from packtrain.train.varlen import use_varlen

CUDA = torch.cuda.is_available()
STEPS = 12


def worker(folder: str, steps: int, tiny: bool, sharded: bool) -> None:
    """A run of one rank, to `steps`; goes on where the folder stands. Rank 0 prints what was logged."""
    capacity = 256 if tiny else 8192
    samples = [s for s in samples_of(capacity) if len(s["input_ids"]) <= capacity]
    samples += [{**s, "input_ids": s["input_ids"][::-1].copy()} for s in samples] * 3
    torch.manual_seed(0)
    model = text_model(tiny)
    if CUDA:
        model = use_varlen(model.to(torch.bfloat16))
    training = {
        "output_dir": folder, "max_steps": steps, "effective_batch_size": 8, "logging_steps": 1, "bf16": CUDA,
        "save_steps": 4, "learning_rate": 1e-4, "lr_scheduler_type": "constant", "use_cpu": not CUDA,
    }  # fmt: skip
    if sharded:
        training |= {"fsdp": "full_shard", "save_strategy": "no"}
        training["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
    planned = pt.plan([len(s["input_ids"]) for s in samples], capacity)
    times: list[float] = []
    result = train(
        load_config({"training": training}), planned, samples, EncodedTemplate(), model=model,
        progress=lambda *_: times.append(time.perf_counter()),
    )  # fmt: skip
    if int(os.environ.get("RANK", 0)) == 0:
        rate = 8 * capacity * (len(times) - 3) / (times[-1] - times[2]) if len(times) > 4 else 0.0
        print(json.dumps({"losses": dict(result.losses), "tokens_per_s": round(rate)}))


def launched(folder: str, ranks: int, steps: int, tiny: bool, sharded: bool = False) -> dict[str, Any]:
    """What `worker` printed, on so many ranks."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*start, __file__, "--worker", folder, "--steps", str(steps)]
    command += ["--tiny"] * tiny + ["--sharded"] * sharded
    seen = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"} if ranks == 1 and CUDA else None
    done = subprocess.run(command, capture_output=True, text=True, env=seen)
    if done.returncode:
        sys.stderr.write(done.stderr[-3000:])
        raise SystemExit(f"{ranks} ranks to step {steps} ended with {done.returncode}")
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"losses"'))
    told: dict[str, Any] = json.loads(line)
    return told


def balance(tiny: bool) -> dict[str, Any]:
    """Largest over mean of two ranks, in measured times and in costs of the plan."""
    capacity = 1024 if tiny else 32768
    drawn = np.random.default_rng(0)
    lengths = np.clip(drawn.lognormal(np.log(1500), 1.4, 300 if tiny else 400), 16, capacity).astype(int)
    if tiny:
        lengths = np.maximum(lengths // 8, 8)
    model = text_model(tiny)
    if CUDA:
        model = use_varlen(model.to("cuda", torch.bfloat16))
    device = next(model.parameters()).device
    planned = pt.plan(lengths.tolist(), capacity)
    collate, measured = PaddingFreeCollator(model), np.zeros(len(planned))
    chosen = range(len(planned))
    for k in [*chosen[:2], *chosen]:  # the first are warm-up
        row = [
            {"input_ids": (ids := torch.arange(int(lengths[n])) % 500 + 1), "labels": ids, "sample_id": n}
            for n in planned[k].tolist()
        ]
        batch = collate([row]).to(device)
        if CUDA:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        (token_loss_sum(model, batch) / capacity).backward()
        if CUDA:
            torch.cuda.synchronize()
        measured[k] = time.perf_counter() - begun
        model.zero_grad()
    told: dict[str, Any] = {"case": "balance", "packs": len(planned)}
    cost = np.asarray(costs_of(planned, "flops")[0], dtype=np.float64)
    told["cost_to_time"] = round(float(np.corrcoef(cost[list(chosen)], measured[list(chosen)])[0, 1]), 3)
    for mode in (None, "window", "global"):
        order = [
            list(pt.data.PackSampler(planned.align(2, True), rank=rank, seed=0, balance=mode))
            for rank in (0, 1)
        ]
        steps = np.array(order)
        told[str(mode)] = {
            name: round(float((values[steps].max(0) / values[steps].mean(0)).mean()), 3)
            for name, values in (("measured", measured), ("predicted", cost))
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["ddp", "fsdp", "resume", "balance"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker, asked.steps, asked.tiny, asked.sharded)
        return
    one: dict[str, Any] = {}
    for case in asked.cases:
        if case == "balance":
            print(json.dumps(balance(asked.tiny)), flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            if not one:
                one = launched(f"{folder}/one", 1, STEPS, asked.tiny)
                print(json.dumps({"case": "one card", **one}), flush=True)
            for ranks, steps in [(2, 4), (1, 8), (2, 12)] if case == "resume" else [(2, STEPS)]:
                told = launched(f"{folder}/{case}", ranks, steps, asked.tiny, case == "fsdp")
            apart = max(abs(told["losses"][step] - one["losses"][step]) for step in told["losses"])
            row = {"case": case, "steps": len(told["losses"]), "tokens_per_s": told["tokens_per_s"]}
            print(json.dumps({**row, "largest_difference_of_a_loss": round(apart, 5)}), flush=True)


if __name__ == "__main__":
    main()
