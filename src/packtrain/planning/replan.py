"""A new plan for every epoch: the same packs by size, other samples of equal cost in them.

Epoch 0 is the plan itself. Epoch e > 0 is planned with a seed derived from (the plan's seed, e), so samples
of equal cost change places and nothing else does: same spec, same number of packs, same ledger, same sums
of cost. It costs as much as planning: milliseconds a million samples. What a run has to keep is small:
`state` holds the spec, the digest of the lengths, the epoch and that epoch's checksum, and `resume` plans
again and compares.

Samples of unique cost keep their companions of unique cost. A packer that is itself random, a windowed plan
and a plan by steps would change shape with the seed, and are refused; so is a plan out of which packs were
taken. `EpochPlans` makes the plan of an epoch when it is asked for, for whoever trains on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import extend
from ..checks import whole
from ..errors import ForeignArtefactError, LawError, PlanError, counted
from ._materialise import mix64, seed64
from .build import own_lengths, plan, replay
from .packplan import PackPlan
from .spec import PlanSpec

_STATE = 1


def epoch_seed(seed: int | None, epoch: int) -> int | None:
    """Seed of an epoch's plan: the plan's own in epoch 0, then one derived from both (64 bits)."""
    whole("epoch", epoch, 0, error=PlanError)
    return seed if epoch == 0 else mix64(mix64(seed64(seed or 0)) ^ seed64(epoch))


def replan(base: PackPlan, lengths: Any, epoch: int) -> PackPlan:
    """The plan of an epoch.

    Args:
        base: the plan of epoch 0.
        lengths: the lengths that `base` was made from.
        epoch: 0, 1, ….

    Raises:
        PlanError: the lengths are others, the epoch is negative, or the shape of such a plan depends on
            its seed.
    """
    checked = own_lengths(base, lengths)
    _check_replan(base.spec)
    _check_whole(base)
    seed = epoch_seed(base.spec.seed, epoch)
    if epoch == 0:
        return base
    if "patterns" in base.packer.notes:
        made = replay(base, checked, seed)
    else:
        made = plan(checked, spec=replace(base.spec, seed=seed))
    if len(made) != len(base):
        raise LawError(
            f"the plan of epoch {epoch} has {counted(len(made), 'packs')}, epoch 0 has {len(base)}"
        )
    return made


def state(base: PackPlan, made: PackPlan, epoch: int) -> dict[str, Any]:
    """What is kept to plan this epoch again: plain JSON values."""
    return {
        "version": _STATE,
        "spec": base.spec.to_dict(),
        "lengths_digest": base.lengths_digest,
        "base": base.checksum,
        "epoch": epoch,
        "checksum": made.checksum,
    }


def resume(base: PackPlan, lengths: Any, held: Mapping[str, Any]) -> PackPlan:
    """The plan of the epoch in which `held` (of `state`) was taken.

    Raises:
        ForeignArtefactError: it was taken with another spec, lengths, plan or version; names which.
    """
    epoch = held.get("epoch")
    own = {**state(base, base, 0), "epoch": epoch, "checksum": held.get("checksum")}
    for key, value in own.items():
        if held.get(key) != value:
            raise ForeignArtefactError(
                f"the saved epoch has {key} {_short(held.get(key))}, this plan has {_short(value)}",
                hint="resume with the plan of the saved run, or start anew",
            )
    made = replan(base, lengths, whole("the saved epoch", epoch, 0, error=ForeignArtefactError))
    if made.checksum != held["checksum"]:
        raise ForeignArtefactError(
            f"epoch {epoch} was planned as {held['checksum']!r}, now it is {made.checksum!r}",
            hint="resume with the version of packtrain and its packers that the run began with",
        )
    return made


class EpochPlans:
    """The plans of a run's epochs, each made when it is asked for; the last one is kept.

    Args:
        base: the plan of epoch 0.
        lengths: the lengths that it was made from.

    Raises:
        PlanError: see `replan`.
    """

    def __init__(self, base: PackPlan, lengths: Any) -> None:
        self.base = base
        self.lengths = own_lengths(base, lengths)
        _check_replan(base.spec)
        _check_whole(base)
        self._last = (0, base)

    def plan(self, epoch: int) -> PackPlan:
        """The plan of an epoch."""
        if self._last[0] != epoch:
            self._last = (epoch, replan(self.base, self.lengths, epoch))
        return self._last[1]

    def state(self, epoch: int) -> dict[str, Any]:
        """What is kept to plan the epoch again: plain JSON values."""
        return state(self.base, self.plan(epoch), epoch)

    def resume(self, held: Mapping[str, Any]) -> int:
        """The epoch in which `held` was taken, planned again and compared; raises as `resume` does."""
        self._last = (0, self.base)
        made = resume(self.base, self.lengths, held)
        self._last = (int(held["epoch"]), made)
        return self._last[0]


def _check_whole(base: PackPlan) -> None:
    gone = [name.removeprefix("packs_") for name in base.packer.notes if name.startswith("packs_")]
    if gone:
        raise PlanError(
            f"packs were taken out of the plan ({', '.join(gone)}) and would not be those of another epoch",
            hint="plan without dropping packs, or use the same plan in every epoch",
        )


def _check_replan(spec: PlanSpec) -> None:
    """Refuse specs whose plans change shape with the seed.

    Raises:
        PlanError: names the setting.
    """
    if spec.window is not None:
        reason = f"window={spec.window}"
    elif spec.samples_per_step is not None:
        reason = f"samples_per_step={spec.samples_per_step}"
    elif getattr(extend.lookup("packers", spec.packer), "SEEDED", False):
        reason = f"packer {spec.packer!r}"
    else:
        return
    raise PlanError(
        f"a plan with {reason} changes its shape with the seed and cannot be planned anew every epoch",
        hint="use packer 'auto' without window, or the same plan in every epoch",
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
