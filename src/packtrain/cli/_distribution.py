"""The view of lengths against a pack length, and the phases of a `diverse` plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..planning.distribution import distribution, phases_of
from ..planning.lengths import STATUS_OK, Lengths
from ..planning.packplan import PackPlan
from ._app import emit
from ._show import table

__all__ = ["show_distribution"]


def show_distribution(folder: Path, kind: str, pack_length: int | None, as_json: bool) -> None:
    """Print the view of a lengths or plan folder.

    Raises:
        InputError: a lengths folder has no pack length of its own, a plan no other.
    """
    phases: dict[str, Any] = {}
    if kind == "lengths":
        if pack_length is None:
            raise InputError("lengths have no pack length", hint="add --pack-length N")
        lengths = Lengths.load(folder)
    else:
        from ..pipeline.length_files import lengths_of

        plan = PackPlan.load(folder)
        if pack_length not in (None, plan.spec.pack_length):
            raise InputError(f"the plan has packs of {plan.spec.pack_length}", hint="leave --pack-length out")
        pack_length = plan.spec.pack_length
        phases = phases_of(plan)
        lengths = lengths_of(folder)
    usable = np.asarray(lengths.tokens)[np.asarray(lengths.status) == STATUS_OK]
    view = {**distribution(usable, pack_length), "phases": phases}
    if as_json:
        emit(view)
        return
    table(f"Lengths in {folder} against packs of {pack_length:,}", rows_of(view))


def rows_of(view: dict[str, Any]) -> dict[str, str]:
    """The view as text."""
    rows = {
        "samples": f"{view['samples']:,} of {view['distinct_lengths']:,} distinct lengths",
        "tokens": f"{view['tokens']:,}",
    }
    for row in view["classes"]:
        bar = "█" * max(1, round(row["share"] * 40))
        rows[f"  {row['class']}"] = f"{row['samples']:>12,} {row['share']:>7.1%} {bar}"
    rows["over half a pack"] = f"{view['over_half']['samples']:,} ({view['over_half']['share']:.1%})"
    powers = view["powers_of_two"]
    rows["powers of two"] = (
        f"{powers['samples']:,} ({powers['share']:.1%}) of {len(powers['lengths'])} lengths"
    )
    for name, told in view["phases"].items():
        keys = ("packs", "samples", "tokens", "fill")
        rows[f"phase {name}"] = ", ".join(f"{key} {told[key]}" for key in keys)
    return rows
