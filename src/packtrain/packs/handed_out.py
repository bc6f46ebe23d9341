"""Who iterates a source and how far it was read: the one rule for states of every kind of source.

A state comes from who did the work. Packs that this process read itself stand in the source; packs that a
loader's workers read are counted as they leave the loader of the source (`source.loader`). Otherwise
a state would silently be that of the beginning, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..errors import InputError

# --------------------------------------------------------------------------------------------
# Who iterates: a shard that would take every W-th of packs that are one rank's already, or a loader ahead
# --------------------------------------------------------------------------------------------
# accelerate's `prepare` and transformers wrap a plain DataLoader so that each rank keeps every W-th of its
# batches. Packs of one rank are that share already: the others would be lost. The loaders of the sources
# (`RankLoader`) are left alone by both.
_SHARDS = ("BatchSamplerShard", "IterableDatasetShard")
_DISPATCHER = "DataLoaderDispatcher"
_AHEAD = (
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    "accelerate.data_loader:DataLoaderShard",
    "accelerate.data_loader:DataLoaderDispatcher",
)


def check_not_sharded(world_size: int) -> None:
    """Call it where one rank's packs begin to be read.

    Args:
        world_size: ranks that the packs are shared by; with 1 they may be dealt out by anybody.

    Raises:
        InputError: who iterates keeps a part of the packs alone.
    """
    if world_size == 1:
        return
    for reader in _readers():
        name = type(reader).__name__
        if (name in _SHARDS and _processes(reader) > 1) or (
            name == _DISPATCHER and _processes(getattr(reader, "state", None)) > 1
        ):
            who = type(reader).__module__.partition(".")[0]
            raise InputError(
                f"{who} would share one rank's packs among the ranks once more, and lose the others",
                hint="give it the source's own loader: source.loader(collate), or PackLoader(data, sampler)",
            )


def _is_read_ahead() -> bool:
    """Does a loader iterate that fetches before training asks (workers, or accelerate's look for the end)?"""
    return any(f"{type(one).__module__}:{type(one).__name__}" in _AHEAD for one in _readers())


def _readers() -> Iterator[Any]:
    """The objects whose methods are running, the inner ones first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            yield frame.f_locals.get("self")
        frame = frame.f_back


def _processes(reader: Any) -> int:
    """Of accelerate's shards and of those of transformers."""
    return int(getattr(reader, "num_processes", 1))


# --------------------------------------------------------------------------------------------
# An epoch that also reaches loader workers which run already
# --------------------------------------------------------------------------------------------
# `persistent_workers` keep the copy of the dataset that they were started with, so a plain attribute set in
# the main process never gets there and every epoch would have the order of the first. Two numbers in shared
# memory do.
class SharedEpoch:
    """The last epoch that was chosen, in whichever process. Survives being sent to a worker."""

    def __init__(self) -> None:
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()  # epoch, times it was chosen
        self._seen = 0

    def choose(self, epoch: int) -> None:
        self._shared[0] = epoch
        self._shared[1] += 1
        self._seen = int(self._shared[1])

    @property
    def is_missed(self) -> bool:
        """Did another process choose an epoch since this one last knew?"""
        return int(self._shared[1]) != self._seen

    def news(self) -> int | None:
        """The epoch that another process chose since this one last knew; None: no other."""
        if not self.is_missed:
            return None
        self._seen = int(self._shared[1])
        return int(self._shared[0])


# --------------------------------------------------------------------------------------------
# How far a source was read, and by whom
# --------------------------------------------------------------------------------------------
class HandedOut:
    """Micro steps of a pass that left the source; knows of its copies in other processes (shared memory)."""

    def __init__(self, hint: str) -> None:
        self.hint = hint  # what gives a state where this process did not read
        # reads of copies in other processes
        self._elsewhere = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._seen = 0
        self._from = 0
        self._given: int | None = None  # None: nobody counts
        self._ahead: str | None = None  # who takes packs before training asks for them

    def restart(self) -> None:
        """This process chose where the source stands: an epoch, a state, a pass of its own."""
        self._seen, self._given, self._ahead = int(self._elsewhere[0]), None, None

    def begin_pass(self) -> None:
        """A pass begins, in whichever process: call it where the packs are asked for."""
        self.read()
        if get_worker_info() is None:
            self.restart()
            self._ahead = "a loader fetches" if _is_read_ahead() else None

    def begin(self, step: int) -> None:
        """A loader of the source begins a pass at this micro step and counts what leaves it."""
        self.restart()
        self._from, self._given = step, 0

    def add(self, steps: int, last: int | None = None) -> None:
        """So many micro steps left the loader; none behind `last`."""
        given = (self._given or 0) + steps
        self._given = given if last is None else min(given, last - self._from)

    def read(self) -> None:
        """Packs are read by this process; says so to the others where it is a loader's worker."""
        if get_worker_info() is not None:
            self._elsewhere += 1

    def deal(self) -> None:
        """Packs of all ranks are dealt out by another loader, which runs ahead of training."""
        self._ahead = "another loader deals out"

    def step(self, own: int) -> int:
        """The micro step behind what was handed out.

        Args:
            own: the one that this process came to itself.

        Raises:
            InputError: other processes read, or a loader fetched ahead, and nobody counted.
        """
        if self._given is not None:
            return self._from + self._given
        elsewhere = get_worker_info() is None and int(self._elsewhere[0]) != self._seen
        if self._ahead or elsewhere:
            who = self._ahead or "the workers of a loader read"
            raise InputError(
                f"{who} the packs: this process does not know how far they were used", hint=self.hint
            )
        return own
