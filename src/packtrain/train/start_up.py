"""The isolation proof before the first step, the same for plans, streams and growing directories."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..collate import PaddingFreeCollator, attention_of
from ..errors import IsolationError
from .config import RunConfig
from .loss import bare_model, plain_head, token_loss_sum
from .proof import IsolationReport, proof_samples, prove_isolation

__all__ = ["start_up"]

logger = logging.getLogger(__name__)

Pack = Sequence[Mapping[str, Any]]

#: Models up to this many parameters also compare gradients in the start-up proof.
_GRADIENT_PROOF = 50_000_000


def start_up(
    config: RunConfig, model: Any, proven: bool, sizes: Sequence[int], packs: Callable[[], Sequence[Pack]]
) -> tuple[IsolationReport | None, bool]:
    """The proof on the first packs, and whether the loss may skip the logits.

    Args:
        proven: is this setup known to isolate?
        sizes: samples of each of these packs; none: there is nothing to prove on.
        packs: gives their encoded samples; called only when the proof runs.

    Raises:
        IsolationError: the proof failed, or is needed and switched off.
    """
    bare = bare_model(model)
    fused = plain_head(bare) is not None
    if not config.training.proof:
        logger.warning("the isolation proof is OFF (training.proof: false, --no-proof): nothing is proven")
        if not proven and any(size > 1 for size in sizes):
            raise IsolationError(
                f"nobody has shown that {bare.config.model_type} isolates packed samples on "
                f"{attention_of(bare)}, and training.proof is off",
                hint="set training.proof: true",
            )
        return None, fused
    if not sizes:
        return None, fused
    samples = proof_samples([list(pack) for pack in packs()], bare)
    fused = fused and _fused_holds(bare, samples[0])
    if len(samples) < 2:
        logger.info("start-up proof: one sample in all, nothing can leak")
        return None, fused
    small = sum(parameter.numel() for parameter in bare.parameters()) <= _GRADIENT_PROOF
    report = prove_isolation(bare, samples, (attention_of(bare) or "eager",), gradients=small)
    if not report.ok:
        raise IsolationError(
            f"packed samples read each other: {report.first_leak}",
            hint="use model.attn: sdpa, or train unpacked",
        )
    logger.info("start-up proof: %d comparisons on %d samples hold", len(report.rows), len(samples))
    return report, fused


def _fused_holds(model: Any, sample: Mapping[str, Any]) -> bool:
    """Does the loss through the head alone equal the loss through the model's own logits?"""
    batch = PaddingFreeCollator(model)([[sample]])
    device = next(model.parameters()).device
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    with torch.no_grad():
        short, full = (float(token_loss_sum(model, moved, fused=fused)) for fused in (True, False))
    if abs(short - full) <= 1e-2 * max(1.0, abs(full)):
        return True
    logger.warning("the head of %s is not plain: logits are built for the loss", model.config.model_type)
    return False
