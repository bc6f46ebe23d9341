"""What loops of others are compared with: the same samples, each trained alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from host_runs import REPOSITORY

import packtrain as pt

__all__ = ["EXAMPLES", "SETTINGS", "named", "unpacked"]

EXAMPLES = REPOSITORY / "examples"
SETTINGS: dict[str, Any] = {"pack_length": 1024, "samples": 40, "lr": 1e-3}


def unpacked(model_path: Path, rows: Path, steps: list[list[int]], summed: bool = False) -> list[float]:
    """Losses of steps that train each sample alone; `summed`, those of all tokens of the step together."""
    from transformers import AutoModelForCausalLM

    from packtrain.template import HFTemplate, load_processor

    template, source = HFTemplate(load_processor(str(model_path))), pt.open_chats(rows)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS["lr"])
    losses, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # rows this small wait for threads longer than they compute
    for ids in steps:
        total, tokens = torch.zeros(()), 0
        for number in ids:
            sample = template.encode(source[number])
            row, labels = (torch.as_tensor(sample[name])[None] for name in ("input_ids", "labels"))
            count = int((labels[:, 1:] != -100).sum())
            tokens += count
            if count:
                total = total + model(input_ids=row, labels=labels, use_cache=False).loss * count
        (total / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / (1 if summed else tokens))
    torch.set_num_threads(threads)
    return losses


def named(script: str) -> bool:
    """Is the script on the page?"""
    return f"examples/{script}" in (REPOSITORY / "docs" / "own_loop.md").read_text(encoding="utf-8")
