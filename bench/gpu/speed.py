"""Speed on a GPU: varlen against the sdpa block mask, and a vision tower on varlen against its image loop.

    python bench/gpu/speed.py [OUT.json]

Training steps (forward, backward, fused AdamW, bf16) of a 0.5B text model and of a Qwen3-VL shape on
random weights. *busy* is the union of kernel times (torch.profiler), which no host can slow; *wall* is
what this host delivered. Batches are prebuilt; only ratios of one run are figures.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2] / "tests" / "train")]

from train_samples import image_sample, text_sample  # noqa: E402

from packtrain.collate import PaddingFreeCollator  # noqa: E402
from packtrain.train import use_varlen  # noqa: E402
from packtrain.train.loss import token_loss_sum  # noqa: E402

CAPACITY, STEPS = 8192, 4


def busy_ms(events: list[Any]) -> float:
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA")
    total, edge = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, edge))
        edge = max(edge, end)
    return total / 1000


def timed(model: Any, batches: list[Any]) -> dict[str, float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(batch: Any) -> None:
        loss = token_loss_sum(model, batch, fused=True) / CAPACITY
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches[:2]:
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) * 1000 / len(batches)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for batch in batches:
            step(batch)
        torch.cuda.synchronize()
    events = list(trace.events())
    kernels = sum(e.device_type.name == "CUDA" for e in events) / len(batches)
    return {
        "busy_ms": round(busy_ms(events) / len(batches), 1),
        "wall_ms": round(wall, 1),
        "kernels": round(kernels),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def text_packs() -> list[list[dict[str, Any]]]:
    """Lengths as a chat mix has them: lognormal, median 350, 16 to 8192; first fit."""
    drawn = np.clip(np.random.default_rng(0).lognormal(np.log(350), 1, 400).astype(int), 16, CAPACITY)
    packs: list[list[int]] = []
    for length in sorted(drawn.tolist(), reverse=True):
        home = next((pack for pack in packs if sum(pack) + length <= CAPACITY), None)
        packs.append([length]) if home is None else home.append(length)
    full = [pack for pack in packs if sum(pack) > 0.95 * CAPACITY]
    full = [full[i] for i in np.linspace(0, len(full) - 1, STEPS).astype(int)]
    return [[text_sample(n, 100 * p + i) for i, n in enumerate(pack)] for p, pack in enumerate(full)]


def image_packs(model: Any) -> list[list[dict[str, Any]]]:
    """Small pictures of 100 to 400 tokens with 20 to 200 tokens of text."""
    rng, packs = np.random.default_rng(1), []
    for p in range(STEPS):
        pack: list[dict[str, Any]] = []
        while True:
            high, wide = (2 * int(n) for n in rng.integers(10, 21, 2))
            text = int(rng.integers(10, 100))
            sample = image_sample(model, 1000 * p + len(pack), ((1, high, wide),), text=text)
            if sum(s["input_ids"].shape[0] for s in pack) + sample["input_ids"].shape[0] > CAPACITY:
                break
            pack.append(sample)
        packs.append(pack)
    return packs


def on_card(model: Any, packs: list[list[dict[str, Any]]]) -> list[Any]:
    collate = PaddingFreeCollator(model)
    rows = []
    for pack in packs:
        batch = collate([pack])
        moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        rows.append({k: v.bfloat16() if k == "pixel_values" else v for k, v in moved.items()})
    return rows


def text_model() -> Any:
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
            num_attention_heads=14, num_key_value_heads=2, use_cache=False, tie_word_embeddings=True,
        )
    )  # fmt: skip


def image_model() -> Any:
    text = {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 14,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "use_cache": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
                            "mrope_interleaved": True},
    }  # fmt: skip
    tower = {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 1024,
        "patch_size": 16, "deepstack_visual_indexes": [5, 11, 17],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=tower, image_token_id=151655, video_token_id=151656,
        vision_start_token_id=151652, vision_end_token_id=151653,
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config)


def main() -> None:
    torch.manual_seed(0)
    rows: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(rows, flush=True)

    def mode(name: str, model: Any, batches: list[Any], switch: Callable[[Any], Any]) -> None:
        switch(model)
        try:
            rows[name] = timed(model, batches)
        except Exception as error:
            rows[name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        print(name, rows[name], flush=True)

    with torch.device("cuda"):
        model = text_model().bfloat16().train()
    model.set_attn_implementation("sdpa")
    batches = on_card(model, text_packs())
    for again in ("", " again"):
        mode(f"text sdpa{again}", model, batches, lambda m: m.set_attn_implementation("sdpa"))
        mode(f"text varlen{again}", model, batches, use_varlen)
    del model, batches
    torch.cuda.empty_cache()

    with torch.device("cuda"):
        model = image_model().bfloat16().train()
    packs = image_packs(model)
    batches = on_card(model, packs)
    print("images a pack", [len(pack) for pack in packs], flush=True)

    def slow_tower(m: Any) -> None:
        use_varlen(m).config.vision_config._attn_implementation_internal = "sdpa"

    def sdpa_text(m: Any) -> None:
        use_varlen(m)
        for config in (m.config, m.config.get_text_config()):
            config._attn_implementation_internal = "sdpa"

    mode("vl varlen, tower sdpa loop", model, batches, slow_tower)
    mode("vl sdpa text, tower varlen", model, batches, sdpa_text)
    mode("vl varlen, tower varlen", model, batches, use_varlen)
    mode("vl varlen, tower sdpa loop again", model, batches, slow_tower)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
