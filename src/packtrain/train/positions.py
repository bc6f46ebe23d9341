"""Where a run stands in its packs: told to sampler and samples, saved with checkpoints, checked on resume.

A checkpoint folder gets `packs.json`, the sampler's state: plan, epoch, micro step, and, with
`training.replan`, what names the plan of that epoch. The file makes sure that the packs before the position,
and those that follow, are those of the saved run. Trainer goes on by skipping batches of a new pass; the
batches it skips are placeholders here, so no position is computed and no data are read for them.

All of it works on any transformers.Trainer that has a `PackSampler`: add `Positions`, take the loader's
batches from `TrainBatches`, and call `check_resume` before `train`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler

from .. import files
from ..data import PackedDataset, PackSampler
from ..errors import ConfigError, FormatError
from ..template import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision with its callbacks

from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

__all__ = ["STATE_FILE", "Positions", "TrainBatches", "check_resume"]

logger = logging.getLogger(__name__)

STATE_FILE = "packs.json"


class TrainBatches(Sampler[list[int]]):  # type: ignore[misc]
    """One position a batch; in place of what lies before the sampler's beginning, empty ones to skip."""

    def __init__(self, sampler: PackSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        skipped: Iterator[list[int]] = itertools.repeat([], self.sampler.begins_at)
        return itertools.chain(skipped, ([position] for position in self.sampler))

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


class Positions(TrainerCallback):  # type: ignore[misc]
    """Tells sampler and samples which epoch begins, which Trainer does not, and saves the position.

    Args:
        check: called after a new plan was made, on every rank; raises where ranks differ.
    """

    def __init__(self, sampler: PackSampler, data: PackedDataset, check: Callable[[], None]) -> None:
        self.sampler, self.data, self.check = sampler, data, check
        self._resumed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._resumed = state.global_step > 0
        if self._resumed and args.ignore_data_skip:
            raise ConfigError(
                "ignore_data_skip=True would begin the epoch again and train packs twice",
                hint="leave it out; no data are read to get to a saved position",
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = int((state.epoch or 0) + 1e-6)
        self.sampler.set_epoch(epoch)
        self.data.set_epoch(epoch)
        if self.data.replan is not None and epoch > 0:
            self.check()
            if state.is_world_process_zero:
                logger.info("epoch %d is planned anew: checksum %s", epoch, self.data.plan.checksum)
        if self._resumed:
            self._resumed = False
            self.sampler.begin_at(self._consumed(state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            _remove_other_ranks(folder, args.world_size)
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
        ConfigError: there is no such checkpoint. FormatError: its position cannot be read.
    """
    if checkpoint is True or str(checkpoint).lower() == "true":
        checkpoint = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        if checkpoint is None:
            raise ConfigError(
                f"resume_from_checkpoint is true, {output_dir} holds no checkpoint",
                hint="leave it out to begin, or name a checkpoint folder",
            )
    if not checkpoint:
        return
    if not Path(str(checkpoint)).is_dir():
        raise ConfigError(
            f"there is no checkpoint folder {checkpoint}",
            hint=f"name one, or set it to true for the last one in {output_dir}",
        )
    path = Path(str(checkpoint)) / STATE_FILE
    if path.is_file():
        state = files.read_json(path)
        if not isinstance(state, dict):
            raise FormatError(
                f"{path} holds a {type(state).__name__}, not a position",
                hint="resume from another checkpoint",
            )
        sampler.check_state(state)
    else:
        logger.warning(
            "%s has no %s: it cannot be checked that these are the packs of the saved run",
            checkpoint,
            STATE_FILE,
        )


def _remove_other_ranks(folder: Path, ranks: int) -> None:
    """Random states that a run with more ranks left under the name of this checkpoint."""
    for path in sorted(folder.glob("rng_state_*.pth")):
        number = path.stem.removeprefix("rng_state_")
        if number.isdigit() and int(number) >= ranks:
            files.remove(path)
