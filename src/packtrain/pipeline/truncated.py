"""Samples that are trained although truncation took answers of them: told, not left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import counted
from ..measuring.run import CUT
from ..planning.lengths import STATUS_OK, Lengths
from .publish import details

_SHOWN = 3  # samples named in one line


def truncated_rows(folder: str | Path, lengths: Lengths) -> list[dict[str, Any]]:
    """Samples of a lengths folder that lost answers: id, reason, tokens, where, detail (which messages).

    They are in the plan: these rows do not count as left out.
    """
    if "answers_removed" not in lengths.costs:
        return []
    rows = []
    for sample, line in sorted(details(folder).items()):
        if lengths.status[sample] == STATUS_OK:
            where, _, detail = line.partition(": ")
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
    shown = "; ".join(f"{row['where']} (id {row['id']}): {row['detail']}" for row in rows[:_SHOWN])
    more = f"; and {counted(len(rows) - _SHOWN, 'more samples')}" if len(rows) > _SHOWN else ""
    return (
        f"{counted(figures['samples'], 'samples')} trained without "
        f"{counted(figures['answers_removed'], 'answers')} and with "
        f"{figures['answers_cut']:,} cut short: {shown}{more}"
    )
