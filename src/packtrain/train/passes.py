"""What a Trainer iterates: the packs of a `PackSource`, batch by batch, from where the source stands.

Trainer resumes by skipping batches of a new pass. The batches it skips are placeholders here: a source goes
on by its own state, so nothing is read or computed for what was trained before.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

logger = logging.getLogger(__name__)


class Passes(IterableDataset[Any]):  # type: ignore[misc]
    """Batches of one pack each.

    Args:
        source: a `PackSource`.
        collate: list of one pack -> batch.
        options: further arguments of the source's loader (`num_workers`, `pin_memory`, …).

    Attributes:
        skipped: placeholders that the next pass begins with.
    """

    def __init__(self, source: Any, collate: Any, options: dict[str, Any]) -> None:
        self.source, self.collate, self.options = source, collate, options
        self.skipped = 0
        self._loader: Any = None

    def __iter__(self) -> Iterator[Any]:
        skipped, self.skipped = self.skipped, 0
        if self._loader is None:
            self._loader = self.source.loader(self.collate, **self.options)
        return itertools.chain(itertools.repeat(None, skipped), self._loader)


class SizedPasses(Passes):
    """Passes of a source that knows how many micro steps each has."""

    def __len__(self) -> int:
        return len(self.source)


def is_sized(source: Any) -> bool:
    """Does Trainer count in passes (epochs) of this source? What grows is read once, in steps."""
    if source.kind == "growing":
        return False
    try:
        return len(source) >= 0
    except TypeError:
        return False


def pass_loader(source: Any, collate: Any, options: dict[str, Any]) -> DataLoader[Any]:
    """`Passes` as the DataLoader that Trainer wants; it reads nothing ahead, the source's own loader may."""
    made = (SizedPasses if is_sized(source) else Passes)(source, collate, options)
    own_numbers = torch.Generator()  # else each pass would draw from the run's random state
    return DataLoader(made, batch_size=None, collate_fn=_as_it_is, generator=own_numbers)


def replans(source: Any) -> bool:
    """Is every epoch planned anew?"""
    return getattr(getattr(source, "data", None), "replan", None) is not None


#: Settings of TrainingArguments that have no effect beside packs: the value they have then, and why.
_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "dataloader_persistent_workers": (False, "workers of every pass start anew, and see its epoch"),
    "group_by_length": (False, "packs have equal lengths"),
    "ignore_data_skip": (False, "a saved position is restored without reading data"),
}


def tell_without_effect(source: Any, args: Any) -> None:
    """One warning line for the settings of `args` that packs of this source leave without effect."""
    without = dict(_WITHOUT_EFFECT)
    if is_sized(source):
        without.pop("ignore_data_skip")  # refused there: Trainer would begin the epoch again
    found = [
        f"{name}={getattr(args, name)!r} ({why})"
        for name, (value, why) in without.items()
        if getattr(args, name, value) != value
    ]
    if found:
        logger.warning("no effect beside packs: %s", "; ".join(found))


def loader_options(args: Any, start: str) -> dict[str, Any]:
    """Arguments of a loader of packs, from `TrainingArguments`; its workers are started for each pass.

    Args:
        start: how workers start where `args` do not say. Ours are spawned: tokenizers do not survive a fork.
    """
    workers = args.dataloader_num_workers
    options: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
    }
    if workers:
        context = getattr(args, "dataloader_multiprocessing_context", None)  # since transformers 5
        options["multiprocessing_context"] = context or start
        options["prefetch_factor"] = args.dataloader_prefetch_factor
    return options


def _as_it_is(batch: Any) -> Any:
    return batch
