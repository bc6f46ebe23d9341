"""Compiled layers recorded as CUDA graphs (`torch.cuda.make_graphed_callables`): what they give and cost.

    python bench/gpu/graphs.py [--shape text05|lora7b]

A graph holds one shape: rows are padded to 8,192, offsets to the most segments of a row (by empty ones), the
longest segment is rounded up to the next of `--longest`, one set of graphs for each. One line of JSON a case:
the step alone as in host_time.py's `bare`, compiled; with rounded boundaries, not recorded; recorded.
*sd* is the spread of single steps over their mean. Gradients are added to buffers that stay
(`set_to_none=False`), so a replay overwrites none.
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
from host_time import CAPACITY, model_of, samples_of
from speed import busy_ms
from torch.nn.functional import pad
from torch.profiler import ProfilerActivity, profile

import packtrain as pt
from packtrain.collate import PaddingFreeCollator
from packtrain.train.compiled import compile_layers
from packtrain.train.loss import bare_model, token_loss_sum
from packtrain.train.varlen import use_varlen

WARM, TIMED, SINGLE, TRACED = 16, 32, 64, 4


class Recorded(torch.nn.Module):
    """A layer of tensors alone, as graphs take them."""

    def __init__(self, layer: Any, longest: int) -> None:
        super().__init__()
        self.layer, self.longest, self.compiled = layer, longest, layer._compiled_call_impl

    def forward(self, hidden: Any, cos: Any, sin: Any, cu: Any) -> Any:
        return self.compiled(
            hidden, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
            position_embeddings=(cos, sin), pack_cu=cu, pack_max=self.longest,
        )  # fmt: skip


def rounded(model: Any, most: int, sizes: list[int]) -> Any:
    """Boundaries of `most` segments, the longest rounded up, behind what `compile_layers` hands down."""

    def hook(module: Any, args: Any, given: dict[str, Any]) -> Any:
        cu, longest = given["pack_cu"], given["pack_max"]
        wide = pad(cu, (0, most + 1 - cu.numel()))
        wide[cu.numel() :] = cu[-1]
        return args, {**given, "pack_cu": wide, "pack_max": next(n for n in sizes if n >= longest)}

    return bare_model(model).model.register_forward_pre_hook(hook, with_kwargs=True)


def record(layers: Any, model: Any, row: Any, most: int, longest: int) -> list[Recorded]:
    """Every layer as two graphs, for rows of this shape."""
    seen: dict[str, Any] = {}

    def look(module: Any, args: Any, given: dict[str, Any]) -> None:
        seen["hidden"] = args[0] if args else given["hidden_states"]
        seen["places"] = given["position_embeddings"]

    handle = layers[0].register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        token_loss_sum(model, row)
    handle.remove()
    cu = torch.full((most + 1,), CAPACITY, dtype=torch.int32, device="cuda")
    whole = CAPACITY // longest
    cu[: whole + 1] = torch.arange(whole + 1, device="cuda") * longest
    first = any(p.requires_grad for p in model.get_input_embeddings().parameters())
    samples = [
        (seen["hidden"].clone().requires_grad_(bool(k) or first), *(t.clone() for t in seen["places"]), cu)
        for k in range(len(layers))
    ]
    made = [Recorded(layer, longest).train() for layer in layers]
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        torch.cuda.make_graphed_callables(tuple(made), tuple(samples), allow_unused_input=True)
    return made


def replay(layer: Any, graphs: dict[int, Recorded]) -> Any:
    """What the layer calls instead of its compiled form."""

    def call(*args: Any, **given: Any) -> Any:
        hidden = args[0] if args else given["hidden_states"]
        return graphs[given["pack_max"]](hidden, *given["position_embeddings"], given["pack_cu"])

    return call


def measure(name: str, model: Any, batches: list[Any], optimizer: Any) -> None:
    def steps(count: int) -> None:
        for k in range(count):
            with torch.autocast("cuda", torch.bfloat16):
                loss = token_loss_sum(model, batches[k % len(batches)]) / CAPACITY
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    def timed(count: int) -> float:
        begun = time.perf_counter()
        steps(count)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    timed(WARM)
    wall = timed(TIMED) * 1000 / TIMED
    single = np.array([timed(1) for _ in range(SINGLE)])
    with profile(activities=[ProfilerActivity.CUDA]) as tracer:
        timed(TRACED)
    busy = busy_ms(list(tracer.events())) / TRACED
    row = {
        "case": name, "wall_ms": round(wall, 1), "busy_ms": round(busy, 1), "share": round(busy / wall, 3),
        "sd": round(float(single.std() / single.mean()), 3),
        "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 1),
    }  # fmt: skip
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="text05", choices=["text05", "lora7b"])
    parser.add_argument("--longest", nargs="+", type=int, default=[1024, 2048, 4096, CAPACITY])
    asked = parser.parse_args()
    torch.manual_seed(0)
    samples = [s for s in samples_of(CAPACITY) if len(s["input_ids"]) <= CAPACITY]
    planned = pt.plan([len(s["input_ids"]) for s in samples], CAPACITY)
    model = model_of(asked.shape, False).to("cuda", torch.bfloat16).train()
    collate = PaddingFreeCollator(bare_model(use_varlen(model)), CAPACITY)
    chosen = [planned[k].tolist() for k in np.random.default_rng(0).permutation(len(planned))[:16]]
    batches = [collate([[{**samples[n], "sample_id": n} for n in pack]]).to("cuda") for pack in chosen]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    compile_layers(model)
    measure("compiled", model, batches, optimizer)
    layers = list(bare_model(model).model.layers)
    most = max(len(pack) for pack in chosen) + 1
    rounded(model, most, asked.longest)
    measure("rounded boundaries", model, batches, optimizer)
    graphs = {longest: record(layers, model, batches[0], most, longest) for longest in asked.longest}
    for k, layer in enumerate(layers):
        layer._compiled_call_impl = replay(layer, {n: made[k] for n, made in graphs.items()})
    measure("recorded", model, batches, optimizer)


if __name__ == "__main__":
    main()
