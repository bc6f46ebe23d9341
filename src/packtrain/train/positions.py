"""Names of earlier versions for a Trainer of your own: `PackingMixin` before its class is all it needs now.

    class Mine(PackingMixin, Trainer): ...
    trainer.packs_start(pack_source(data))

What is here does the same from a `PackSampler`, through `standing`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from torch.utils.data import Sampler

from ..data import PackedDataset, PackSampler
from ..packs.source import PlannedSource
from .resume import Standing, checkpoint_of, load_position

_STATE_FILE = PlannedSource.state_file


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


class Positions(Standing):
    """`Standing` of a sampler and its samples.

    Args:
        check: called after a new plan was made, on every rank; raises where ranks differ.
    """

    def __init__(self, sampler: PackSampler, data: PackedDataset, check: Callable[[], None]) -> None:
        packs = PlannedSource(data, rank=sampler.rank)
        packs.data, packs.sampler = data, sampler
        passes = SimpleNamespace(skipped=0)  # `TrainBatches` has the placeholders
        super().__init__(
            SimpleNamespace(packs=packs, packs_passes=passes, packs_loaded=False, packs_same=check)
        )


def check_resume(sampler: PackSampler, checkpoint: str | bool | None, output_dir: str) -> None:
    """Refuse to resume from a checkpoint of other packs, before anything is trained; see `checkpoint_of`."""
    packs = _Checked(sampler)
    load_position(packs, checkpoint_of(packs, checkpoint, output_dir))


class _Checked:
    """A sampler as a source whose state is looked at and stays."""

    kind, state_file, per_rank_state = "planned", _STATE_FILE, False

    def __init__(self, sampler: PackSampler) -> None:
        self.sampler = sampler
        self.rank, self.check_state = sampler.rank, sampler.check_state

    def __len__(self) -> int:
        return len(self.sampler)

    def load_state_dict(self, state: Any) -> None:
        """Trainer skips to the position."""
