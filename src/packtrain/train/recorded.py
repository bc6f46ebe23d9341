"""What a loss computes on the way: hits and the loss of every target, for whoever asks.

    with token_losses() as losses, count_correct() as hits:
        total = token_loss_sum(model, batch)

Trade-off: the state is the module's, so one training loop a process; the losses then reach the caller through
any wrapper (DDP, FSDP, PEFT) without another output of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["count_correct", "note", "token_losses"]

_hits: list[torch.Tensor] | None = None
_losses: list[torch.Tensor] | None = None


@contextlib.contextmanager
def count_correct() -> Iterator[list[torch.Tensor]]:
    """Inside, every loss adds to the list how many of its targets were the likeliest token (0-d int64)."""
    global _hits
    before, _hits = _hits, []
    try:
        yield _hits
    finally:
        _hits = before


@contextlib.contextmanager
def token_losses() -> Iterator[list[torch.Tensor]]:
    """Inside, every loss adds the loss of its supervised targets, in row order, without weights ([K])."""
    global _losses
    before, _losses = _losses, []
    try:
        yield _losses
    finally:
        _losses = before


def note(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor | None = None) -> None:
    """logits [K,V], targets [K] without ignored ones, losses [K]; called by the losses themselves.

    Call it once with the logits and without losses, and once with both or the losses alone later.
    """
    if _hits is not None and losses is None:
        _hits.append((logits.argmax(-1) == targets).sum())
    if _losses is not None and losses is not None:
        _losses.append(losses.detach())
