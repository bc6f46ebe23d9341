"""Evaluation by exact sums: weighted losses and weights are added up over packs and ranks, and divided once.

A mean of the packs' means would weigh a short pack like a full one. Packs that an aligned plan repeats, and
fillers, have no weight, so every sample counts once on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..data import PackSampler
from ..planning.align import AlignedPlan
from .consumed import supervised


class ExactSums:
    """What the packs of one validation plan add up to on one rank, in plan order.

    Args:
        aligned: the validation plan.
        rank: this rank.
    """

    def __init__(self, aligned: AlignedPlan, rank: int) -> None:
        self._kept = aligned.kept
        self._places = iter(PackSampler(aligned, rank, shuffle=False))
        self._sums = torch.zeros(6, dtype=torch.float64)
        self._judged = False

    def counts(self, batch: Any) -> bool:
        """Does the next pack count? Call it once for each: one that is repeated, or a filler, does not."""
        return next(self._places) < self._kept and not getattr(batch, "filler", False)

    def add(self, batch: Any, loss: float, weight: float, hits: float | None = None) -> None:
        """Add a pack.

        Args:
            loss: sum of its weighted token losses.
            weight: sum of the weights.
            hits: tokens that were predicted; None: not looked at.
        """
        self._judged |= hits is not None
        found = [loss, weight, supervised(batch), 1, len(batch.sample_ids), hits or 0]
        self._sums += torch.tensor(found, dtype=torch.float64)

    def metrics(self, prefix: str, summed: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """`<prefix>_loss`, `_tokens` (supervised), `_packs`, `_samples`, `_token_acc` where hits were told.

        Args:
            summed: sums a tensor over the ranks (a collective).
        """
        loss, weights, tokens, packs, samples, hits = summed(self._sums).tolist()
        found: dict[str, float] = {f"{prefix}_loss": loss / weights if weights else 0.0}
        if self._judged:
            found[f"{prefix}_token_acc"] = hits / max(1.0, tokens)
        counts = {"tokens": tokens, "packs": packs, "samples": samples}
        return found | {f"{prefix}_{name}": int(value) for name, value in counts.items()}
