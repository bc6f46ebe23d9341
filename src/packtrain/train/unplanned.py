"""What training on packs without a plan shares: growing directories (`lazy`) and streams (`streaming`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..collate import PaddingFreeCollator
from ..data import PackedDataset
from ..errors import ChecksumError, ConfigError
from .config import RunConfig
from .loss import bare_model
from .meter import Meter
from .sft import TrainResult, _last_evaluation, _save
from .trainer import PackTrainer, _Log

from transformers import PrinterCallback, Trainer  # isort: skip
from transformers.trainer_utils import get_last_checkpoint  # isort: skip

__all__ = ["UnplannedTrainer", "asked_checkpoint", "trained"]


class UnplannedTrainer(PackTrainer):
    """PackTrainer over packs that come as they are.

    Args:
        data: the dataset; `stream` from then on.
        eval_data: dataset of an aligned validation plan, several by name, or None.
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
        eval_data: PackedDataset | dict[str, PackedDataset] | None,
        rank: int,
        fused: bool,
        log_file: Path | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.rank, self.fused, self.stream = rank, fused, data
        self.loss_is_scaled_for_ga = True
        self.unsupervised_steps = 0
        self._banner = None
        self._random_from: str | None = None
        Trainer.__init__(
            self,
            model=model,
            args=args,
            data_collator=PaddingFreeCollator(bare_model(model)),
            train_dataset=data,
            eval_dataset=eval_data,
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
        self._random_from = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        return Trainer.train(self, resume_from_checkpoint, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As `PackTrainer`; after a resume the first step has the random numbers it would have had.

        Trainer restores them only where it skips batches itself.
        """
        found = super().get_batch_samples(*args, **kwargs)
        if self._random_from is not None:
            self._load_rng_state(self._random_from)
            self._random_from = None
        return found

    def check_same_plan(self) -> None:
        """Every rank must evaluate by the same validation plans (one collective).

        Raises:
            ChecksumError: the ranks differ.
        """
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        sums = [f"{name} {data.packs.checksum}" for name, data in sets.items() if data is not None]
        if sums:
            self.check_equal(
                f"hold different validation plans: this one {', '.join(sums).strip()}",
                "they read different files; use one shared output folder, or equal inputs on every node",
            )

    def check_equal(self, told: str, hint: str) -> None:
        """Compare one text over all ranks (a collective).

        Raises:
            ChecksumError: "the ranks" and this text.
        """
        mine = int(hashlib.sha256(told.encode()).hexdigest()[:12], 16)
        numbers = self.accelerator.gather(torch.tensor([mine], device=self.args.device)).tolist()
        if len(set(numbers)) > 1:
            raise ChecksumError(f"the ranks {told}", hint=hint)


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
    log_file: Path,
) -> TrainResult:
    """Train, evaluate the end where there are validation samples, keep the model beside its processor, and
    tell the result."""
    trainer.check_same_plan()
    outcome = trainer.train(resume_from_checkpoint=resumed)
    metrics = {"train_loss": float(outcome.training_loss), "steps": trainer.state.global_step}
    metrics.update(_last_evaluation(trainer))
    if trainer.args.save_strategy.value != "no":
        _save(trainer, template, log_file.parent / "model")
    history = [dict(row) for row in trainer.state.log_history]
    return TrainResult(bare_model(trainer.model), history, metrics, trainer.proof, log_file)
