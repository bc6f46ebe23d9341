"""Isolation on a GPU: small random models of the real classes, packed against alone and tampered.

    python bench/gpu/isolation.py [OUT.json]

Every row is `prove_isolation`: logits, mean loss, gradients (packed against alone, four orders and a pad
tail) and the tamper test (bitwise), on random text and random pixels. A leaking control (positions that
do not restart) must fail. Prints the card, versions and one line per model, backend and dtype.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2] / "tests" / "train")]

from train_samples import VISION, image_sample, text_sample  # noqa: E402

from packtrain.collate import PaddingFreeCollator  # noqa: E402
from packtrain.testing.tiny import tiny_model  # noqa: E402
from packtrain.train import prove_isolation, use_varlen  # noqa: E402

MODELS = ("tiny:qwen3", "tiny:qwen2_5_vl", "tiny:qwen3_vl", "tiny:qwen2_vl")


def samples_of(name: str, model: Any) -> list[dict[str, Any]]:
    if name not in VISION:
        return [text_sample(n, i) for i, n in enumerate((70, 45, 129, 2, 33, 250))]
    grids: list[tuple[tuple[int, int, int], ...]] = [((1, 8, 12),), ((1, 4, 4), (1, 16, 8))]
    pictures = [image_sample(model, 10 + i, grid, text=9) for i, grid in enumerate(grids)]
    return [text_sample(60, 0, rows=3), *pictures, text_sample(9, 3, rows=3)]


def placed(model: Any, backend: str) -> None:
    """The model on a backend."""
    if backend == "varlen":
        use_varlen(model)
    else:
        model.set_attn_implementation(backend)


def wide_text_model() -> Any:
    """Heads of 64: as real models have."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.08}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads, use_cache=False)).eval()


def flex_row(dtype: torch.dtype) -> dict[str, Any]:
    """Rows of 128 tokens and more (flex kernels refuse shorter ones): packed, alone, tampered."""
    made: dict[str, Any] = {"model": "qwen3", "backend": "flex_attention", "dtype": str(dtype)[6:]}
    model = wide_text_model().to("cuda", dtype)
    model.set_attn_implementation("flex_attention")
    samples = [text_sample(n, i) for i, n in enumerate((140, 300, 129, 260))]

    def run(members: list[dict[str, Any]], flat: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
        batch = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in collate([members]).items()}
        labels = batch.pop("labels")[0, 1:]
        if flat:
            batch["position_ids"] = torch.arange(labels.shape[0] + 1, device="cuda")[None]
        logits = model(**batch).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), labels, reduction="sum")
        return logits.detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    collate = PaddingFreeCollator(model)
    try:
        packed, gradients = run(samples)
        alone = [run([sample]) for sample in samples]
        parts = packed.split([s["input_ids"].shape[0] for s in samples])
        tokens = packed.shape[0]
        summed = [sum(grads[1:], grads[0]) for grads in zip(*(g for _, g in alone), strict=True)]
        ids = samples[1]["input_ids"].clone()
        ids[0] += 1
        after, _ = run([samples[0], {**samples[1], "input_ids": ids}, *samples[2:]])
        others = torch.cat([packed[:140], packed[440:]]), torch.cat([after[:140], after[440:]])
        made["logits"] = max(float((a - b[0]).abs().max()) for a, b in zip(parts, alone, strict=True))
        made["gradients"] = max(
            float((a - b).abs().max()) / tokens for a, b in zip(gradients, summed, strict=True)
        )
        made["tamper"] = float((others[0] - others[1]).abs().max())
        leaking, _ = run(samples, flat=True)
        made["control caught"] = float((leaking - packed).abs().max()) > 0.5
    except Exception as error:
        made["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    return made


def row(name: str, backend: str, dtype: torch.dtype) -> dict[str, Any]:
    made: dict[str, Any] = {"model": name, "backend": backend, "dtype": str(dtype).removeprefix("torch.")}
    try:
        cpu = tiny_model(name)
        samples = samples_of(name, cpu)
        model = cpu.to("cuda", dtype)
        placed(model, backend)
        report = prove_isolation(model, samples, (backend,))
        made["ok"], made["leak"] = report.ok, report.first_leak
        for check in ("logits", "loss", "gradients", "tamper"):
            made[check] = max(r.worst for r in report.rows if r.check == check)

        def flat(batch: Any) -> Any:
            moved = torch.arange(batch["input_ids"].shape[1])
            positions = batch["position_ids"].clone()
            positions[(0, 0) if positions.ndim == 3 else (0,)] = moved
            return {**batch, "position_ids": positions}

        control = prove_isolation(model, samples, (backend,), alter=flat, gradients=False)
        made["control caught"] = not control.ok
    except Exception as error:  # a row that cannot run is a result too
        made["ok"], made["leak"] = False, f"{type(error).__name__}: {str(error)[:300]}"
    return made


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    about = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(about, flush=True)
    rows = []
    backends = sys.argv[2].split(",") if len(sys.argv) > 2 else ["varlen", "sdpa", "flex_attention"]
    for backend in backends:
        if backend == "flex_attention":  # the Qwen-VL classes refuse it
            for dtype in (torch.bfloat16, torch.float32):
                rows.append(flex_row(dtype))
                print(rows[-1], flush=True)
            continue
        for name in MODELS:
            for dtype in (torch.bfloat16, torch.float32):
                rows.append(row(name, backend, dtype))
                print(rows[-1], flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
