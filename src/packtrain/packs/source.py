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

from torch.utils.data import IterableDataset, get_worker_info

from ..collate import PaddingFreeCollator
from ..errors import InputError, counted
from ..planning.align import AlignedPlan
from ..planning.balance import Balance
from ..planning.packplan import PackPlan
from ..planning.replan import EpochPlans
from ..world import World, node, world
from .exported import ChunkedPacks, ShardedPacks
from .handed_out import SharedEpoch
from .loader import PackLoader, PackSampler
from .pack import Pack
from .packed import PackedDataset


# --------------------------------------------------------------------------------------------
# PlannedSource: the packs of a plan in the order of training, from samples or from an export
# --------------------------------------------------------------------------------------------
# One object owns the dataset, its sampler, the plan, the epoch and the plans of other epochs,
# so that they cannot disagree.
class PlannedSource(IterableDataset[Pack]):  # type: ignore[misc]
    """Packs of one rank over a plan. Picklable as its dataset is.

    Samples that listen to `set_epoch`, wrapped or not, follow it; those that move otherwise are refused.
    One process of each machine compares the bytes of a stored plan with its checksum (ChecksumError).

    Args:
        data: PackedDataset, ShardedPacks or ChunkedPacks; a raw plan is aligned for the world size.
        rank, world_size: None: the aligned plan's world size, else from the launcher.
        seed, shuffle, balance, grad_accum, replan: see `PackSampler`.
        drop_last: of the alignment, where `data` is over a raw plan.
    """

    state_file = "packs.json"
    per_rank_state = False

    def __init__(
        self,
        data: Any,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        balance: str | Balance | None = None,
        grad_accum: int = 1,
        replan: EpochPlans | None = None,
        drop_last: bool = False,
        cost: Any = None,
    ) -> None:
        self.kind = "planned" if isinstance(data, PackedDataset) else "exported"
        data.check_still()
        view = data.packs if isinstance(data, PackedDataset) else data.aligned
        if isinstance(view, AlignedPlan):
            if world_size not in (None, view.world_size):
                raise InputError(
                    f"world_size is {world_size}, the packs are "
                    f"aligned for {counted(view.world_size, 'ranks')}",
                    hint="give the dataset the raw plan, or plan.align(world_size)",
                )
        else:
            view = data.plan.align(world(rank, world_size).size, drop_last)
            data = data.over(view)
        replan = replan if replan is not None else getattr(data, "replan", None)
        if replan is not None and self.kind == "exported":
            raise InputError("an export holds the packs of one plan, replan makes others every epoch")
        if replan is not None and data.replan is None:
            data = data.over(view)
            data.replan = replan
        self.data = data
        self.samples = getattr(data, "samples", None)  # by the ids that packs hold
        self._chosen = SharedEpoch()
        # In a loader's worker: its own next micro step, and whether the source stands at it.
        self._next: int | None = None
        self._is_own = False
        self.sampler = PackSampler(view, rank, seed, shuffle, balance, grad_accum, cost=cost, replan=replan)
        if node(World(self.rank, self.world_size)).rank == 0:
            data.plan.verify_stored()

    @property
    def rank(self) -> int:
        return self.sampler.rank

    @property
    def world_size(self) -> int:
        return self.aligned.world_size

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def aligned(self) -> AlignedPlan:
        """The view of the current epoch."""
        return self.sampler.aligned  # type: ignore[no-any-return]

    @property
    def plan(self) -> PackPlan:
        """The raw plan of the current epoch."""
        return self.aligned.plan  # type: ignore[no-any-return]

    @property
    def pack_length(self) -> int:
        return int(self.plan.spec.pack_length)

    @property
    def begins_at(self) -> int:
        return self.sampler.begins_at

    def __len__(self) -> int:
        """Micro steps of a pass on this rank."""
        return len(self.sampler)

    def __getitem__(self, position: int) -> Pack:
        """The pack at an aligned position."""
        return self.data[position]  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Pack]:
        chosen = self._chosen.news()
        if chosen is not None:
            self.sampler.set_epoch(chosen)
            self._follow()
            self._is_own = False
        start, (mine, of) = self.begins_at, self._share()
        self._is_own, self._next = False, start + mine
        return self._pass(enumerate(iter(self.sampler), start), start + mine, of)

    def _pass(self, steps: Iterator[tuple[int, int]], first: int, of: int) -> Iterator[Pack]:
        epoch = self.epoch
        for step, position in steps:
            if step >= first and (step - first) % of == 0:
                self._next = step + of
                yield self._pack(step, position)
                self.sampler.check_pass(epoch)

    def _share(self) -> tuple[int, int]:
        """Of a loader's worker: steps from where the source stands to its own first one, and between two."""
        info = get_worker_info()
        if info is None:
            return 0, 1
        return 0 if self._is_own else info.id, info.num_workers

    def _pack(self, step: int, position: int) -> Pack:
        pack = self[position]
        pack.slot = step * self.world_size + self.rank
        return pack

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._chosen.choose(epoch)
        self.sampler.set_epoch(epoch)
        self._follow()

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        if step is None and get_worker_info() is not None:
            step = min(len(self), self.begins_at + self._share()[0] if self._next is None else self._next)
        return self.sampler.state_dict(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)
        self._next, self._is_own = None, get_worker_info() is not None
        self._follow()

    def _follow(self) -> None:
        """The samples, where they listen, and the plan follow the sampler's epoch."""
        if isinstance(self.data, PackedDataset):
            self.data.set_epoch(self.sampler.epoch)

    def check_state(self, state: Mapping[str, Any]) -> None:
        self.sampler.check_state(state)

    def check_equal(self) -> str:
        """What every rank must have alike."""
        return f"{self.aligned.checksum} {self.sampler.seed} {self.sampler.shuffle} {self.epoch}"

    def acknowledge(self, state: Mapping[str, Any] | None = None) -> None:
        """Nothing waits for it."""

    def peek(self, count: int) -> list[Pack]:
        steps = range(self.begins_at, min(len(self), self.begins_at + count))
        positions = self.sampler.positions(steps.start, steps.stop).tolist()
        return [self._pack(step, position) for step, position in zip(steps, positions, strict=True)]

    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> PackLoader:
        return PackLoader(self.data, self.sampler, 1, collate, num_workers=num_workers, **options)


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


def is_sized(source: Any) -> bool:
    """Does Trainer count in passes (epochs) of this source? What grows is read once, in steps."""
    if source.kind == "growing":
        return False
    try:
        return len(source) >= 0
    except TypeError:
        return False


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
    return data  # type: ignore[no-any-return]


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
