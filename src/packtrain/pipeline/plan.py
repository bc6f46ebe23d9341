"""Plan measured lengths into a plan folder, with the share of dropped samples checked first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..planning.build import plan
from ..planning.lengths import STATUS_OK, Lengths
from ..planning.packplan import PackPlan
from .alone import alone
from .publish import details, origin_of, refuse_other_kind
from .truncated import truncated_rows

__all__ = ["check_drops", "ledger_rows", "plan_lengths"]

#: Samples named in the message of a plan that drops too many.
_SHOWN = 5


def plan_lengths(
    lengths: Lengths,
    out: str | Path | None,
    *,
    lengths_folder: str | Path | None = None,
    min_fill_ratio: float | None = None,
    max_drop_fraction: float | None = None,
    overwrite: bool = False,
    **options: Any,
) -> PackPlan:
    """`packtrain.plan`, checked and saved.

    Args:
        lengths: what to plan.
        out: the plan folder; None: nothing is written. A folder that holds another plan is refused.
        lengths_folder: where `lengths` lie; kept as the plan's origin.
        min_fill_ratio: drop packs that are filled less, into the ledger (`under_filled`); None = none.
        max_drop_fraction: refuse a plan that leaves out a larger share of the samples.
        options: keyword arguments of `packtrain.plan`.

    Returns:
        The plan, memory-mapped from `out`.

    Raises:
        PlanError: an option cannot hold, no pack results, or too many samples are left out.
        ForeignArtefactError: `out` holds another plan.
        InputError: another process plans into `out`.
    """
    if max_drop_fraction is not None and not 0 <= max_drop_fraction <= 1:
        raise PlanError(f"max_drop_fraction is {max_drop_fraction}, expected 0 to 1", hint="0.01 is 1 %")
    if out is not None:
        refuse_other_kind(out, "plan.json")
    with contextlib.nullcontext() if out is None else alone(Path(out)):
        made = plan(lengths, **options)
        if min_fill_ratio:
            floor = min_fill_ratio * made.spec.pack_length
            made = made.without(made.pack_tokens < floor, "under_filled")
        check_drops(made, lengths_folder, max_drop_fraction)
        if out is None:
            return made
        folder = None if lengths_folder is None else str(Path(lengths_folder).resolve())
        made.save(out, origin=origin_of({"lengths": folder}), overwrite=overwrite)
    return PackPlan.load(out)


def check_drops(made: PackPlan, lengths_folder: str | Path | None, limit: float | None) -> None:
    """PlanError when no pack is left, or more than the share `limit` of the samples is in the ledger."""
    read = len(made.indices) + len(made.ledger)
    share = len(made.ledger) / read if read else 0.0
    if len(made) and (limit is None or share <= limit):
        return
    counts = ", ".join(f"{reason} {count}" for reason, count in made.ledger.counts().items()) or "none"
    what = f"{len(made.ledger)} of {read} samples ({share:.1%}) are left out: {counts}"
    if not len(made):
        raise PlanError(f"the plan has no pack; {what}", hint="raise the pack length, or see the reasons")
    left_out = ledger_rows(made, lengths_folder)[: len(made.ledger)]
    shown = [f"{row['where'] or row['id']} ({row['reason']})" for row in left_out[:_SHOWN]]
    raise PlanError(
        f"{what}; the first: {'; '.join(shown)}", hint=f"the limit is {limit:.1%} (max_drop_fraction)"
    )


def ledger_rows(
    made: PackPlan, lengths_folder: str | Path | None, locate: Callable[[int], str] | None = None
) -> list[dict[str, Any]]:
    """Every sample that is not in the plan: id, reason, tokens, where it stands and what is wrong.

    Behind them samples that are in the plan and lost answers to truncation (`truncated_answers`).

    Args:
        lengths_folder: holds the details of samples that could not be measured.
        locate: `source.where`, for samples that were measured but left out.
    """
    told = {} if lengths_folder is None else details(lengths_folder)
    lengths = None
    if lengths_folder is not None and (Path(lengths_folder) / "lengths.json").is_file():
        lengths = Lengths.load(lengths_folder)
    rows: list[dict[str, Any]] = []
    for sample, reason in zip(made.ledger.ids.tolist(), made.ledger.reasons, strict=True):
        where, _, detail = told.get(sample, "").partition(": ")
        tokens = 0 if lengths is None else int(lengths.tokens[sample])
        if tokens and (not detail or (lengths is not None and lengths.status[sample] == STATUS_OK)):
            detail = f"{tokens} tokens, the cap is {made.spec.pack_length}"
        if not where and locate is not None:
            where = locate(sample)
        rows.append({"id": sample, "reason": reason, "tokens": tokens, "where": where, "detail": detail})
    if lengths_folder is None or lengths is None:
        return rows
    gone = set(made.ledger.ids.tolist())
    return rows + [row for row in truncated_rows(lengths_folder, lengths) if row["id"] not in gone]
