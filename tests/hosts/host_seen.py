"""What a transformers-based host did with packs, and what its own unpacked losses of the same samples are.

SEEN = watch()         # before the host runs; afterwards SEEN holds
ids        samples of every optimizer step of this rank
losses     what `training_step` gave, of every micro step
alone      (loss, supervised tokens) of every sample alone: the host's own collator and loss, with the
           weights that the step begins with
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import Trainer

from packtrain.train.mixin import PackingMixin

__all__ = ["watch"]


def watch() -> dict[str, list[Any]]:
    """Notes of the run that follows in this process."""
    seen: dict[str, list[Any]] = {"ids": [], "losses": [], "alone": []}
    take, step = PackingMixin.get_batch_samples, Trainer.training_step

    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches, count = take(self, *args, **kwargs)
        ids = [int(number) for batch in batches for number in batch.sample_ids]
        seen["ids"].append(ids)
        seen["losses"].append([])
        seen["alone"].append([_alone(self, self.train_dataset[number]) for number in ids])
        return batches, count

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = step(self, *args, **kwargs)
        seen["losses"][-1].append(float(loss))
        return loss

    PackingMixin.get_batch_samples, Trainer.training_step = get_batch_samples, training_step
    return seen


def _alone(trainer: Any, row: Any) -> list[float]:
    kinds = type(trainer).__mro__
    own = next(kind for kind in kinds if issubclass(kind, Trainer) and not issubclass(kind, PackingMixin))
    with _as_given(trainer), torch.no_grad():
        batch = trainer.data_collator([dict(row)])
        loss = own.compute_loss(trainer, trainer.model, own._prepare_inputs(trainer, dict(batch)))
    return [float(loss), int((batch["labels"][:, 1:] != -100).sum())]


@contextlib.contextmanager
def _as_given(trainer: Any) -> Any:
    """The host's own loss: what packs put in the place of a model's is taken out."""
    func = trainer.compute_loss_func
    if getattr(func, "__module__", "").startswith("packtrain"):
        trainer.compute_loss_func = None
    try:
        yield
    finally:
        trainer.compute_loss_func = func
