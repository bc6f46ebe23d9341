"""PackSource: where packs come from, as one contract, and `pack_source`, the one door to it.

    source = pack_source(PackedDataset(plan, samples, encode))   # or an export, a directory, a stream
    for batch in source.loader(PaddingFreeCollator(model), num_workers=2):
        ...
    state = source.state_dict()

    planned        PackedDataset: samples are encoded as they are read
    exported       ShardedPacks, ChunkedPacks
    growing        LazyShardedDataset
    stream         StreamingPackedDataset
    token_budget   TokenBudgetDataset

A state comes only from who did the work: `loader` counts the batches that left it, and a source that was
read by workers of another loader says so instead of giving its beginning (`handed_out.HandedOut`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ..collate import PaddingFreeCollator
from ..errors import InputError
from ..planning.balance import Balance
from ..planning.replan import EpochPlans
from .exported import ChunkedPacks, ShardedPacks
from .pack import Pack
from .packed import PackedDataset
from .planned import PlannedSource

logger = logging.getLogger(__name__)

KINDS = ("planned", "exported", "growing", "stream", "token_budget")

_OF_SOURCE = {"rank", "world_size", "seed", "shuffle", "balance", "grad_accum", "replan"}


class PackSource(Protocol):
    """Packs of one rank.

    Attributes:
        kind: one of `KINDS`.
        state_file: name of its state in a checkpoint; `{rank}` stands for the rank.
        per_rank_state: every rank writes its own state; `ranks_of(state)` says how many did, and
            `load_state_dict` takes a list of those of all.
        pack_length: tokens of a full pack.
        rank, world_size: this reader among all.
        epoch: of the pass that begins next, or runs.
        begins_at: micro step of the pass at which the next iteration begins (above 0 behind a loaded state).
    """

    kind: str
    state_file: str
    per_rank_state: bool
    pack_length: int
    rank: int
    world_size: int
    epoch: int

    @property
    def begins_at(self) -> int: ...

    def __iter__(self) -> Iterator[Pack]:
        """This rank's packs, from where the source stands to the end of the pass."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. Another one begins at its first pack."""

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """The state behind `step` micro steps of this pass; None: behind what was handed out."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass begins where `state` stands."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would; change nothing."""

    def acknowledge(self, state: Mapping[str, Any] | None = None) -> Any:
        """A checkpoint with this state is on disk; None: with all that was handed out."""

    def peek(self, count: int) -> list[Pack]:
        """The next packs of this rank; nothing moves."""

    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> Any:
        """A DataLoader of batches of one pack each, with the state of this source."""


def is_packs(data: Any) -> bool:
    """Does this hold packs (a dataset of any kind, or a source)?"""
    return isinstance(data, PackedDataset | ShardedPacks | ChunkedPacks) or _is_source(data)


def _is_source(data: Any) -> bool:
    # By class: an instance check would ask for `pack_length`, which waits for a directory to begin.
    return all(hasattr(type(data), name) for name in ("state_file", "loader", "check_state", "peek"))


def pack_source(
    data: Any,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    balance: str | Balance | None = None,
    grad_accum: int = 1,
    replan: EpochPlans | None = None,
) -> PackSource:
    """The source over a dataset of any kind.

    Args:
        data: one of the datasets of `packtrain.data`, over a raw or an aligned plan, or a source.
        rank, world_size: None: from the launcher, or what `data` was made for.
        seed, shuffle, balance, grad_accum, replan: of the epoch orders over a plan, see `PackSampler`.

    Raises:
        InputError: it is no dataset of packs, or was made for another rank.
    """
    if isinstance(data, PackedDataset | ShardedPacks | ChunkedPacks):
        return PlannedSource(
            data,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
            balance=balance,
            grad_accum=grad_accum,
            replan=replan,
        )
    if not _is_source(data):
        raise InputError(
            f"a {type(data).__name__} is no source of packs",
            hint="use PackedDataset(plan, samples, encode), open_packs(folder), LazyShardedDataset(folder)",
        )
    for name, asked, own in (("rank", rank, data.rank), ("world_size", world_size, data.world_size)):
        if asked is not None and asked != own:
            raise InputError(f"{name} is {asked}, the dataset was made for {own}", hint="give both the same")
    source: PackSource = data
    return source


def loader(
    source: Any, *, model: Any = None, num_workers: int = 0, collate: Any = None, **options: Any
) -> Any:
    """Batches of one pack each, and the one object that owns order, epoch and state of what it reads.

    Args:
        source: a dataset of packs of any kind, or a `PackSource`.
        model: what consumes the batches, see `PaddingFreeCollator`.
        num_workers: processes that read or encode.
        collate: list of one pack -> batch; None: `PaddingFreeCollator(model)`.
        options: those of `pack_source`, for a dataset over a plan, and those of a DataLoader.

    Returns:
        A DataLoader with `set_epoch`, `state_dict` and `load_state_dict`.
    """
    order = {name: options.pop(name) for name in _OF_SOURCE & options.keys()}
    packs = pack_source(source, **order)
    idle = sorted(order.keys() - {"rank", "world_size"})
    if packs is source and idle:
        logger.warning("%s: no effect on packs whose order is made (%s)", ", ".join(idle), packs.kind)
    collate = PaddingFreeCollator(model) if collate is None else collate
    return packs.loader(collate, num_workers=num_workers, **options)
