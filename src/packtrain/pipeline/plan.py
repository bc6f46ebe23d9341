"""Plan measured lengths into a plan folder, with the share of dropped samples checked first."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import number
from ..errors import PacktrainError, PlanError, counted
from ..measuring.run import CUT
from ..planning.build import plan
from ..planning.ledger import cap_words
from ..planning.lengths import STATUS_OK, Lengths
from ..planning.packplan import PackPlan
from ..planning.spec import PlanSpec
from ..remote.copies import place_of
from ..remote.outputs import output
from ..remote.places import kept, typed
from ..store._folders import refuse_other_kind
from ..waiting.claim import alone
from .publish import details, origin_of, placed, refusal_marked

logger = logging.getLogger(__name__)

#: Without a limit of its own, a plan leaves out at most this share of the samples for media that are missing
#: or that the text has no place for, and for records of another shape: one wrong option fails all of them.
MISSING = 0.1
_ABSENT = ("missing_media", "remote_media", "placeholder_mismatch", "malformed_record")

#: Reason of most samples -> what helps.
_LACK = {
    "missing_media": "media_root, when measuring, names the folder of relative media paths",
    "placeholder_mismatch": 'media_without_placeholder="prepend", when measuring, puts media first where a '
    "text has no placeholder",
}

#: Packs of steps that are filled less are told, with what fills them.
_EMPTY = 0.5

#: Share of the samples in no pack beyond which that is told, whatever policy asked for it.
_MANY = 0.1

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
    check_limit(max_drop_fraction)
    with contextlib.ExitStack() as held:
        if out is not None:
            out = held.enter_context(output(out))
            refuse_other_kind(out, "plan.json")
            held.enter_context(alone(out))
        made = plan(lengths, **options)
        if min_fill_ratio:
            floor = min_fill_ratio * made.spec.pack_length
            made = made.without(made.pack_tokens < floor, "under_filled")
        check_drops(made, lengths_folder, max_drop_fraction)
        _tell_unlikely(made)
        if out is None:
            return made
        folder = None if lengths_folder is None else kept(lengths_folder)
        made.save(out, origin=origin_of({"lengths": folder}), overwrite=overwrite)
    return PackPlan.load(out)


def _tell_unlikely(made: PackPlan) -> None:
    """What can be planned, and is seldom meant."""
    spec, read = made.spec, len(made.indices) + len(made.ledger)
    if len(made.ledger) > _MANY * read:
        out, of = f"{len(made.ledger):,}", counted(read, "samples")
        logger.warning("%s of %s are in no pack: %s", out, of, made.ledger.counts())
    if made.pack_tokens.min() > spec.pack_length:
        logger.warning(
            "every sample is longer than the pack length of %d tokens: nothing is packed", spec.pack_length
        )
    if spec.samples_per_step is not None and spec.samples_per_step > len(made.indices):
        told = counted(len(made.indices), "samples")
        logger.warning("samples_per_step %d, of %s: an epoch is one step", spec.samples_per_step, told)
    elif spec.samples_per_step is not None:
        _tell_empty_steps(made, spec.samples_per_step)
    for name in (
        name for name, cap in spec.limits.items() if cap == 0 and spec.long_policy(name) == "single"
    ):
        logger.warning(
            "limits=%r packs samples with %s alone; long_samples='drop' leaves them out", {name: 0}, name
        )


def _tell_empty_steps(made: PackPlan, samples: int) -> None:
    """What fills the packs of a step, whose number is that of the fullest step."""
    stats = made.stats()
    if stats["efficiency"] < _EMPTY:
        logger.warning(
            "the %s of a step of samples_per_step=%d are %.0f %% full (%d of %d tokens): a larger "
            "samples_per_step, a smaller packs_multiple or a smaller pack_length fills them; rows that are "
            "not padded do not compute what stays free",
            counted(stats["packs_per_step"], "packs"), samples, 100 * stats["efficiency"],
            made.pack_tokens.mean(), made.spec.pack_length,
        )  # fmt: skip


def check_limit(share: float | None) -> None:
    """PlanError where `max_drop_fraction` is no share."""
    if share is not None:
        number("max_drop_fraction", share, 0, 1, hint="0.01 is 1 %", error=PlanError)


def check_drops(made: PackPlan, lengths_folder: str | Path | None, limit: float | None) -> None:
    """PlanError when no pack is left, or more than the share `limit` of the samples is in the ledger.

    Without `limit`, samples whose media are missing, not allowed to be fetched or not those of the text's
    placeholders, and records that cannot be read, may be `MISSING` of all.
    """
    read, by_reason = len(made.indices) + len(made.ledger), made.ledger.counts()
    if not len(made):
        why, hint = "there is no sample to plan: the lengths are empty", "measure a source with samples"
        if read:
            why = f"the plan has no pack; {_left_out(read, by_reason)}"
            hint = f"raise the pack length, or {_see(lengths_folder)}"
        raise PlanError(why, hint=hint)

    def first() -> list[dict[str, Any]]:
        return ledger_rows(made, lengths_folder)[: min(len(made.ledger), _SHOWN)]

    _check_share(read, by_reason, limit, first, lengths_folder)


def check_measured(lengths: Lengths, folder: str | Path, limit: float | None) -> None:
    """The same of lengths that are measured: PlanError when too many samples cannot be used.

    The measurement is finished and stays, and is marked: the next one that differs takes its place, so that
    a wrong option blocks no folder. One with nothing usable is told by its reasons.
    """
    named, folder = folder, place_of(folder)
    by_reason = lengths.unusable()
    if len(lengths) and sum(by_reason.values()) == len(lengths) and limit is None:
        limit = MISSING
    with refusal_marked(folder):
        _check_share(len(lengths), by_reason, limit, lambda: measured_rows(folder, lengths)[:_SHOWN], named)


def _check_share(
    read: int,
    by_reason: dict[str, int],
    limit: float | None,
    first: Callable[[], list[dict[str, Any]]],
    folder: str | Path | None,
) -> None:
    if limit is None and sum(by_reason.get(reason, 0) for reason in _ABSENT) > MISSING * read:
        limit = MISSING
    if limit is None or not read or sum(by_reason.values()) / read <= limit:
        return
    shown = [f"{row['where'] or row['id']} ({row['reason']})" for row in first()]
    raise PlanError(
        f"{_left_out(read, by_reason)}; the first: {'; '.join(shown)}",
        hint=f"{_root_of(by_reason)}max_drop_fraction={limit:g} is the limit; {_see(folder)}, or set a "
        "higher one",
    )


def _see(folder: str | Path | None) -> str:
    """What shows why samples were left out."""
    return "see the reasons" + ("" if folder is None else f" (packtrain show {typed(folder)} --ledger)")


def _root_of(by_reason: dict[str, int]) -> str:
    """What most of these samples lack."""
    left_out = sum(by_reason.values())
    return next((f"{lack}; " for name, lack in _LACK.items() if 2 * by_reason.get(name, 0) > left_out), "")


def _left_out(read: int, by_reason: dict[str, int]) -> str:
    count = sum(by_reason.values())
    counts = ", ".join(f"{reason} {number}" for reason, number in by_reason.items()) or "none"
    return (
        f"{count} of {counted(read, 'samples')} ({count / read if read else 0.0:.1%}) are left out: {counts}"
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
    lengths = None
    if lengths_folder is not None and (Path(lengths_folder) / "lengths.json").is_file():
        lengths = Lengths.load(lengths_folder)
    rows = _rows(made.ledger, lengths_folder, lengths, locate, made.spec)
    if lengths_folder is None or lengths is None:
        return rows
    gone = set(made.ledger.ids.tolist())
    return rows + [row for row in truncated_rows(lengths_folder, lengths) if row["id"] not in gone]


def measured_rows(
    folder: str | Path, lengths: Lengths, locate: Callable[[int], str] | None = None
) -> list[dict[str, Any]]:
    """Every sample of a lengths folder that no plan can use, as `ledger_rows` tells it; then those cut."""
    unusable = np.flatnonzero(np.asarray(lengths.status) != STATUS_OK).tolist()
    rows = _rows(((i, lengths.reason(i)) for i in unusable), folder, lengths, locate)
    return rows + truncated_rows(folder, lengths)


def _rows(
    left_out: Iterable[tuple[int, str]],
    folder: str | Path | None,
    lengths: Lengths | None,
    locate: Callable[[int], str] | None,
    spec: PlanSpec | None = None,
) -> list[dict[str, Any]]:
    """Of (sample, reason); with the `spec` of a plan also what is longer than its caps."""
    told = {} if folder is None else details(folder)
    rows: list[dict[str, Any]] = []
    for sample, reason in left_out:
        try:
            known = None if locate is None else locate(sample)
        except (PacktrainError, IndexError):  # the source is not at hand, or has it no more
            known = None
        where, detail = placed(told.get(sample, ""), known)
        tokens = 0 if lengths is None else int(lengths.tokens[sample])
        if spec and lengths and tokens and (not detail or lengths.status[sample] == STATUS_OK):
            costs = {name: int(cost[sample]) for name, cost in lengths.costs.items()}
            detail = cap_words(reason, tokens, costs, spec)
        where = where or known or ""
        rows.append({"id": sample, "reason": reason, "tokens": tokens, "where": where, "detail": detail})
    return rows


# --------------------------------------------------------------------------------------------
# Samples that are trained although truncation took answers of them: told, not left out
# --------------------------------------------------------------------------------------------
_SHOWN_CUT = 3  # samples named in one line


def truncated_rows(folder: str | Path, lengths: Lengths) -> list[dict[str, Any]]:
    """Samples of a lengths folder that lost answers: id, reason, tokens, where, detail (which messages).

    They are in the plan: these rows do not count as left out.
    """
    if "answers_removed" not in lengths.costs:
        return []
    rows = []
    for sample, line in sorted(details(folder).items()):
        if lengths.status[sample] == STATUS_OK:
            where, detail = placed(line, None)
            tokens = int(lengths.tokens[sample])
            rows.append({"id": sample, "reason": CUT, "tokens": tokens, "where": where, "detail": detail})
    return rows


def truncated_figures(rows: list[dict[str, Any]], lengths: Lengths) -> dict[str, int]:
    """What truncation took of samples (`truncated_rows`): how many, answers removed, answers cut short."""
    costs = {name: lengths.costs.get(name) for name in ("answers_removed", "answers_cut")}
    return {
        "samples": len(rows),
        **{name: 0 if held is None else int(held.sum(dtype=np.int64)) for name, held in costs.items()},
    }


def told_truncated(folder: str | Path, lengths: Lengths) -> str:
    """One line for people; "" where truncation took no answer."""
    rows = truncated_rows(folder, lengths)
    if not rows:
        return ""
    figures = truncated_figures(rows, lengths)
    shown = "; ".join(f"{row['where']} (id {row['id']}): {row['detail']}" for row in rows[:_SHOWN_CUT])
    more = f"; and {counted(len(rows) - _SHOWN_CUT, 'more samples')}" if len(rows) > _SHOWN_CUT else ""
    return (
        f"{counted(figures['samples'], 'samples')} trained without "
        f"{counted(figures['answers_removed'], 'answers')} and with "
        f"{figures['answers_cut']:,} cut short: {shown}{more}"
    )
