"""What the host costs in a training step: wall against busy time, kernels, and every wait for the card.

    python bench/gpu/host_time.py [OUT.json] [--cases own trainer bare] [--tiny]

A 0.5 B Qwen3 of random weights (bf16, varlen) trains on packs of 8,192 tokens in this package's trainer, in
transformers' Trainer through `pack(trainer)`, and in a bare loop over batches that lie on the card already.
One line of JSON a case: *wall* and *busy* (union of kernel times) a step, kernels, and the places in which
the host waited for the card, with how often in a step. `--tiny` tries the script itself on a CPU.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import transformers
from proof import text_model
from speed import busy_ms
from torch.profiler import ProfilerActivity, profile

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.hosts.transformers import pack
from packtrain.sources.encoded import EncodedTemplate
from packtrain.train.config import load_config
from packtrain.train.loss import token_loss_sum
from packtrain.train.sft import train
from packtrain.train.varlen import use_varlen

CAPACITY, WARM, TIMED, TRACED, WATCHED = 8192, 8, 20, 3, 3
STEPS = WARM + TIMED + TRACED + WATCHED + 1


class Watch:
    """Called behind every step: times some, then traces some, then notes where the host waits in some."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.row: dict[str, Any] = {}
        self.waits: collections.Counter[str] = collections.Counter()
        self.tracer = profile(activities=[ProfilerActivity.CUDA] if self.cuda else [ProfilerActivity.CPU])

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, done: int, total: int = 0) -> None:
        if done == WARM:
            self.begun = self.now()
        elif done == WARM + TIMED:
            self.row["wall_ms"] = round((self.now() - self.begun) * 1000 / TIMED, 1)
            self.tracer.start()
        elif done == WARM + TIMED + TRACED:
            self.now()
            self.tracer.stop()
            events = list(self.tracer.events())
            kernels = sum(e.device_type.name == "CUDA" for e in events)
            self.row |= {"busy_ms": round(busy_ms(events) / TRACED, 1), "kernels": round(kernels / TRACED)}
            self.row["busy_share"] = round(self.row["busy_ms"] / self.row["wall_ms"], 3)
            warnings.showwarning = self.note
            warnings.simplefilter("always")
            if self.cuda:
                torch.cuda.set_sync_debug_mode("warn")
        elif done == WARM + TIMED + TRACED + WATCHED and self.cuda:
            torch.cuda.set_sync_debug_mode("default")

    def note(self, message: Any, *given: Any, **more: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [f for f in traceback.extract_stack() if not f.filename.endswith("warnings.py")]
        frames = [f for f in frames if "/torch/" not in f.filename][:-1]
        frame = frames[-1] if frames else None
        where = "?" if frame is None else f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
        self.waits[where] += 1

    def told(self, case: str) -> None:
        waits = {place: round(count / WATCHED, 1) for place, count in self.waits.most_common()}
        print(json.dumps({"case": case, **self.row, "waits": waits}), flush=True)


class Behind(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch(state.global_step)


def samples_of(capacity: int) -> list[dict[str, Any]]:
    """Lognormal lengths, median 350; the first two fifths of a sample are not trained."""
    count = STEPS * capacity // 450
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(350), 1, count), 16, capacity).astype(int)
    drawn = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths.tolist():
        ids = torch.randint(1, 150000, (length,), generator=drawn)
        labels = ids.clone()
        labels[: length * 2 // 5] = -100
        rows.append({"input_ids": ids.numpy(), "labels": labels.numpy()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?")
    parser.add_argument("--cases", nargs="+", default=["own", "trainer", "bare"])
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    capacity = 256 if asked.tiny else CAPACITY
    samples = [s for s in samples_of(capacity) if len(s["input_ids"]) <= capacity]
    planned = pt.plan([len(s["input_ids"]) for s in samples], capacity)
    cuda = torch.cuda.is_available()
    known = {
        "per_device_train_batch_size": 1, "max_steps": STEPS, "save_strategy": "no", "logging_steps": 10,
        "dataloader_num_workers": 4 if cuda else 0, "bf16": cuda,
    }  # fmt: skip
    for case in asked.cases:
        torch.manual_seed(0)
        model = text_model(asked.tiny).to("cuda" if cuda else "cpu", torch.bfloat16 if cuda else None).train()
        if cuda:
            use_varlen(model)
        watch = Watch()
        with tempfile.TemporaryDirectory() as folder:
            if case == "own":
                mine = {**known, "output_dir": folder}
                del mine["per_device_train_batch_size"]
                train(
                    load_config({"training": mine}),
                    planned,
                    samples,
                    EncodedTemplate(),
                    model=model,
                    progress=watch,
                )
            elif case == "trainer":
                args = transformers.TrainingArguments(
                    **known, output_dir=folder, report_to="none", disable_tqdm=True, use_cpu=not cuda
                )
                trainer = transformers.Trainer(model, args, train_dataset=samples, callbacks=[Behind(watch)])
                pack(trainer, pack_length=capacity)
                trainer.train()
            else:
                bare(model, planned, samples, watch)
        watch.told(case)
        del model


def bare(model: Any, planned: Any, samples: Any, watch: Watch) -> None:
    """The step alone, over batches that lie on the card."""
    collate = PaddingFreeCollator(model)
    device = next(model.parameters()).device
    packs = [[{**samples[n], "sample_id": n} for n in planned[k].tolist()] for k in range(8)]
    batches = [collate([pack]).to(device) for pack in packs]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    for step in range(STEPS):
        batch = batches[step % len(batches)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = token_loss_sum(model, batch) / CAPACITY
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch(step + 1)


if __name__ == "__main__":
    main()
