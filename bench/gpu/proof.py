"""Start-up cost of the isolation proof: the time that `prove` takes before the first step.

    PYTHONPATH=src python bench/gpu/proof.py              # on the card, bfloat16
    PYTHONPATH=src python bench/gpu/proof.py --cpu        # on 2 CPU cores, float32: the 0.5 B shape
    PYTHONPATH=src python bench/gpu/proof.py --tiny --cpu # tries the script itself
    PYTHONPATH=src python bench/gpu/proof.py --quantised  # 4 and 8 bit, int8, adapters, compiled, experts
    PYTHONPATH=src python bench/gpu/proof.py --ranks 2    # DDP, FSDP1, FSDP2: clean, a leak on one rank

Needs torch and transformers beside the source tree; random weights of the real classes. The target is 3 s on
the card and 30 s on 2 CPU cores for 0.5 B. One line of JSON per shape and backend: seconds of the first proof
in the process (kernels are loaded), of a second one, and what was compared. Last, a patched attention must be
refused by name on the card too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from packtrain.errors import IsolationError
from packtrain.template import ensure_torchvision
from packtrain.train.start_up import prove
from packtrain.train.varlen import use_varlen

TEXT = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
ensure_torchvision()

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2}  # fmt: skip


def text_model(tiny: bool, size: dict[str, Any] | None = None) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**(size or TEXT), **(SMALL if tiny else {})}))


def vision_model(tiny: bool, size: dict[str, Any] | None = None, depth: int = 8) -> Any:
    """The text layers of above (or of `size`) with the tower of Qwen2.5-VL-3B, `depth` of its 32 layers."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    size = {**(size or TEXT), **(SMALL if tiny else {})}
    text = {**size, "head_dim": size["hidden_size"] // size["num_attention_heads"]}
    sections = [text["head_dim"] // 8, text["head_dim"] * 3 // 16, text["head_dim"] * 3 // 16]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    tower = {
        "depth": 2 if tiny else depth, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "out_hidden_size": size["hidden_size"],
        "fullatt_block_indexes": [1] if tiny else list(range(3, depth, 4)),
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=tower,
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
    )  # fmt: skip
    config.get_text_config().use_cache = False
    return Qwen2_5_VLForConditionalGeneration(config)


def text_sample(length: int, number: int, rows: int) -> dict[str, Any]:
    ids = torch.randint(1, 150000, (length,), generator=torch.Generator().manual_seed(number))
    places = torch.arange(length)
    positions = places if rows == 1 else places.expand(rows, -1)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "sample_id": number}


def image_sample(model: Any, number: int) -> dict[str, Any]:
    """A picture of 16 x 16 patches, 64 tokens, between texts of 40."""
    config, tower = model.config, model.config.vision_config
    text = text_sample(40, number, 1)["input_ids"].tolist()
    grid = torch.tensor([[1, 16, 16]])
    ids = [
        *text,
        config.vision_start_token_id,
        *[config.image_token_id] * 64,
        config.vision_end_token_id,
        *text,
    ]
    row = torch.tensor(ids)
    kinds = (row == config.image_token_id).long()
    positions, _ = model.model.get_rope_index(row[None], mm_token_type_ids=kinds[None], image_grid_thw=grid)
    pixels = torch.randn(256, 3 * tower.temporal_patch_size * tower.patch_size**2)
    return {
        "input_ids": row, "labels": row.clone(), "position_ids": positions[:, 0], "sample_id": number,
        "pixel_values": pixels, "image_grid_thw": grid,
    }  # fmt: skip


def timed(model: Any, packs: Any) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    report = prove(model, packs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, report


def others(ranks: int | None, device: str) -> None:
    """The scripts of the tests, on this machine's devices."""
    tests = Path(__file__).resolve().parents[2] / "tests"
    folders = [str(tests.parent / "src"), str(tests / "train"), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    if ranks is None:
        script = [str(tests / "hosts" / "quantised_run.py"), json.dumps([str(tests / "train")]), device]
        subprocess.run([sys.executable, *script], env=env, check=True)
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    for how in ("ddp", "fsdp", "fully_shard"):
        for what in ("clean", "leak", "nothing"):
            sys.stdout.write(f"{how}, {what}\n")
            sys.stdout.flush()
            script = [str(tests / "train" / "proof_ranks_script.py"), how, what]
            subprocess.run([*launch, *script], env=env, check=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cpu", action="store_true", help="float32 on 2 CPU cores, text only")
    options.add_argument("--tiny", action="store_true", help="two small layers")
    options.add_argument(
        "--quantised", action="store_true", help="what the packages here can make, on the card"
    )
    options.add_argument("--ranks", type=int, help="so many processes, each on a card of its own")
    asked = options.parse_args()
    if asked.quantised or asked.ranks:
        others(asked.ranks, "cpu" if asked.cpu else "cuda")
        return
    device = "cpu" if asked.cpu else "cuda"
    if asked.cpu:
        torch.set_num_threads(2)
    torch.manual_seed(0)
    backends = ("sdpa",) if asked.cpu else ("sdpa", "varlen")
    shapes = {"qwen3 0.5B": (text_model, 1)}
    if not asked.cpu or asked.tiny:
        shapes["qwen2.5-vl"] = (vision_model, 3)
    for shape, (build, rows) in shapes.items():
        model = build(asked.tiny).to(device, torch.float32 if asked.cpu else torch.bfloat16)
        samples = [text_sample(n, i, rows) for i, n in enumerate((180, 320, 90))]
        samples += [image_sample(model, 7)] if rows == 3 else []
        samples = [{**s, "pixel_values": s["pixel_values"].to(next(model.parameters()).dtype)}
                   if "pixel_values" in s else s for s in samples]  # fmt: skip
        for backend in backends:
            if backend == "varlen":
                use_varlen(model)
            first, report = timed(model, [samples])
            second, _ = timed(model, [samples])
            line = {
                "shape": shape, "parameters": sum(p.numel() for p in model.parameters()), "backend": backend,
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "torch": torch.__version__,
                "first_s": round(first, 2), "second_s": round(second, 2), "control": report.control,
                "mode": report.mode, "rows": [(r.check, r.worst, r.limit) for r in report.rows],
            }  # fmt: skip
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        attention = next(m for n, m in model.named_modules() if n.endswith("layers.0.self_attn"))
        forward = type(attention).forward

        def whole_row(self: Any, *args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            kwargs["attention_mask"] = None
            kept = {k: v for k, v in kwargs.items() if not k.startswith(("pack_", "cu_", "max_length"))}
            kept["position_ids"] = None
            return forward(self, *args, **kept)

        if hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("sdpa")
        attention.forward = types.MethodType(whole_row, attention)
        began = time.perf_counter()
        try:
            prove(model, [samples])
            told = "ACCEPTED: a leak was not seen"
        except IsolationError as error:
            told = str(error)
        sys.stdout.write(json.dumps({"patched": shape, "seconds": round(time.perf_counter() - began, 2),
                                     "told": told}) + "\n")  # fmt: skip
        sys.stdout.flush()
        del model


if __name__ == "__main__":
    main()
