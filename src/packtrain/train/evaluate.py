"""Evaluation by exact sums: weighted losses and weights are added up over packs and ranks, and divided once.

A mean of the packs' means would weigh a short pack like a full one. Packs that an aligned plan repeats, and
fillers, have no weight, so every sample counts once on any number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from ..data import PackedDataset, PackSampler
from .attention import check_batch
from .loss import bare_model, count_correct, token_loss_sum
from .meter import supervised
from .recorded import token_losses
from .reduction import source_names
from .trace import LossTrace

__all__ = ["evaluate_plan"]


def evaluate_plan(trainer: Any, data: PackedDataset, prefix: str) -> dict[str, float]:
    """Metrics of `PackTrainer.evaluate` over one validation plan (a collective).

    With a trace of sources in the trainer also `<prefix>_loss/<source>`, token means. Random states are left
    as they are: what follows is trained as if nothing had been evaluated.
    """
    device = trainer.args.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # a loader draws its seed
        return _evaluated(trainer, data, prefix)


def _evaluated(trainer: Any, data: PackedDataset, prefix: str) -> dict[str, float]:
    aligned: Any = data.packs
    reduction = trainer.reduction.over(data.samples)
    trace = None
    if trainer.trace is not None and trainer.trace.with_means:
        trace = LossTrace(None, *source_names(data.samples))
    trainer.model.eval()
    sums = torch.zeros(6, dtype=torch.float64)
    places = PackSampler(aligned, trainer.rank, shuffle=False)
    for batch, position in zip(trainer.get_eval_dataloader(data), places, strict=True):
        check_batch(batch, bare_model(trainer.model))
        row, weight = reduction.scaled(batch)
        moved = trainer._prepare_inputs(batch.with_values(row))
        with torch.no_grad(), count_correct() as correct, token_losses() as losses:
            total = token_loss_sum(trainer.model, moved, fused=trainer.fused)
        if position >= aligned.kept or batch.filler:
            continue
        hits = float(torch.stack(correct).sum()) if correct else 0.0
        found = [float(total), float(weight), supervised(batch), 1, len(batch.sample_ids), hits]
        sums += torch.tensor(found, dtype=torch.float64)
        if trace is not None:
            trace.add(moved, losses)
            trace.flush(0)
    loss, weights, tokens, packs, samples, hits = trainer.packs_summed(sums).tolist()
    metrics: dict[str, float] = {
        f"{prefix}_loss": loss / weights if weights else 0.0,
        f"{prefix}_token_acc": hits / max(1.0, tokens),
        f"{prefix}_tokens": int(tokens),
        f"{prefix}_packs": int(packs),
        f"{prefix}_samples": int(samples),
    }
    if trace is not None:
        metrics |= {f"{prefix}_{name}": value for name, value in trace.means(trainer.packs_summed).items()}
    return metrics
