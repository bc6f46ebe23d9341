"""What the host costs in a training step: wall against busy time, kernels, and every wait for the card.

    python bench/gpu/host_time.py [OUT.json] [--cases own trainer bare own_compiled bare_compiled] [--tiny]

`--shape text05`: a 0.5 B Qwen3 of random weights (bf16, varlen) trains on packs of 8,192 tokens in this
package's trainer, in transformers' Trainer through `pack(trainer)`, and in a bare loop over batches that lie
on the card already. `lora7b`: the shape of a 7 B Qwen2.5 with adapters of rank 16 on its linear layers;
`full7b`: 8 of its 28 layers, all trained; `vl3b`: Qwen2.5-VL-3B with pictures, the cases of `bare` alone.

One line of JSON a case: *wall* and *busy* (union of kernel times) a step, kernels, and the places in which
the host waited for the card, with how often in a step. Cases that end in `_compiled` compile the layers
(`training.compile`; `own_padded`: rows padded to 8,192, `own_recorded`: and CUDA graphs by
`torch_compile_mode: reduce-overhead`; `trainer_layers`: `compile_layers` before the Trainer;
`trainer_compiled`: the Trainer's own `torch_compile`); `step_sd` is the spread of single steps, in wall time,
over their mean; `graphs` are those made while warming up and at the end. `mfu` is model FLOPs of a step
over its busy time and the rate of a bf16 matmul here. `--tiny` tries the script itself on a CPU.
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
from proof import TEXT, text_model, vision_model
from speed import busy_ms, image_packs
from torch.profiler import ProfilerActivity, profile

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.hosts.transformers import pack
from packtrain.planning.epoch_order import EpochOrder
from packtrain.sources.encoded import EncodedTemplate
from packtrain.train.compiled import compile_layers
from packtrain.train.config import load_config
from packtrain.train.loss import bare_model, token_loss_sum
from packtrain.train.sft import train
from packtrain.train.varlen import use_varlen

CAPACITY, WARM, TIMED, TRACED, WATCHED, SPREAD = 8192, 20, 20, 3, 3, 30
STEPS = WARM + TIMED + TRACED + WATCHED + SPREAD + 1
SEVEN = {
    **TEXT, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
VL3B = {
    **TEXT, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip


class Watch:
    """Called behind every step: times some, then traces some, then notes where the host waits in some."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.row: dict[str, Any] = {}
        self.waits: collections.Counter[str] = collections.Counter()
        self.moments: list[float] = []
        self.tracer = profile(activities=[ProfilerActivity.CUDA] if self.cuda else [ProfilerActivity.CPU])

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, done: int, total: int = 0) -> None:
        if done == 1:
            self.started = self.now()
        if done == WARM:
            self.row["warm_s"] = round(self.now() - self.started, 1)
            self.row["graphs"] = [graphs()]
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
            self.row["graphs"].append(graphs())
            warnings.showwarning = self.note
            warnings.simplefilter("always")
            if self.cuda:
                torch.cuda.set_sync_debug_mode("warn")
        elif done == WARM + TIMED + TRACED + WATCHED and self.cuda:
            torch.cuda.set_sync_debug_mode("default")
        if done >= WARM + TIMED + TRACED + WATCHED:
            self.moments.append(self.now())
            took = np.diff(self.moments)
            if len(took) == SPREAD:
                self.row["step_sd"] = round(float(took.std() / took.mean()), 3)

    def note(self, message: Any, *given: Any, **more: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [f for f in traceback.extract_stack() if not f.filename.endswith("warnings.py")]
        frames = [f for f in frames if "/site-packages/torch/" not in f.filename][:-1]
        frame = frames[-1] if frames else None
        where = "?" if frame is None else f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
        self.waits[where] += 1

    def told(self, case: str) -> None:
        waits = {place: round(count / WATCHED, 1) for place, count in self.waits.most_common()}
        print(json.dumps({"case": case, **self.row, "waits": waits}), flush=True)


def graphs() -> int:
    """Graphs that were compiled in this process until now."""
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


def matmul_rate() -> float:
    """bf16 FLOPs a second of a large matmul on this card."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for count in (5, 50):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            a @ a
        torch.cuda.synchronize()
    return float(2 * 8192**3 * 50 / (time.perf_counter() - begun))


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
    parser.add_argument("--shape", default="text05", choices=["text05", "lora7b", "full7b", "vl3b"])
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
    rate = matmul_rate() if cuda else 0.0
    print(json.dumps({"card": torch.cuda.get_device_name() if cuda else "cpu", "matmul_tflops": rate / 1e12,
                      "torch": torch.__version__, "transformers": transformers.__version__}))  # fmt: skip
    for named in asked.cases:
        case, _, compiled = named.partition("_")
        torch.manual_seed(0)
        model = model_of(asked.shape, asked.tiny)
        model = model.to("cuda" if cuda else "cpu", torch.bfloat16 if cuda else None).train()
        if cuda:
            use_varlen(bare_model(model))
        watch = Watch()
        with tempfile.TemporaryDirectory() as folder:
            if case == "own":
                mine = {**known, "output_dir": folder, "compile": bool(compiled)}
                del mine["per_device_train_batch_size"]
                data = {"kind": "planned"}
                if compiled in ("padded", "recorded"):
                    data["pad_to_length"] = capacity
                if compiled == "recorded":
                    mine["torch_compile_mode"] = "reduce-overhead"
                train(
                    load_config({"training": mine, "data": data}),
                    planned,
                    samples,
                    EncodedTemplate(),
                    model=model,
                    progress=watch,
                )
            elif case == "trainer":
                args = transformers.TrainingArguments(
                    **known,
                    output_dir=folder,
                    report_to="none",
                    disable_tqdm=True,
                    use_cpu=not cuda,
                    torch_compile=compiled == "compiled",
                )
                if compiled == "layers":
                    compile_layers(model)
                trainer = transformers.Trainer(model, args, train_dataset=samples, callbacks=[Behind(watch)])
                pack(trainer, pack_length=capacity)
                trainer.train()
            else:
                if compiled:
                    compile_layers(model)
                bare(model, planned, samples, watch)
        if rate:
            flops = flops_of(model, planned, samples)
            watch.row["mfu"] = round(flops / (watch.row["busy_ms"] / 1000) / rate, 3)
            watch.row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        watch.told(named)
        del model


def model_of(shape: str, tiny: bool) -> Any:
    """A model of random weights."""
    if shape == "text05":
        return text_model(tiny)
    if shape == "vl3b":
        return vision_model(tiny, VL3B, 32)
    large = {**SEVEN, "num_hidden_layers": 28 if shape == "lora7b" else 8}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = text_model(tiny, large)
    if shape == "full7b":
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))


def flops_of(model: Any, planned: Any, samples: list[dict[str, Any]]) -> float:
    """Model FLOPs of a mean step.

    Of every weight and token 2 forward, 2 for the gradient of the input, 2 for that of the weight where it is
    trained; of every pair of tokens that attends and width 12. The head only sees tokens that are trained.
    A sample with `patches` has one picture: each patch sees the others, in window layers 64 of them.
    """
    text = bare_model(model).config.get_text_config()
    each = 6 if all(p.requires_grad for p in model.parameters()) else 4
    inner = sum(p.numel() for name, p in model.named_parameters() if "layers." in name and "lora" not in name)
    lengths = [len(samples[n]["input_ids"]) for pack in planned for n in pack.tolist()]
    trained = sum(n - n * 2 // 5 for n in lengths)
    head = text.vocab_size * text.hidden_size
    width = text.num_hidden_layers * text.num_attention_heads * text.head_dim
    pairs = sum(n * n for n in lengths) / 2
    total = each * (inner * sum(lengths) + head * trained) + 12 * width * pairs
    patches = np.array([samples[n].get("patches", 0) for pack in planned for n in pack.tolist()], float)
    if patches.any():
        tower = bare_model(model).config.vision_config
        blocks = sum(p.numel() for name, p in model.named_parameters() if "blocks." in name)
        full = len(getattr(tower, "fullatt_block_indexes", range(tower.depth)))
        seen = full * (patches**2).sum() + (tower.depth - full) * (patches * np.minimum(patches, 64)).sum()
        total += 6 * blocks * patches.sum() + 12 * tower.hidden_size * seen
    return float(total / len(planned))


def bare(model: Any, planned: Any, samples: Any, watch: Watch) -> None:
    """The step alone, over batches that lie on the card: of the packs `train` takes, in its order."""
    collate = PaddingFreeCollator(bare_model(model))
    device = next(model.parameters()).device
    if hasattr(bare_model(model).config, "vision_config"):
        packs = image_packs(bare_model(model))
    else:
        order = EpochOrder(planned.align(1), seed=load_config({}).training.seed)
        taken = planned.align(1).pack_ids_at(order.at(np.arange(STEPS), 0))
        packs = [[{**samples[n], "sample_id": n} for n in planned[k].tolist()] for k in taken.tolist()]
    batches = [collate([pack]).to(device) for pack in packs]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
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
