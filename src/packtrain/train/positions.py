"""Where a run stands in its packs: told to sampler and samples, saved with checkpoints, checked on resume.

A checkpoint folder gets `packs.json`, the sampler's state: plan, epoch, micro step, and, with
`training.replan`, what names the plan of that epoch. Trainer itself skips to the step; the file makes sure
that the packs it skips, and those that follow, are those of the saved run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from .. import files
from ..data import PackedDataset, PackSampler

__all__ = ["STATE_FILE", "Positions", "check_resume"]

logger = logging.getLogger(__name__)

STATE_FILE = "packs.json"


class Positions(TrainerCallback):  # type: ignore[misc]
    """Tells sampler and samples which epoch begins, which Trainer does not, and saves the position.

    Args:
        check: called after a new plan was made, on every rank; raises where ranks differ.
    """

    def __init__(self, sampler: PackSampler, data: PackedDataset, check: Callable[[], None]) -> None:
        self.sampler, self.data, self.check = sampler, data, check

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = int((state.epoch or 0) + 1e-6)
        self.sampler.set_epoch(epoch)
        self.data.set_epoch(epoch)
        if self.data.replan is not None and epoch > 0:
            self.check()
            if state.is_world_process_zero:
                logger.info("epoch %d is planned anew: checksum %s", epoch, self.data.plan.checksum)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            files.publish_json(
                folder / STATE_FILE, self.sampler.state_dict(self._consumed(state.global_step))
            )

    def _consumed(self, steps: int) -> int:
        """Micro steps of the sampler's epoch that the first `steps` steps of the run have consumed."""
        micro, accum = len(self.sampler), self.sampler.grad_accum
        steps -= self.sampler.epoch * -(-micro // accum)
        return min(micro, steps * accum)


def check_resume(sampler: PackSampler, checkpoint: str | bool | None, output_dir: str) -> None:
    """Refuse to resume from a checkpoint of other packs, before anything is trained.

    Args:
        checkpoint: as Trainer's `resume_from_checkpoint`; True: the last one in `output_dir`.

    Raises:
        ForeignArtefactError: names what differs.
    """
    if checkpoint is True or checkpoint == "True":
        checkpoint = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    if not checkpoint:
        return
    path = Path(str(checkpoint)) / STATE_FILE
    if path.is_file():
        sampler.check_state(files.read_json(path))
