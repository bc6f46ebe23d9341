"""EpochOrder: what comes when. The packs that every rank takes at every micro step of every epoch.

    plan ──align──► positions ──epoch order──► places: micro step m gives place m*W + r to rank r

An `AlignedPlan` numbers the packs for W ranks; an `EpochOrder` puts its positions into the order of an epoch:
a seeded permutation of the distinct packs (of the steps, where the plan was made by steps of samples),
computed entry by entry in O(1) memory: no rank holds the whole order, and it does not depend on W.
Repeated packs and a partial step follow at the end. `balance` then rearranges packs, `replan` gives every
epoch a plan of its own. All is a pure function of (plan, settings, seed, epoch, step): `balance` mode `step`
needs only the step itself, `window` its 64 micro steps, `global` holds the order of all packs.

Resume: an order does not depend on W, so m micro steps of W ranks have consumed its first m*W places, which
are micro step m*W / W' of W' ranks, as long as an optimizer step holds the same packs (W * GA = W' * GA') and
the epoch holds the same ones (under `drop_last` they depend on W). Where packs are rearranged inside their
step, the position must lie between two steps. What cannot go on exactly is refused with the sizes that can.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..checks import divisors, whole
from ..errors import ForeignArtefactError, InputError, PlanError, UnknownNameError, counted
from ..extend import I64
from ..files import digest_json, reading
from ..packers._jit import use_jit
from ..world import World
from .balance import WINDOW, Balance, cut, deal
from .costs import costs_of
from .permutation import Permutation
from .raw_plan import RawPlan

logger = logging.getLogger(__name__)

_STATE = 2  # version of a saved position
_NAMED = 12  # world sizes that a refusal names
_MOST = 1 << 20  # ranks, and micro steps of a step, of a saved position


class View(Protocol):
    """A plan for (world_size, drop_last), as `align.AlignedPlan`."""

    plan: Any  # a PackPlan
    world_size: int
    drop_last: bool
    multiple: int

    def __len__(self) -> int: ...
    def pack_ids_at(self, positions: I64) -> I64: ...
    def check_epoch(self, epoch: int) -> None: ...
    @property
    def block(self) -> int: ...
    @property
    def shuffled(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def checksum(self) -> str: ...
    @property
    def is_balanced(self) -> bool: ...


class PlansOfEpochs(Protocol):
    """A plan for every epoch, as `replan.EpochPlans`."""

    base: Any

    def plan(self, epoch: int) -> Any: ...
    def state(self, epoch: int) -> dict[str, Any]: ...
    def resume(self, held: Mapping[str, Any]) -> int: ...


@dataclass(slots=True)
class _Epoch:
    """The view of an epoch; what its packs cost, where they are rearranged."""

    number: int
    aligned: View
    costs: I64 | None = None
    cost_name: str = ""
    ahead: NDArray[np.bool_] | None = None  # packs that come before others in their step
    whole: tuple[int, I64] | None = None  # (epoch, its order), for modes that arrange all of it


def seed_in_use(seed: int, shuffle: bool, balance: str | Balance | None = None, replan: Any = None) -> int:
    """`seed`, or 0 where nothing of an order depends on it: for a seed that is of other things, too."""
    mode = balance.mode if isinstance(balance, Balance) else balance
    return seed if shuffle or replan is not None or mode not in (None, "step") else 0


class EpochOrder:
    """The order in which ranks consume a plan, epoch by epoch.

    Args:
        aligned: the view of the first epoch; a balanced one is read as it is, with shuffle=False.
        seed: of the permutations.
        shuffle: False: plan order.
        grad_accum: micro steps per optimizer step.
        balance: None, a mode of `Balance`, or a `Balance` with the same `grad_accum`.
        cost: what a mode evens out; None: flops.
        replan: the plans of the epochs (`replan.EpochPlans` of `aligned.plan`), of as many packs each.

    Attributes:
        width: places of an optimizer step.
        micro_steps, steps: of an epoch on each rank; the last optimizer step may have fewer micro steps.

    Raises:
        InputError, PlanError, UnknownNameError: settings that cannot hold together.
    """

    def __init__(
        self,
        aligned: View,
        *,
        seed: int = 0,
        shuffle: bool = True,
        grad_accum: int = 1,
        balance: str | Balance | None = None,
        cost: Any = None,
        replan: PlansOfEpochs | None = None,
    ) -> None:
        whole("grad_accum", grad_accum, 1, 1 << 31)
        whole("seed", seed, 0)
        if aligned.is_balanced and (shuffle or balance is not None):
            why, hint = "already", "balance plan.align(world_size)"
            if balance is None:
                why = "for one epoch, and shuffle=True would undo it"
                hint = "use shuffle=False, or PackSampler(plan.align(world_size), balance=…)"
            raise InputError(f"the plan is balanced {why}", hint=hint)
        if cost is not None and (balance is None or isinstance(balance, Balance)):
            logger.warning(
                "cost has no effect without a balance mode, and beside a Balance, which has its own"
            )
        self._asked = isinstance(balance, str)  # hosts and files, whose default it is, give a Balance
        if isinstance(balance, str):
            balance = Balance(grad_accum=grad_accum, mode=balance, cost="flops" if cost is None else cost)
        self.aligned, self.seed, self.shuffle = aligned, seed, shuffle
        self.grad_accum, self.balance, self.replan = grad_accum, balance, replan
        self.width = aligned.world_size * grad_accum
        self.micro_steps = aligned.steps
        self.steps = -(-len(aligned) // self.width)
        if replan is not None:
            self._check_replan(replan)
        if balance is not None:
            self._check_balance(balance)
        self._held = self._read(0, aligned)

    def _check_balance(self, balance: Balance) -> None:
        if balance.grad_accum != self.grad_accum:
            raise InputError(
                f"balance has grad_accum {balance.grad_accum}, the order {self.grad_accum}",
                hint="give both the same",
            )
        block, ranks = self.aligned.block, self.aligned.world_size
        if block == 1 or (balance.mode == "step" and block == self.width):
            return
        why = f"mode {balance.mode!r} would mix the samples of the steps this plan was made by"
        hint = "use mode='step'"
        if balance.mode == "step":
            has = f"{counted(block, 'packs')} for {counted(ranks, 'ranks')}"
            why = f"grad_accum is {self.grad_accum}, but a step of this plan has {has}"
            hint = f"use grad_accum={block // ranks}"
        raise PlanError(why, hint=hint)

    def _check_replan(self, replan: PlansOfEpochs) -> None:
        plan = self.aligned.plan
        if plan is not replan.base and plan.checksum != replan.base.checksum:
            why, hint = "replan holds the plans of another run", "pass EpochPlans(aligned.plan, lengths)"
        elif self.aligned.is_balanced:
            why = "the plan is balanced for one epoch and cannot be planned anew"
            hint = "use plan.align(world_size), and balance=…"
        elif self.balance is not None and isinstance(self.balance.cost, np.ndarray):
            why = "a cost for every pack does not hold for the plans of other epochs"
            hint = "name a cost, for example 'flops'"
        else:
            return
        raise InputError(why, hint=hint)

    def _read(self, number: int, aligned: View) -> _Epoch:
        if self.balance is None:
            return _Epoch(number, aligned)
        costs, name = costs_of(aligned.plan, self.balance.cost)
        even, ahead = self.balance.even, None
        if even is not None:
            if even not in aligned.plan.pack_costs:
                raise UnknownNameError("cost of the plan", even, list(aligned.plan.pack_costs))
            ahead = np.asarray(aligned.plan.pack_costs[even]) > 0
        return _Epoch(number, aligned, costs, name, ahead)

    def _of(self, epoch: int) -> _Epoch:
        if self.replan is not None and self._held.number != epoch:
            plan = self.replan.plan(epoch)
            view = self.aligned
            self._held = self._read(epoch, plan.align(view.world_size, view.drop_last, view.multiple))
        return self._held

    @property
    def cost_name(self) -> str:
        """Name of the cost that is evened out, as it stands in checksums."""
        return self._held.cost_name

    def view(self, epoch: int) -> View:
        """The view of an epoch: what the positions mean."""
        return self._of(epoch).aligned

    def at(self, places: I64, epoch: int) -> I64:
        """Aligned positions at int64[k] places of the epoch's order, before `balance`.

        Distinct packs are permuted, or steps where the plan was made by steps of samples; the repeats (or the
        partial step) behind them stay where they are.
        """
        out: I64 = np.array(places, dtype=np.int64)
        block, blocks = self.aligned.block, self.aligned.shuffled
        if not self.shuffle or blocks == 0:
            return out
        inside = out < blocks * block
        order, moved = Permutation(blocks, self.seed, epoch), out[inside]
        out[inside] = order.map(moved) if block == 1 else order.map(moved // block) * block + moved % block
        return out

    def of_steps(self, start: int, stop: int, epoch: int) -> I64:
        """Aligned positions of optimizer steps start..stop-1 in the order they are consumed (int64, flat)."""
        first, last = start * self.width, min(stop * self.width, len(self.aligned))
        of = self._of(epoch)
        if self.balance is not None and self.balance.mode != "step":
            if of.whole is None or of.whole[0] != epoch:
                of.whole = (epoch, self._sorted_runs(of, epoch))
            return of.whole[1][first:last]
        positions = self.at(np.arange(first, last, dtype=np.int64), epoch)
        if self.balance is None or self.grad_accum == 1:
            return positions
        full = len(positions) // self.width * self.width
        parts = [self._arranged(of, positions[:full].reshape(-1, self.width))] if full else []
        if full < len(positions):
            parts.append(self._arranged(of, positions[full:][None, :]))
        return np.concatenate(parts) if parts else positions

    def of_rank(self, rank: int, epoch: int, start: int = 0, stop: int | None = None) -> I64:
        """Aligned positions that `rank` takes at micro steps start..stop-1 of an epoch (None: to its end)."""
        ranks = self.aligned.world_size
        World(rank, ranks)  # refuses what is no position
        stop = self.micro_steps if stop is None else min(stop, self.micro_steps)
        if start < 0:
            raise InputError(f"micro steps {start} to {stop} of {self.micro_steps}")
        if self.balance is None:
            return self.at(np.arange(start, max(start, stop), dtype=np.int64) * ranks + rank, epoch)
        first = start // self.grad_accum
        held = self.of_steps(first, -(-stop // self.grad_accum), epoch).reshape(-1, ranks)[:, rank]
        return held[start - first * self.grad_accum : stop - first * self.grad_accum]

    def packs(self, rank: int, epoch: int, start: int = 0, stop: int | None = None) -> I64:
        """Raw pack ids of `of_rank`; -1: a filler."""
        return self.view(epoch).pack_ids_at(self.of_rank(rank, epoch, start, stop))

    def costs_at(self, positions: I64, epoch: int) -> I64:
        """Cost of the packs at aligned positions; 0 for fillers."""
        return self._costs(self._of(epoch), positions)

    def _costs(self, of: _Epoch, positions: I64) -> I64:
        assert of.costs is not None, "an order without balance has no costs"
        packs = of.aligned.pack_ids_at(positions)
        return np.where(packs < 0, 0, of.costs[packs])

    def _arranged(self, of: _Epoch, positions: I64) -> I64:
        assert self.balance is not None
        costs = self._costs(of, positions.reshape(-1)).reshape(positions.shape)
        ranks, ahead = self.aligned.world_size, None
        if self.balance.sync == "step":
            order = deal(costs, ranks, use_jit(len(of.aligned.plan.indices)))
        else:
            if of.ahead is not None:
                packs = of.aligned.pack_ids_at(positions.reshape(-1))
                ahead = np.where(packs < 0, False, of.ahead[packs]).reshape(positions.shape)
            order = cut(costs, ranks, ahead)
        return np.take_along_axis(positions, order, axis=1).reshape(-1)

    def _sorted_runs(self, of: _Epoch, epoch: int) -> I64:
        """Sorted by cost inside each window (or all), cut into runs of one micro step, runs shuffled."""
        ranks, total = self.aligned.world_size, len(self.aligned)
        size = total if self.balance is None or self.balance.mode == "global" else WINDOW * ranks
        seed = self.seed if self.shuffle else 0
        out = np.empty(total, dtype=np.int64)
        for number, start in enumerate(range(0, total, size)):
            stop = min(total, start + size)
            positions = self.at(np.arange(start, stop, dtype=np.int64), epoch)
            down = np.argsort(-self._costs(of, positions), kind="stable")
            runs = positions[down].reshape(-1, ranks)
            mixed = Permutation(len(runs), seed + (number << 64), epoch)
            out[start:stop] = runs[mixed.map(np.arange(len(runs), dtype=np.int64))].reshape(-1)
        return out

    def samples_per_step(self, epoch: int = 0, *, balanced: bool = True) -> I64:
        """Samples of every full optimizer step (all steps, when none is full)."""
        view = self.view(epoch)
        sizes = np.append(np.diff(np.asarray(view.plan.offsets)), 0)  # -1, a filler, holds none
        places = np.arange(len(view), dtype=np.int64)
        order = self.of_steps(0, self.steps, epoch) if balanced else self.at(places, epoch)
        held = sizes[view.pack_ids_at(order)]
        full = len(held) // self.width * self.width
        found: I64 = held[:full].reshape(-1, self.width).sum(axis=1) if full else held.sum(keepdims=True)
        return found

    @property
    def is_seeded(self) -> bool:
        """Whether anything depends on the seed."""
        return seed_in_use(1, self.shuffle, self.balance, self.replan) == 1

    def warn_without_effect(self) -> None:
        """Say which settings that were asked for change nothing."""
        if self._asked and self.balance is not None and self.balance.mode == "step":
            if self.aligned.world_size == 1:
                logger.warning("balance step has no effect on one rank: it spreads a step over the ranks")
            elif self.grad_accum == 1:
                logger.warning("balance step has no effect with one micro step a step (grad_accum 1)")
        if self.seed and not self.is_seeded:
            logger.warning("seed %d has no effect without shuffle: packs come in plan order", self.seed)

    def warn_of_effect(self, epoch: int = 0) -> None:
        """Say what `window` and `global` do to the samples per step."""
        if self.balance is None or self.balance.mode == "step":
            return
        before, after = (self.samples_per_step(epoch, balanced=balanced) for balanced in (False, True))
        logger.warning(
            "balance mode %r moves packs between steps: samples per step %.1f (sd %.1f) become "
            "%.1f (sd %.1f)",
            self.balance.mode, before.mean(), before.std(), after.mean(), after.std(),
        )  # fmt: skip

    # -- where a run stands ------------------------------------------------------------------------
    def state(self, epoch: int, micro_step: int) -> dict[str, Any]:
        """A position: micro step `micro_step` of an epoch, as plain JSON values. The same on every rank."""
        return {
            **self._own(),
            "replan": None if self.replan is None else self.replan.state(epoch),
            "epoch": epoch,
            "micro_step": micro_step,
        }

    def _own(self) -> dict[str, Any]:
        """What a position must agree with."""
        return {
            "version": _STATE,
            "plan": self.aligned.checksum,
            "raw_plan": self.aligned.plan.checksum,
            "packs": self.aligned.kept,
            "drop_last": self.aligned.drop_last,
            "steps": self.micro_steps,
            "world_size": self.aligned.world_size,
            "grad_accum": self.grad_accum,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "balance": self._balance_name(),
        }

    def _balance_name(self) -> str | None:
        held = self.balance
        if held is None or (self.grad_accum == 1 and held.mode == "step"):
            return None
        return "/".join(map(str, (held.mode, held.sync, held.even, self.cost_name)))

    def resume(self, state: Any) -> tuple[int, int]:
        """(epoch, micro step) at which to go on: behind an epoch, the next one. Raises as `check_state`."""
        step = self.check_state(state)
        over = step == self.micro_steps
        return int(state["epoch"]) + over, 0 if over else step

    def check_state(self, state: Any) -> int:
        """The micro step of this order at which `state` stands, also where other ranks saved it.

        Raises:
            ForeignArtefactError: the state belongs to another plan, order or version, or this number of
                ranks cannot go on exactly (the hint names those that can).
            FormatError: the state was edited or damaged.
        """
        with reading("the saved position", "what state_dict() gave", "resume from another checkpoint"):
            return self._checked(state)

    def _checked(self, state: Any) -> int:
        if not isinstance(state, Mapping):
            raise ForeignArtefactError(
                f"the saved position is a {type(state).__name__}, not a mapping",
                hint="give what state_dict() returned",
            )
        own = self._own()
        keys = ("version", "raw_plan", "drop_last", *(["seed"] if self.is_seeded else []), "shuffle")
        _refuse_other(state, own, keys)
        self._check_epoch(state)
        counts = {"world_size": 1, "grad_accum": 1, "epoch": 0, "packs": 0}
        for key, least in counts.items():
            most = _MOST if least else math.inf
            if not least <= _whole(state, key) <= most:
                raise _foreign(key, state[key], own.get(key))
        step, steps = _whole(state, "micro_step"), _whole(state, "steps")
        if not 0 <= step <= steps:
            raise ForeignArtefactError(f"the saved position is micro step {step} of {steps}")
        if state["world_size"] != own["world_size"]:
            return self._carried(state, own)
        _refuse_other(state, own, ("plan", "grad_accum", "balance", "steps"))
        return step

    def _check_epoch(self, state: Mapping[str, Any]) -> None:
        """Both have a plan for every epoch, or neither, and the same one."""
        held = state.get("replan")
        if (held is None) != (self.replan is None):
            raise _foreign("replan", None if held is None else "epoch", "epoch" if held is None else None)
        if held is not None and self.replan is not None and self.replan.resume(held) != state.get("epoch"):
            raise _foreign("epoch", state.get("epoch"), held["epoch"])

    def _carried(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> int:
        """The micro step of this order at which a position saved by another number of ranks stands."""
        view, was, now = self.aligned, int(state["world_size"]), self.aligned.world_size
        width, consumed = was * int(state["grad_accum"]), int(state["micro_step"]) * was
        # whole steps hold the same packs on any number of ranks
        whole = 1 if view.multiple == 1 else int(state["grad_accum"])
        plain = view_checksum(view.plan, was, view.drop_last, whole)
        rearranged = [name for name in (state["balance"], own["balance"]) if name is not None]
        others = [name for name in rearranged if not name.startswith("step/")]
        ranks, hint = counted(was, "ranks"), f"resume with {counted(was, 'ranks')}"
        if view.is_balanced or state["plan"] != plain:
            what = "the plan is balanced for that many ranks"
        elif others:
            what = f"balance {others[0]!r} arranges an epoch for {ranks}"
        else:
            hint = self._sizes_that_work(state)
            if self.width != width:
                saved = f"({ranks}, grad_accum {state['grad_accum']}), one of this run {self.width}"
                what = f"a step of the saved run has {counted(width, 'packs')} {saved}"
            elif int(state["packs"]) != view.kept and view.block == 1:
                saved = f"{counted(state['packs'], 'packs')}, one of {now} {view.kept}"
                what = f"under drop_last an epoch of {ranks} has {saved}"
            elif int(state["micro_step"]) >= int(state["steps"]):
                return self.micro_steps
            elif consumed % now or (consumed % width and (rearranged or view.block > 1)):
                what = f"{consumed % width} of the {counted(width, 'packs')} of the current step are consumed"
            else:
                return consumed // now
        raise ForeignArtefactError(f"the position was saved by {ranks}: {what}", hint=hint)

    def _sizes_that_work(self, state: Mapping[str, Any]) -> str:
        """World sizes that can go on where `state` stands, for people: ascending, at most 12."""
        was, view = int(state["world_size"]), self.aligned
        width, consumed = was * int(state["grad_accum"]), int(state["micro_step"]) * was
        inside = consumed % width if int(state["micro_step"]) < int(state["steps"]) else 0
        total, kept = len(view.plan), int(state["packs"])
        any_size = view.block > 1 or view.multiple > 1 or not state["drop_last"]
        able = [
            size
            for size in divisors(width)
            if inside % size == 0 and (any_size or total // size * size == kept)
        ]
        if not able or (inside and (state["balance"] is not None or view.block > 1)):
            return f"only {counted(was, 'ranks')} go on exactly from inside a step"
        able = able if len(able) <= _NAMED else [*able[: _NAMED - 1], able[-1]]
        told = ", ".join(f"{counted(size, 'ranks')} with grad_accum {width // size}" for size in able)
        return f"these go on exactly: {told}"


def view_checksum(plan: RawPlan, world_size: int, drop_last: bool, multiple: int = 1) -> str:
    """SHA-256 (hex) over (plan checksum, world_size, drop_last), and `multiple` where it is not 1."""
    more = {} if multiple == 1 else {"grad_accum": multiple}
    return digest_json({"plan": plan.checksum, "world_size": world_size, "drop_last": drop_last, **more})


def _whole(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ForeignArtefactError(
            f"the saved position has {key} {value!r}, expected an integer",
            hint="the position is damaged: resume from another checkpoint",
        )
    return value


def _refuse_other(state: Mapping[str, Any], own: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if state.get(key) != own[key]:
            raise _foreign(key, state.get(key), own[key])


def _foreign(key: str, held: object, own: object) -> ForeignArtefactError:
    return ForeignArtefactError(
        f"the saved position has {key} {held!r}, this run has {own!r}",
        hint="resume with the plan and settings of the saved run, or start anew",
    )
