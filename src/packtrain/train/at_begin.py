"""The start-up proof in a `Trainer`: when training begins, on the model as it was wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..template import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision with its callbacks

from transformers import TrainerCallback  # noqa: E402

from .start_up import StartUpReport, prove_before_training  # noqa: E402

__all__ = ["ProofAtBegin"]


class ProofAtBegin(TrainerCallback):  # type: ignore[misc]
    """Proves isolation when training begins; refuses by raising.

    Args:
        trainer: a transformers Trainer.
        packs: gives the first packs of this rank.
        found: gets the report.
        options: further arguments of `prove_before_training`.
    """

    def __init__(
        self,
        trainer: Any,
        packs: Callable[[], Any],
        found: Callable[[StartUpReport | None], None] = lambda report: None,
        **options: Any,
    ) -> None:
        self.trainer, self.packs, self.found, self.options = trainer, packs, found, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found(prove_before_training(self.trainer.model_wrapped, self.packs, **self.options))
