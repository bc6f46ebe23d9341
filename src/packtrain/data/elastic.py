"""A saved position on another number of ranks: where it is in the new order, or why it is nowhere.

The epoch order does not depend on the world size W (law 14): micro step m of W ranks has consumed its
first m*W places. The same places are micro step m*W / W' of W' ranks, as long as an optimizer step
holds the same packs (W * GA = W' * GA') and the packs of the epoch are the same (under `drop_last` the
kept ones depend on W). Where packs are rearranged inside their step (`balance`, plans by steps), the
position must lie between two steps. What cannot go on exactly is refused with the sizes that can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ForeignArtefactError
from ..planning.align import AlignedPlan
from ..planning.balance import BalancedPlan

__all__ = ["carried_step", "sizes_that_work"]

_NAMED = 12  # world sizes that a refusal names


def carried_step(state: Mapping[str, Any], own: Mapping[str, Any], aligned: AlignedPlan) -> int:
    """The micro step of this run at which a position saved by another number of ranks stands.

    Args:
        state: `PackSampler.state_dict()` of the saved run.
        own: that of this run.
        aligned: what this run consumes.

    Raises:
        ForeignArtefactError: the rest of the epoch cannot follow exactly; names the sizes that work.
    """
    was, now = int(state["world_size"]), int(own["world_size"])
    width, consumed = was * int(state["grad_accum"]), int(state["micro_step"]) * was
    plain = aligned.plan.align(was, bool(state["drop_last"])).checksum
    if isinstance(aligned, BalancedPlan) or state["plan"] != plain:
        raise _refused("the plan is balanced for that many ranks", "resume with {was} ranks", was)
    is_over = int(state["micro_step"]) >= int(state["steps"])
    rearranged = [name for name in (state["balance"], own["balance"]) if name is not None]
    if any(not name.startswith("step/") for name in rearranged):
        raise _refused(
            f"balance {rearranged[0]!r} arranges an epoch for {was} ranks", "resume with {was} ranks", was
        )
    able = sizes_that_work(state, aligned)
    works = (
        "these go on exactly: " + ", ".join(f"{w} ranks with grad_accum {width // w}" for w in able)
        if able
        else f"only {was} ranks go on exactly from inside a step"
    )
    if now * int(own["grad_accum"]) != width:
        what = f"a step of the saved run has {width} packs ({was} ranks, grad_accum {state['grad_accum']}), "
        raise _refused(what + f"one of this run {now * int(own['grad_accum'])}", works, was)
    if int(state["packs"]) != aligned.kept and aligned.block == 1:
        what = (
            f"under drop_last an epoch of {was} ranks has {state['packs']} packs, one of {now} {aligned.kept}"
        )
        raise _refused(what, works, was)
    if is_over:
        return aligned.steps
    if consumed % now or (consumed % width and (rearranged or aligned.block > 1)):
        raise _refused(
            f"{consumed % width} of the {width} packs of the current step are consumed", works, was
        )
    return consumed // now


def sizes_that_work(state: Mapping[str, Any], aligned: AlignedPlan) -> list[int]:
    """World sizes that can go on where `state` stands: ascending, at most 12."""
    was = int(state["world_size"])
    width, consumed = was * int(state["grad_accum"]), int(state["micro_step"]) * was
    inside = consumed % width if int(state["micro_step"]) < int(state["steps"]) else 0
    if inside and (state["balance"] is not None or aligned.block > 1):
        return []
    total, kept = len(aligned.plan), int(state["packs"])
    able = []
    for size in range(1, width + 1):
        same_packs = aligned.block > 1 or not state["drop_last"] or total // size * size == kept
        if width % size == 0 and inside % size == 0 and same_packs:
            able.append(size)
    return able if len(able) <= _NAMED else [*able[: _NAMED - 1], able[-1]]


def _refused(what: str, hint: str, was: int) -> ForeignArtefactError:
    return ForeignArtefactError(f"the position was saved by {was} ranks: {what}", hint=hint.format(was=was))
