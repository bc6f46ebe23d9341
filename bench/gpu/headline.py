"""Packing against what a user would pick instead, in the same Trainer: one table and one JSON.

    python bench/gpu/headline.py LENGTHS [--group text05|lora7b] [--cases packed padded_8 …] [--out DIR]

LENGTHS is a folder of arrays of token lengths (`*.npy`); its sets of text are one mix.
Cases: `packed` (a plan of the whole mix, rows of 8,192), `trl` (best fit decreasing over a thousand samples
at a time, as TRL packs), `one` sample a step, `padded_8` and `padded_16` (random batches), `bucketed_16`
(lengths sorted in groups of fifty batches); with `_compiled` behind the name the layers are compiled. All
train the same random weights in one subclass of transformers' Trainer with the same loss, the same
variable-length kernel (a padded row is one segment of it) and gradient checkpointing. *busy* is the union of
kernel times.

DIR/headline_cases.json holds a row a case, of which those that are there already are not run again;
DIR/headline.json the ratios of packed over each baseline, per real token. `--tiny` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import transformers
from host_time import CAPACITY, flops_of, matmul_rate, model_of
from speed import busy_ms
from torch.profiler import ProfilerActivity, profile

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.files import publish_text
from packtrain.train.compiled import compile_layers
from packtrain.train.loss import bare_model, token_loss_sum
from packtrain.train.varlen import use_varlen

MIX = (
    *("alpaca_en", "alpaca_zh", "c4_demo", "glaive_toolcall_en", "gpteacher_roleplay", "gsm8k_train"),
    *("new_codealpaca", "t0_train_50k"),
)
BASES = ("one", "padded_8", "padded_16", "bucketed_16", "trl")
WARM, TIMED, TRACED = 8, 12, 10
_TOLD = ("tokens_per_s", "busy_share", "mfu", "peak_gib", "first_step_s")
STEPS = WARM + TIMED + TRACED


def lengths_of(folder: Path, capacity: int) -> list[int]:
    """Lengths of the mix in random order; longer ones than a row are left out of all cases."""
    held = np.concatenate([np.load(folder / f"{name}.npy").astype(np.int64) for name in MIX])
    held = held[(held > 1) & (held <= capacity)]
    return np.random.default_rng(0).permutation(held).tolist()


def groups_of(mode: str, lengths: list[int], capacity: int) -> list[list[int]]:
    """Samples of each step, as numbers into `lengths`; packed rows of a plan come in random order."""
    order = list(range(len(lengths)))
    if mode == "packed":
        made = [pack.tolist() for pack in pt.plan(lengths, capacity)]
        return [made[k] for k in np.random.default_rng(1).permutation(len(made))]
    if mode == "trl":
        made = []
        for begin in range(0, len(order), 1000):
            part = pt.plan(lengths[begin : begin + 1000], capacity, packer="bfd")
            made += [[begin + n for n in pack.tolist()] for pack in part]
        return [made[k] for k in np.random.default_rng(1).permutation(len(made))]
    size = 1 if mode == "one" else int(mode.rpartition("_")[2])
    if mode.startswith("bucketed"):
        mega = [order[k : k + 50 * size] for k in range(0, len(order), 50 * size)]
        order = [n for part in mega for n in sorted(part, key=lambda n: -lengths[n])]
    groups = [order[k : k + size] for k in range(0, len(order), size)]
    return [groups[k] for k in np.random.default_rng(1).permutation(len(groups))]


def chosen(groups: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Those of the run: what is timed and what is traced are spread evenly over the sizes of all groups."""
    sizes = np.array([max(lengths[n] for n in group) * len(group) for group in groups])
    ordered = np.argsort(sizes, kind="stable")
    spread = [ordered[((np.arange(k) + 0.5) * len(groups) / k).astype(int)] for k in (TIMED, TRACED)]
    drawn = np.random.default_rng(2)
    order = [*drawn.permutation(len(groups))[:WARM], *(k for part in spread for k in drawn.permutation(part))]
    return [groups[k] for k in order]


