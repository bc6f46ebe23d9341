"""Who iterates: a shard that would take every W-th of packs that are one rank's already, or a loader ahead.

accelerate's `prepare` and transformers wrap a plain DataLoader so that each rank keeps every W-th of its
batches. Packs of one rank are that share already: the others would be lost. The loaders of the sources
(`RankLoader`) are left alone by both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..errors import InputError

__all__ = ["check_not_sharded", "is_read_ahead"]

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


def is_read_ahead() -> bool:
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
