"""Run by two ranks: `torchrun accelerate_run.py SPEC.json`; what `examples/accelerate_loop.py` trained.

spec: example, arguments of its `main` (words, options), report; leak: attention that forgets the boundaries.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)


def leak() -> None:
    """Attention that reads the whole row, as a patched model may."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def whole(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})

    AttentionInterface.register("sdpa", whole)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec.get("leak"):
        leak()
    os.environ["ACCELERATE_USE_CPU"] = "true"  # `accelerate launch --cpu` says so
    example: Any = runpy.run_path(spec["example"])["main"]
    trained, ids = example.__globals__["loss_sum"], []

    def loss_sum(model: Any, batch: Any) -> Any:
        ids.append([int(number) for number in batch.sample_ids])
        return trained(model, batch)

    example.__globals__["loss_sum"] = loss_sum
    losses = example(*spec["words"], **spec["options"])
    path = Path(spec["report"])
    seen = {"losses": losses, "ids": ids}
    path.with_name(f"{path.name}.{os.environ['RANK']}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