def sample(number: int, length: int) -> dict[str, Any]:
    ids = torch.randint(1, 500, (length,), generator=torch.Generator().manual_seed(number))
    labels = ids.clone()
    labels[: length * 2 // 5] = -100
    return {"input_ids": ids, "labels": labels, "sample_id": number}


def batch_of(mode: str, group: list[int], lengths: list[int], collate: PaddingFreeCollator) -> dict[str, Any]:
    """A packed row [1,T], or rows [B,T] that are padded behind: causal layers need no mask for it."""
    samples = [sample(n, lengths[n]) for n in group]
    if mode in ("packed", "trl"):
        return dict(collate([samples]))
    longest = max(lengths[n] for n in group)
    made = {
        name: torch.full((len(group), longest), fill) for name, fill in (("input_ids", 0), ("labels", -100))
    }
    for row, one in enumerate(samples):
        for name in made:
            made[name][row, : lengths[group[row]]] = one[name]
        made["labels"][row, 0] = -100
    positions = torch.arange(longest).expand(len(group), -1).contiguous()
    return {**made, "position_ids": positions, "use_cache": False}


class Measured(transformers.Trainer):  # type: ignore[misc]
    """Trains on batches that are given, and measures its steps."""

    def __init__(self, batches: list[dict[str, Any]], tokens: list[int], **given: Any) -> None:
        super().__init__(**given)
        self.batches, self.tokens, self.row, self.begun = batches, tokens, {}, time.perf_counter()
        self.cuda = torch.cuda.is_available()
        kind = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
        self.tracer = profile(activities=[kind])

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.batches, batch_size=None, pin_memory=self.cuda)

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> torch.Tensor:
        return token_loss_sum(model, inputs) / (inputs["labels"] != -100).sum().clamp(min=1)

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def training_step(self, *given: Any, **more: Any) -> Any:
        step = self.state.global_step
        if step == 1:
            self.row["first_step_s"] = round(self.now() - self.begun, 1)
        if step == WARM:
            self.started = self.now()
        if step == WARM + TIMED:
            took = self.now() - self.started
            done = sum(self.tokens[WARM : WARM + TIMED])
            self.row |= {"wall_ms": round(took * 1000 / TIMED, 1), "wall_ns_token": took * 1e9 / done}
            self.tracer.start()
        return super().training_step(*given, **more)

    def finished(self) -> None:
        self.now()
        self.tracer.stop()
        busy = busy_ms(list(self.tracer.events()))
        done = sum(self.tokens[WARM + TIMED :])
        self.row |= {
            "busy_ms": round(busy / TRACED, 1),
            "busy_ns_token": busy * 1e6 / done,
            "busy_share": round(busy / done / (self.row["wall_ns_token"] / 1e6), 3),
            "tokens_per_s": round(1e9 / self.row["wall_ns_token"]),
            "fill": round(done / sum(b["input_ids"].numel() for b in self.batches[WARM + TIMED :]), 3),
        }
        if self.cuda:
            self.row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)


def run(group: str, name: str, lengths: list[int], capacity: int, tiny: bool, rate: float) -> dict[str, Any]:
    """One case; a case that does not fit says so."""
    mode, _, compiled = name.partition("_compiled")
    cuda, compiled = torch.cuda.is_available(), name.endswith("_compiled")
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = model_of(group, tiny)
    model = model.to(torch.bfloat16 if cuda else None).train()
    use_varlen(bare_model(model))
    groups = chosen(groups_of(mode, lengths, capacity), lengths)
    collate = PaddingFreeCollator(bare_model(model))
    batches = [batch_of(mode, one, lengths, collate) for one in groups]
    if compiled:
        compile_layers(model, **({} if cuda else {"backend": "eager"}))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=1, bf16=cuda, use_cpu=not cuda,
            gradient_checkpointing=True, logging_steps=1000, logging_nan_inf_filter=False, report_to="none",
            save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        trainer = Measured(batches, [sum(lengths[n] for n in g) for g in groups], model=model, args=args)
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            return {"case": f"{group}/sft/{name}", "out_of_memory": True}
        trainer.finished()
    row = trainer.row
    if rate:
        plans = [np.array(g) for g in groups[WARM + TIMED :]]
        flops = flops_of(model, plans, [{"input_ids": range(n)} for n in lengths])
        row["mfu"] = round(flops / (row["busy_ms"] / 1000) / rate, 3)
    return {"case": f"{group}/sft/{name}", **row}


def ratios(rows: dict[str, dict[str, Any]], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Packed over each baseline, per real token: plain over plain, compiled over compiled."""
    for name, packed in rows.items():
        prefix, _, mode = name.rpartition("/")
        if mode not in ("packed", "packed_compiled") or "wall_ns_token" not in packed:
            continue
        for base in BASES:
            names = (f"{prefix}/{base}{mode.removeprefix('packed')}", f"{prefix}/{base}")
            other = next((rows[one] for one in names if one in rows), {})
            if "wall_ns_token" not in other:
                continue
            yield {
                "case": f"{prefix}/{mode}_vs_{base}", "baseline": other["case"], **about,
                "wall_ratio": round(other["wall_ns_token"] / packed["wall_ns_token"], 2),
                "busy_ratio": round(other["busy_ns_token"] / max(packed["busy_ns_token"], 1e-9), 2),
                **{key: packed.get(key) for key in _TOLD},
                "baseline_peak_gib": other.get("peak_gib"),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--group", default="text05", choices=["text05", "lora7b"])
    parser.add_argument("--cases", nargs="+", default=["packed", "packed_compiled", *BASES])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    capacity = 2048 if asked.tiny else CAPACITY
    lengths = lengths_of(asked.lengths, capacity)
    lengths = lengths[:2000] if asked.tiny else lengths
    cuda = torch.cuda.is_available()
    rate = matmul_rate() if cuda else 0.0
    about = {
        "card": torch.cuda.get_device_name() if cuda else "cpu", "date": str(datetime.date.today()),
        "torch": torch.__version__, "transformers": transformers.__version__,
    }  # fmt: skip
    asked.out.mkdir(parents=True, exist_ok=True)
    held = asked.out / "headline_cases.json"
    rows = {row["case"]: row for row in json.loads(held.read_text())} if held.exists() else {}
    for name in asked.cases:
        if f"{asked.group}/sft/{name}" not in rows:
            row = run(asked.group, name, lengths, capacity, asked.tiny, rate)
            rows[row["case"]] = {**row, **about}
            print(json.dumps(row), flush=True)
            publish_text(held, json.dumps(list(rows.values()), indent=1))
    table = list(ratios(rows, about))
    publish_text(asked.out / "headline.json", json.dumps(table, indent=1))
    for one in table:
        told = f"wall {one['wall_ratio']:6.2f}x   busy {one['busy_ratio']:6.2f}x   mfu {one['mfu']}"
        print(f"{one['case']:45} {told}")


if __name__ == "__main__":
    main()
