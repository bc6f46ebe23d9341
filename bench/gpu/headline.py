"""Packing against what a user would pick instead, in the same Trainer: one table and one JSON.

    python bench/gpu/headline.py LENGTHS [--group text05|lora7b|vl3b|qwen3vl] [--cases packed padded_8 …]

LENGTHS is a folder of arrays of token lengths (`*.npy`); its sets of text are one mix. A sample of `vl3b`
(Qwen2.5-VL-3B) or `qwen3vl` is a picture of the set for that model (near-square, random pixels) and a text.
Cases: `packed` (a plan of the whole mix, rows of 8,192), `trl` (best fit decreasing over a thousand samples
at a time, as TRL packs), `one` sample a step, `padded_8` and `padded_16` (random batches), `bucketed_16`
(lengths sorted in groups of fifty batches); with `_compiled` behind the name the layers are compiled. All
train the same random weights in one subclass of transformers' Trainer with the same loss, the same
variable-length kernel (a padded row is one segment of it; towers always pack) and gradient checkpointing.
*busy* is the union of kernel times.

DIR (`--out`)/headline_cases.json holds a row a case, of which those that are there already are not run again;
DIR/headline.json the ratios of packed over each baseline, per real token. `--tiny` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
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
from speed import busy_ms, image_model
from torch.profiler import ProfilerActivity, profile
from train_samples import image_sample

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
PICTURES = {"vl3b": "images_qwen2_5_vl_max1280", "qwen3vl": "images_qwen3_vl"}
BASES = ("one", "padded_8", "padded_16", "bucketed_16", "trl")
WARM, TIMED, TRACED = 8, 12, 10
_ABOUT = ("card", "date", "torch", "transformers")
_TOLD = ("tokens_per_s", "busy_share", "mfu", "peak_gib", "first_step_s")
STEPS = WARM + TIMED + TRACED


class Samples:
    """Samples of a group by number; those longer than a row are left out of all cases.

    Attributes:
        lengths: tokens of each sample, in random order.
    """

    def __init__(self, group: str, folder: Path, capacity: int, tiny: bool) -> None:
        drawn = np.random.default_rng(0)
        texts = drawn.permutation(np.concatenate([np.load(folder / f"{name}.npy") for name in MIX])).tolist()
        self.grids: list[tuple[int, int]] = []
        if group in PICTURES:
            counts = np.tile(np.load(folder / f"{PICTURES[group]}.npy"), 4)
            sides = [max(2, round(float(n) ** 0.5)) for n in drawn.permutation(counts // (16 if tiny else 1))]
            self.grids = [(side, side) for side in sides]
            texts = np.load(folder / "alpaca_en.npy")[drawn.integers(0, 999, len(sides))].tolist()
            self.texts = [text // 2 for text in texts]
            texts = [2 * text + 2 + a * b for text, (a, b) in zip(self.texts, self.grids, strict=True)]
        held = [k for k, length in enumerate(texts) if 1 < length <= capacity][: 300 if tiny else None]
        self.lengths = [texts[k] for k in held]
        self.grids = [self.grids[k] for k in held] if self.grids else []
        self.texts = [self.texts[k] for k in held] if self.grids else []

    def __call__(self, number: int, model: Any) -> dict[str, Any]:
        if self.grids:
            merge = model.config.vision_config.spatial_merge_size
            high, wide = self.grids[number]
            return image_sample(model, number, ((1, high * merge, wide * merge),), text=self.texts[number])
        ids = torch.randint(1, 500, (self.lengths[number],), generator=torch.Generator().manual_seed(number))
        labels = ids.clone()
        labels[: len(ids) * 2 // 5] = -100
        return {"input_ids": ids, "labels": labels, "sample_id": number}


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


def batch_of(mode: str, samples: list[dict[str, Any]], collate: PaddingFreeCollator) -> dict[str, Any]:
    """A packed row [1,T], or rows [B,T] that are padded behind: causal layers need no mask for it."""
    if mode in ("packed", "trl"):
        return dict(collate([samples]))
    rows = [dict(collate([[one]])) for one in samples]
    longest = max(row["input_ids"].shape[1] for row in rows)
    made = {"use_cache": False}
    for name in rows[0]:
        held = [row[name] for row in rows]
        if name in ("input_ids", "labels", "position_ids"):
            fill = -100 if name == "labels" else 0
            held = [torch.nn.functional.pad(t, (0, longest - t.shape[-1]), value=fill) for t in held]
            made[name] = torch.cat(held, dim=held[0].ndim - 2)
        elif name in ("pixel_values", "image_grid_thw"):
            made[name] = torch.cat(held)
    shape = made["position_ids"].shape
    straight = torch.arange(longest).expand(shape[-2:])
    made["position_ids"] = (
        straight if len(shape) == 2 else torch.cat([straight[None], made["position_ids"][1:]])
    )
    return {name: t.contiguous() if torch.is_tensor(t) else t for name, t in made.items()}


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


def run(group: str, name: str, data: Samples, capacity: int, tiny: bool, rate: float) -> dict[str, Any]:
    """One case; a case that does not fit says so."""
    gc.collect()  # the model of the case before
    lengths = data.lengths
    mode, _, compiled = name.partition("_compiled")
    cuda, compiled = torch.cuda.is_available(), name.endswith("_compiled")
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = image_model() if group == "qwen3vl" else model_of(group, tiny)
    model = model.to(torch.bfloat16 if cuda else None).train()
    use_varlen(bare_model(model))
    groups = chosen(groups_of(mode, lengths, capacity), lengths)
    collate = PaddingFreeCollator(bare_model(model))
    batches = [batch_of(mode, [data(n, bare_model(model)) for n in one], collate) for one in groups]
    if compiled:
        compile_layers(model, **({} if cuda else {"backend": "eager"}))
    if cuda:
        torch.cuda.empty_cache()
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
        merge = 2 if data.grids else 1
        held = [{"input_ids": range(n)} for n in lengths]
        for one, (high, wide) in zip(held, data.grids, strict=False):
            one["patches"] = high * wide * merge**2
        flops = flops_of(model, plans, held)
        row["mfu"] = round(flops / (row["busy_ms"] / 1000) / rate, 3)
    return {"case": f"{group}/sft/{name}", **row}


def ratios(rows: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Packed, plain and compiled, over each baseline, plain and compiled, per real token."""
    for name, packed in rows.items():
        prefix, _, mode = name.rpartition("/")
        if mode not in ("packed", "packed_compiled") or "wall_ns_token" not in packed:
            continue
        for base in [*BASES, *(f"{base}_compiled" for base in BASES)]:
            other = rows.get(f"{prefix}/{base}", {})
            if "wall_ns_token" not in other:
                continue
            yield {
                "case": f"{prefix}/{mode}_vs_{base}", **{key: packed[key] for key in _ABOUT},
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
    parser.add_argument("--group", default="text05", choices=["text05", "lora7b", "vl3b", "qwen3vl"])
    parser.add_argument("--cases", nargs="+", default=["packed", "packed_compiled", *BASES])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    capacity = 256 if asked.tiny else CAPACITY
    data = Samples(asked.group, asked.lengths, capacity, asked.tiny)
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
            row = run(asked.group, name, data, capacity, asked.tiny, rate)
            rows[row["case"]] = {**row, **about}
            print(json.dumps(row), flush=True)
            publish_text(held, json.dumps(list(rows.values()), indent=1))
            publish_text(asked.out / "headline.json", json.dumps(list(ratios(rows)), indent=1))
    table = list(ratios(rows))
    publish_text(asked.out / "headline.json", json.dumps(table, indent=1))
    for one in table:
        told = f"wall {one['wall_ratio']:6.2f}x   busy {one['busy_ratio']:6.2f}x   mfu {one['mfu']}"
        print(f"{one['case']:45} {told}")


if __name__ == "__main__":
    main()
