"""The loss of the same samples, packed and one by one: what the report prints side by side.

Sums of token losses over all packs, divided once: packing may change neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..collate import IGNORE, PackBatch, PaddingFreeCollator
from ..data import PackedDataset
from ..planning.align import AlignedPlan
from .attention import check_attention, check_batch
from .loss import bare_model, token_loss_sum
from .probe import moved


@dataclass(frozen=True)
class Comparison:
    """Token-mean loss of the same samples, packed and one by one."""

    packed: float
    unpacked: float
    tokens: int
    samples: int
    packs: int

    @property
    def difference(self) -> float:
        """Packed minus unpacked."""
        return self.packed - self.unpacked


def evaluate_packed_vs_unpacked(
    model: Any,
    dataset: PackedDataset | Sequence[Sequence[Mapping[str, Any]]],
    *,
    most: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Token-mean loss over packs of `dataset`, once packed and once sample by sample.

    Args:
        model: transformers model, cache off.
        dataset: packs of encoded samples; each distinct pack of a plan counts once.
        most: so many packs at most, evenly spaced from the first to the last; None: all.
        progress: called with (packs done, packs in total).

    Raises:
        IsolationError: the setup would let packed samples read each other.
    """
    bare = bare_model(model)
    check_attention(bare)
    collate = PaddingFreeCollator(bare)
    device = next(bare.parameters()).device
    packs = len(dataset)
    if isinstance(dataset, PackedDataset) and isinstance(dataset.packs, AlignedPlan):
        packs = dataset.packs.kept
    was_training = bare.training
    model.eval()
    packed, unpacked, tokens, samples = 0.0, 0.0, 0, 0
    try:
        chosen: Sequence[int] = range(packs)
        if most is not None and packs > most:
            chosen = [place * (packs - 1) // max(1, most - 1) for place in range(most)]
        for done, position in enumerate(chosen, 1):
            members = dataset[position]
            row = collate([members])
            check_batch(row, bare)
            packed += _loss_of(model, row, device)
            for member in members:
                alone = collate([[member]])
                unpacked += _loss_of(model, alone, device)
                tokens += int((alone["labels"] != IGNORE).sum())
            samples += len(members)
            if progress is not None:
                progress(done, len(chosen))
    finally:
        model.train(was_training)
    count = max(1, tokens)
    return Comparison(packed / count, unpacked / count, tokens, samples, len(chosen))


def _loss_of(model: Any, batch: PackBatch, device: torch.device) -> float:
    with torch.no_grad():
        return float(token_loss_sum(model, moved(batch, device)))
