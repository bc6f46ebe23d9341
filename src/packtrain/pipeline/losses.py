"""The losses of a step's samples, from what training wrote: `RUN/sample_loss/rank-N.jsonl`.

Only lines of the step are parsed. After a resume a rank may have a step twice:
its later line counts.
"""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InputError

__all__ = ["losses_of"]


def losses_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """Samples of a step of the run (from 0) with loss and supervised tokens, the largest loss first.

    Returns:
        Rows {id, loss (None: nothing supervised, or not finite), tokens, rank, source of a mixture}.

    Raises:
        InputError: the run wrote no losses, or none of this step.
    """
    paths = sorted((folder / "sample_loss").glob("rank-*.jsonl"))
    if not paths:
        raise InputError(
            f"{folder} holds no losses of samples",
            hint="packtrain train writes them: training.log_sample_loss: true",
        )
    mark = f'"step": {step},'
    found: list[dict[str, Any]] = []
    for path in paths:
        with files.reading(path, "a file of losses of samples", None):
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if mark in line]
            rows = [row for row in map(_row, lines) if row is not None and row.get("step") == step]
            if rows:
                found += _samples(rows[-1])
    if not found:
        raise InputError(f"{folder} holds no losses of step {step}", hint="steps count from 0")
    return sorted(found, key=_descending)


def _samples(row: dict[str, Any]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    sources = row.get("sources") or [None] * len(row["ids"])
    for i, loss, tokens, source in zip(row["ids"], row["loss"], row["tokens"], sources, strict=True):
        sample = {
            "id": operator.index(i),
            "loss": None if loss is None else float(loss),
            "tokens": operator.index(tokens),
            "rank": operator.index(row["rank"]),
        }
        made.append(sample if source is None else {**sample, "source": str(source)})
    return made


def _descending(row: dict[str, Any]) -> tuple[bool, float]:
    """A loss that is not finite stands first, samples without supervised tokens last."""
    if row["loss"] is None:
        return (row["tokens"] == 0, -float("inf"))
    return (False, -row["loss"])


def _row(line: str) -> dict[str, Any] | None:
    """A line a stopped run left half written is skipped."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
