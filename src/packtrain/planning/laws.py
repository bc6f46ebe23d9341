"""Laws 1-3 checked on a finished plan: partition, capacity, canonical order.

Vectorised and in a few passes, so that `verify` can afford it on a plan of any size. It shares no code
with the planner.
"""

from __future__ import annotations

import numpy as np

from ..errors import LawError, counted
from .lengths import Lengths
from .packplan import PackPlan


def check_laws(plan: PackPlan, lengths: Lengths | None = None) -> None:
    """LawError when the plan breaks a law; with `lengths` also capacity and the origin are checked."""
    offsets, indices = np.asarray(plan.offsets), np.asarray(plan.indices)
    per_step = _steps(plan) if plan.spec.samples_per_step is not None else None
    _order(offsets, indices, per_step)
    read = len(indices) + len(plan.ledger)
    if lengths is not None and read != len(lengths):
        raise LawError(
            f"{len(indices)} packed + {len(plan.ledger)} in the ledger, but {len(lengths)} were read"
        )
    seen = np.zeros(read, dtype=np.uint8)
    for ids in (indices, plan.ledger.ids):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < read:
            raise LawError(f"sample id {int(ids.max())} of {counted(read, 'samples')} that were read")
        seen[ids] += 1
    if len(ids := np.flatnonzero(seen != 1)):
        raise LawError(f"sample {int(ids[0])} is packed or in the ledger {int(seen[ids[0]])} times, not once")
    if lengths is not None:
        _capacity(plan, lengths)


def check_sums(plan: PackPlan) -> None:
    """Capacity from the plan alone: the tokens of every pack of two or more samples fit pack_length.

    Weaker than `check_laws` with lengths: later padding and other limits are not seen.
    """
    over = (np.diff(plan.offsets) > 1) & (np.asarray(plan.pack_tokens) > plan.spec.pack_length)
    if bool(over.any()):
        pack = int(np.flatnonzero(over)[0])
        raise LawError(
            f"pack {pack} holds {int(plan.pack_tokens[pack])} tokens, the cap is {plan.spec.pack_length}"
        )
    if plan.certificate.bound > len(plan):
        raise LawError(
            f"the lower bound {plan.certificate.bound} is above the {counted(len(plan), 'packs')} of the plan"
        )


def _order(offsets: np.ndarray, indices: np.ndarray, per_step: int | None) -> None:
    sizes = np.diff(offsets)
    if len(sizes) and int(sizes.min()) < 1:
        raise LawError(f"pack {int(np.argmin(sizes))} is empty")
    if len(indices) < 2:
        return
    rises = np.diff(indices.astype(np.int64)) > 0
    inside = np.ones(len(rises), dtype=bool)
    inside[offsets[1:-1] - 1] = False
    if not bool(rises[inside].all()):
        raise LawError("sample ids do not ascend inside a pack")
    first = indices[offsets[:-1]].astype(np.int64)
    rises = np.diff(first) > 0
    if per_step is not None:
        rises[per_step - 1 :: per_step] = True  # a step begins anew
    if not bool(rises.all()):
        raise LawError("packs do not ascend by their smallest sample id")


def _steps(plan: PackPlan) -> int:
    """Packs of a step, after the check that every step has as many samples and packs as it must have."""
    batch, packs = plan.spec.samples_per_step, plan.spec.packs_per_step
    if batch is None or packs is None:
        raise LawError("the plan was made by steps, but does not say how many packs a step has")
    per_step = min(packs, batch)
    ends = np.asarray(plan.offsets)[::per_step]
    full = len(plan.indices) // batch
    wanted = np.arange(full + 1, dtype=np.int64) * batch
    if not np.array_equal(ends[: full + 1], wanted):
        at = int(np.argmax(ends[: full + 1] != wanted[: len(ends)])) if len(ends) > full else len(ends) - 1
        raise LawError(f"step {max(0, at - 1)} does not hold {counted(batch, 'samples')}")
    rest = len(plan.indices) % batch
    if len(plan) != full * per_step + min(packs, rest):
        raise LawError(f"{counted(len(plan), 'packs')} are not steps of {counted(per_step, 'packs')}")
    if rest and plan.spec.last_step == "drop":
        raise LawError(f"the last step holds {counted(rest, 'samples')}, not {batch}")
    return per_step


def _capacity(plan: PackPlan, lengths: Lengths) -> None:
    m, cap = plan.spec.multiple_of, plan.spec.pack_length
    if len(plan) == 0:
        return
    starts = np.asarray(plan.offsets)[:-1]
    shared = np.diff(np.asarray(plan.offsets)) > 1
    tokens = lengths.tokens[np.asarray(plan.indices)].astype(np.int64)
    totals = np.add.reduceat(-(-tokens // m) * m, starts)
    over = np.flatnonzero(shared & (totals > cap))
    if len(over):
        raise LawError(f"pack {int(over[0])} holds {int(totals[over[0]])} tokens, pack_length is {cap}")
    if not np.array_equal(np.add.reduceat(tokens, starts), plan.pack_tokens):
        raise LawError("pack_tokens differ from the sums of the lengths")
    for name, limit in plan.spec.limits.items():
        held = np.add.reduceat(lengths.costs[name][np.asarray(plan.indices)].astype(np.int64), starts)
        over = np.flatnonzero(shared & (held > limit))
        if len(over):
            raise LawError(f"pack {int(over[0])} holds {int(held[over[0]])} {name}, the limit is {limit}")
    most = plan.spec.max_samples
    if most is not None and int(np.diff(np.asarray(plan.offsets)).max()) > most:
        raise LawError(f"a pack holds more than max_samples={most}")
