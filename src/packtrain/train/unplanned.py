"""What training on packs without a plan shares: growing directories (`lazy`) and streams (`streaming`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..collate import PaddingFreeCollator
from ..errors import ConfigError
from .config import RunConfig
from .loss import bare_model
from .meter import Meter
from .proof import IsolationReport
from .sft import TrainResult, _save
from .trainer import PackTrainer, _Log

from transformers import PrinterCallback, Trainer  # isort: skip
from transformers.trainer_utils import get_last_checkpoint  # isort: skip

__all__ = ["UnplannedTrainer", "asked_checkpoint", "trained"]


class UnplannedTrainer(PackTrainer):
    """PackTrainer over packs that come as they are.

    Args:
        data: the dataset; `stream` from then on.
        pack_length: tokens of a full pack.
        stand: callback that saves where the data stand.
        rank, fused, log_file, progress: as `PackTrainer`.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        data: Any,
        pack_length: int,
        stand: Any,
        *,
        rank: int,
        fused: bool,
        log_file: Path | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.rank, self.fused, self.stream = rank, fused, data
        self.loss_is_scaled_for_ga = True
        self.unsupervised_steps = 0
        self._banner = None
        Trainer.__init__(
            self,
            model=model,
            args=args,
            data_collator=PaddingFreeCollator(bare_model(model)),
            train_dataset=data,
            callbacks=[stand, _Log(log_file, progress)],
        )
        self.meter = Meter(pack_length, self._summed)
        self.remove_callback(PrinterCallback)
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"{self.args.n_gpu} GPUs in one process", hint="start one process per GPU with torchrun"
            )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`: there is no sampler to check, the checkpoint's position was read before."""
        return Trainer.train(self, resume_from_checkpoint, *args, **kwargs)


def asked_checkpoint(config: RunConfig) -> str | None:
    """The checkpoint that `training.resume_from_checkpoint` names; true: the last one of the run.

    Raises:
        ConfigError: the run has none.
    """
    asked = config.training.trainer.get("resume_from_checkpoint")
    if asked is True or asked == "True":
        folder = config.training.output_dir
        asked = get_last_checkpoint(folder) if Path(folder).is_dir() else None
        if asked is None:
            raise ConfigError(f"{folder} holds no checkpoint", hint="remove training.resume_from_checkpoint")
    return str(asked) if asked else None


def trained(
    trainer: UnplannedTrainer,
    template: Any,
    resumed: str | None,
    proof: IsolationReport | None,
    log_file: Path,
) -> TrainResult:
    """Train, keep the model beside its processor, and tell the result."""
    outcome = trainer.train(resume_from_checkpoint=resumed)
    metrics = {"train_loss": float(outcome.training_loss), "steps": trainer.state.global_step}
    if trainer.args.save_strategy.value != "no":
        _save(trainer, template, log_file.parent / "model")
    history = [dict(row) for row in trainer.state.log_history]
    return TrainResult(bare_model(trainer.model), history, metrics, proof, log_file)
