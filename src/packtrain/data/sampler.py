"""PackSampler: the aligned positions of one rank, in consumption order.

Micro step m gives place m*W + r of the epoch order to rank r; the order is computed entry by entry
(`planning.steps`), so a sampler holds no permutation and restores in O(1) at any step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from ..errors import ForeignArtefactError, InputError
from ..planning.align import AlignedPlan
from ..planning.balance import Balance, BalancedPlan, Balancer
from ..planning.replan import EpochPlans
from ..planning.steps import consumption
from ..world import World
from .elastic import carried_step

__all__ = ["PackBatches", "PackSampler"]

_BLOCK = 4096  # micro steps computed at a time
_STATE = 2  # version of the state dictionary


class PackSampler(Sampler[int]):  # type: ignore[misc]
    """Yields this rank's aligned positions. Every rank has the same number of them.

    Args:
        aligned: the view that training consumes; its world size is the number of ranks.
        rank: this rank, 0 <= rank < aligned.world_size.
        seed: seed of the epoch orders.
        shuffle: False: packs come in plan order.
        balance: None, or `step`, `window`, `global` (or a `planning.balance.Balance` with further settings):
            every epoch is balanced anew. With one micro step a step, `step` has nothing to rearrange.
        grad_accum: micro steps per optimizer step; kept in the state, so that a resume can tell.
        cost: what `balance` evens out; see `AlignedPlan.balance`.
        replan: the plans of the epochs (`planning.replan.EpochPlans` of `aligned.plan`): every epoch then
            reads its own plan, of as many packs. `aligned` is the view of the epoch that was set last; give
            the same object to `PackedDataset`, whose `set_epoch` must be called too.

    A balanced plan holds the order of one epoch already: it is read as it is, with shuffle=False.

    A pass starts at micro step 0, the first one after `load_state_dict` where the state stands.
    `micro_step` counts the positions handed out. `set_epoch` chooses the order of the next passes.
    """

    def __init__(
        self,
        aligned: AlignedPlan,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        balance: str | Balance | None = None,
        grad_accum: int = 1,
        *,
        cost: Any = None,
        replan: EpochPlans | None = None,
    ) -> None:
        World(rank, aligned.world_size)
        if grad_accum < 1:
            raise InputError(f"grad_accum is {grad_accum}, expected >= 1")
        if seed < 0:
            raise InputError(f"seed is {seed}, expected >= 0")
        if isinstance(aligned, BalancedPlan) and shuffle:
            raise InputError(
                "the plan is balanced for one epoch, and shuffle=True would undo it",
                hint="use shuffle=False, or PackSampler(plan.align(world_size), balance=…)",
            )
        if cost is not None and (balance is None or isinstance(balance, Balance)):
            raise InputError("cost has no effect here", hint="name a balance mode, or put it into Balance")
        if replan is not None:
            _check_replan(aligned, replan, balance, cost)
        self.aligned = aligned
        self.replan = replan
        self._base = aligned
        self.rank = rank
        self.seed = seed
        self.shuffle = shuffle
        self.grad_accum = grad_accum
        self.epoch = 0
        self.micro_step = 0
        self._start = 0
        if isinstance(balance, str):
            balance = Balance(grad_accum=grad_accum, mode=balance, cost="flops" if cost is None else cost)
        self._balance = balance
        self._balancer = None if balance is None else self._balanced_by(balance)
        if self._balancer is not None and rank == 0:
            self._balancer.warn_of_effect(seed if shuffle else None, 0)

    def _balanced_by(self, settings: Balance) -> Balancer:
        if settings.grad_accum != self.grad_accum:
            raise InputError(
                f"balance has grad_accum {settings.grad_accum}, the sampler {self.grad_accum}",
                hint="give both the same",
            )
        return Balancer(self.aligned, settings)

    def __len__(self) -> int:
        """Micro steps of a whole epoch on this rank, whatever is left of the current one."""
        return self.aligned.steps

    @property
    def begins_at(self) -> int:
        """The micro step at which the next pass begins."""
        return self._start

    def __iter__(self) -> Iterator[int]:
        epoch, start = self.epoch, self._start
        if isinstance(self.aligned, BalancedPlan) and self.aligned.seed is not None:
            self._check_epoch(epoch, self.aligned.epoch)
        self.micro_step = start  # at once: a loader may ask for the state before the first position
        return self._pass((self.aligned, self._balancer), epoch, start)

    def _pass(self, order: tuple[AlignedPlan, Balancer | None], epoch: int, start: int) -> Iterator[int]:
        self._start = 0  # only now: torch's loader with workers makes two iterators and uses the second
        for block in range(start // _BLOCK * _BLOCK, len(self), _BLOCK):
            first = max(start, block)
            positions = self._positions(order, epoch, block, min(len(self), block + _BLOCK))[first - block :]
            for step, position in enumerate(positions.tolist(), start=first):
                self.micro_step = step + 1
                yield position

    def begin_at(self, micro_step: int) -> None:
        """Let the next pass begin at this micro step of the epoch; nothing before it is computed."""
        if not 0 <= micro_step <= len(self):
            raise InputError(f"micro step {micro_step} of {len(self)}")
        self.micro_step = self._start = micro_step

    def batches(self, packs: int) -> PackBatches:
        """This sampler as a batch sampler: `packs` positions at a time (the last batch may be smaller)."""
        return PackBatches(self, packs)

    def _positions(
        self, order: tuple[AlignedPlan, Balancer | None], epoch: int, start: int, stop: int
    ) -> NDArray[np.int64]:
        """This rank's aligned positions at micro steps start..stop-1."""
        aligned, balancer = order
        if balancer is None:
            return consumption(
                aligned,
                self.rank,
                seed=self.seed,
                epoch=epoch,
                shuffle=self.shuffle,
                start=start,
                count=stop - start,
            )
        first = start // self.grad_accum
        ranks = aligned.world_size
        seed = self.seed if self.shuffle else None
        held = balancer.positions(first, -(-stop // self.grad_accum), seed, epoch)
        mine = held.reshape(-1, ranks)[:, self.rank]
        return mine[start - first * self.grad_accum : stop - first * self.grad_accum]

    @staticmethod
    def _check_epoch(asked: int, held: int) -> None:
        if asked != held:
            raise InputError(
                f"the balanced plan holds the order of epoch {held}, not of epoch {asked}",
                hint="use PackSampler(plan.align(world_size), balance=…), which balances every epoch",
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch. Naming another epoch starts it from its first micro step."""
        if epoch < 0:
            raise InputError(f"epoch is {epoch}, expected >= 0")
        if epoch != self.epoch:
            self.epoch, self.micro_step, self._start = epoch, 0, 0
            self._read_plan()

    def _read_plan(self) -> None:
        """Read the plan of the epoch."""
        if self.replan is None:
            return
        self.aligned = self.replan.plan(self.epoch).align(self.aligned.world_size, self.aligned.drop_last)
        if self._balance is not None:
            self._balancer = self._balanced_by(self._balance)

    def state_dict(self, micro_step: int | None = None) -> dict[str, Any]:
        """Where the stream stands.

        Args:
            micro_step: micro steps of this epoch that were really consumed. None: those handed out, which
                is more than consumed when a loader fetches ahead.
        """
        return {
            "version": _STATE,
            "plan": self._base.checksum,
            "raw_plan": self._base.plan.checksum,
            "packs": self._base.kept,
            "drop_last": self._base.drop_last,
            "replan": None if self.replan is None else self.replan.state(self.epoch),
            "epoch": self.epoch,
            "micro_step": self.micro_step if micro_step is None else micro_step,
            "steps": len(self),
            "world_size": self.aligned.world_size,
            "grad_accum": self.grad_accum,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "balance": self._balance_name(),
        }

    def _balance_name(self) -> str | None:
        if self._balancer is None or (self.grad_accum == 1 and self._balancer.settings.mode == "step"):
            return None
        settings = self._balancer.settings
        return "/".join(map(str, (settings.mode, settings.sync, settings.even, self._balancer.cost_name)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` stands; also where another number of ranks saved it (see `data.elastic`).

        Raises:
            ForeignArtefactError: the state belongs to another plan, order or version, or this number of
                ranks cannot go on exactly (the hint names those that can).
        """
        step = self.check_state(state)
        over = step == len(self)  # then the next epoch begins
        self.epoch = int(state["epoch"]) + over
        self.micro_step = self._start = 0 if over else step
        self._read_plan()

    def check_state(self, state: Mapping[str, Any]) -> int:
        """The micro step at which `state` stands; raises as `load_state_dict` does. Nothing is changed."""
        if not isinstance(state, Mapping):
            raise ForeignArtefactError(
                f"the saved position is a {type(state).__name__}, not a mapping",
                hint="give what state_dict() returned",
            )
        own = self.state_dict()
        for key in ("version", "raw_plan", "drop_last", "seed", "shuffle"):
            if state.get(key) != own[key]:
                raise _foreign(key, state.get(key), own[key])
        held = state.get("replan")
        if (held is None) != (self.replan is None):
            raise _foreign("replan", None if held is None else "epoch", "epoch" if held is None else None)
        if held is not None and self.replan is not None and self.replan.resume(held) != state.get("epoch"):
            raise _foreign("epoch", state.get("epoch"), held["epoch"])
        for key, least in (("world_size", 1), ("grad_accum", 1), ("epoch", 0), ("packs", 0)):
            if _whole(state, key) < least:
                raise _foreign(key, state[key], own[key])
        step, steps = _whole(state, "micro_step"), _whole(state, "steps")
        if not 0 <= step <= steps:
            raise ForeignArtefactError(f"the saved position is micro step {step} of {steps}")
        if state["world_size"] != own["world_size"]:
            return carried_step(state, own, self._base)
        for key in ("plan", "grad_accum", "balance", "steps"):
            if state.get(key) != own[key]:
                raise _foreign(key, state.get(key), own[key])
        return step


class PackBatches(Sampler[list[int]]):  # type: ignore[misc]
    """A `PackSampler` as a batch sampler: lists of positions, with the state of the sampler."""

    def __init__(self, sampler: PackSampler, packs: int) -> None:
        if packs < 1:
            raise InputError(f"packs is {packs}, expected >= 1", hint="positions in a batch")
        self.sampler, self.packs = sampler, packs

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.packs)

    def __iter__(self) -> Iterator[list[int]]:
        return _batched(iter(self.sampler), self.packs)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def state_dict(self, micro_step: int | None = None) -> dict[str, Any]:
        return self.sampler.state_dict(micro_step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)


def _batched(positions: Iterator[int], packs: int) -> Iterator[list[int]]:
    while batch := list(itertools.islice(positions, packs)):
        yield batch


def _whole(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ForeignArtefactError(
            f"the saved position has {key} {value!r}, expected an integer",
            hint="the position is damaged: resume from another checkpoint",
        )
    return value


def _foreign(key: str, held: object, own: object) -> ForeignArtefactError:
    return ForeignArtefactError(
        f"the saved position has {key} {held!r}, this run has {own!r}",
        hint="resume with the plan and settings of the saved run, or start anew",
    )


def _check_replan(aligned: AlignedPlan, replan: EpochPlans, balance: Any, cost: Any) -> None:
    if aligned.plan is not replan.base and aligned.plan.checksum != replan.base.checksum:
        raise InputError(
            "replan holds the plans of another run", hint="pass EpochPlans(aligned.plan, lengths)"
        )
    if isinstance(aligned, BalancedPlan):
        raise InputError(
            "the plan is balanced for one epoch and cannot be planned anew",
            hint="use PackSampler(plan.align(world_size), balance=…)",
        )
    given = balance.cost if isinstance(balance, Balance) else cost
    if isinstance(given, np.ndarray):
        raise InputError(
            "a cost for every pack does not hold for the plans of other epochs",
            hint="name a cost, for example 'flops'",
        )
