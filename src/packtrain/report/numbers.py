"""The figures of a report as plain JSON: `show --json` prints them and the page is drawn from them.

Everything is integer arithmetic over the plan's arrays, in one pass each; nothing is sampled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..planning.distribution import distribution, median_of, phases_of, quantiles

#: Series of a training log that are drawn: key of a row -> name of the line.
_SERIES = ("loss", "step_s", "data_wait_s", "tokens_per_s")

I64 = NDArray[np.int64]

_BINS = 40  # of a histogram of lengths, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Token slots that one epoch of the planned samples takes.

    Attributes:
        real: tokens of the samples themselves.
        packed: rows as they are trained: as long as their packs (samples rounded up to the plan's
            multiple_of), or `padded_to` tokens each.
        filled: all packs of the plan: pack_length each, or what a longer single sample takes.
        batched: one sample a row, `batch` rows a batch in id order, padded to the batch's longest.
        capped: one sample a row, every row padded to pack_length.
        batch: rows a batch: the plan's samples per pack, rounded, so that a batch does a pack's work.
        padded_to: tokens that rows of packs are padded to; None: they are as long as their packs.
    """

    real: int
    packed: int
    batched: int
    capped: int
    batch: int
    filled: int
    padded_to: int | None = None

    def saved(self, against: int) -> float:
        """Share of `against` slots that packed training does not compute."""
        return 1 - self.packed / against if against else 0.0


def token_slots(tokens: NDArray[Any], plan: Any, padded_to: int | None = None) -> Slots:
    """Compare the plan with one sample a row.

    Args:
        tokens: int[n], lengths by sample id.
        padded_to: tokens that rows of packs are padded to; None: they are not padded.
    """
    cap, multiple = int(plan.spec.pack_length), int(plan.spec.multiple_of)
    filled = int(plan.slots)
    mine = np.asarray(tokens)[np.sort(np.asarray(plan.indices), kind="stable")].astype(np.int64)
    if not len(mine):
        return Slots(real=0, packed=0, batched=0, capped=0, batch=1, filled=filled, padded_to=padded_to)
    packs = len(plan.offsets) - 1
    batch = max(1, (2 * len(mine) + packs) // (2 * packs))
    starts = np.arange(0, len(mine), batch)
    rows = np.diff(np.append(starts, len(mine)))
    batched = int((np.maximum.reduceat(mine, starts) * rows).sum())
    capped = int(np.maximum(mine, cap).sum())
    packed = int((-(-mine // multiple) * multiple).sum())
    if padded_to is not None:
        packed = max(packed, packs * padded_to)
    return Slots(
        real=int(mine.sum()), packed=packed, batched=batched, capped=capped, batch=batch, filled=filled,
        padded_to=padded_to,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts between edges.

    Attributes:
        edges: float[k+1].
        parts: name -> int64[k] counts, stacked in this order.
        over_edges, over: the same of what lies beyond the last edge, in steps of two; empty for none.
    """

    edges: NDArray[np.float64]
    parts: dict[str, I64]
    over_edges: NDArray[np.float64]
    over: dict[str, I64]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "edges": self.edges.tolist(),
            "counts": {name: part.tolist() for name, part in self.parts.items()},
            "over_edges": self.over_edges.tolist(),
            "over_counts": {name: part.tolist() for name, part in self.over.items()},
        }


def _histogram(
    edges: NDArray[np.float64], step: float, parts: Mapping[str, NDArray[Any]], first: float
) -> Histogram:
    """Counts of each part in bins of `step`; values of more than the last edge in bins that double.

    Args:
        first: a value as large is counted in the last bin.
    """
    most = max((float(part.max()) for part in parts.values() if len(part)), default=0.0)
    doublings = max(0, math.ceil(math.log2(max(most, 1) / first))) if most > first else 0
    over = np.array([first * 2.0**k for k in range(doublings + 1)] if doublings else [], dtype=np.float64)
    inside, beyond = {}, {}
    for name, values in parts.items():
        place = np.minimum(((values[values <= first] - edges[0]) // step).astype(np.int64), len(edges) - 2)
        inside[name] = np.bincount(place, minlength=len(edges) - 1).astype(np.int64)
        if doublings:
            place = np.minimum(np.searchsorted(over, values[values > first]) - 1, doublings - 1)
            beyond[name] = np.bincount(place, minlength=doublings).astype(np.int64)
    return Histogram(edges=edges, parts=inside, over_edges=over, over=beyond)


def length_histogram(lengths: Any, plan: Any) -> Histogram:
    """Lengths of the measured samples: those packed, and those in the ledger although measured."""
    tokens = np.asarray(lengths.tokens)
    packed = np.zeros(len(tokens), dtype=bool)
    packed[np.asarray(plan.indices)] = True
    left = ~packed & (tokens > 0)
    cap = int(plan.spec.pack_length)
    longest = int(tokens.max()) if len(tokens) else 1
    shown = min(longest, 2 * cap)
    step = _round_up(max(1, -(-max(shown, 1) // _BINS)))
    edges = np.arange(0, max(shown, 1) + step, step, dtype=np.float64)
    parts = {"packed": tokens[packed].astype(np.int64), "ledger": tokens[left].astype(np.int64)}
    return _histogram(edges, step, parts, float(edges[-1]))


def fill_histogram(plan: Any) -> Histogram:
    """How full the packs are, in percent of pack_length; over-long ones lie beyond 100."""
    cap = int(plan.spec.pack_length)
    tokens = np.asarray(plan.pack_tokens, dtype=np.int64)
    full = tokens[tokens <= cap]
    low = min(int(full.min()) * 1000 // cap // 50 * 50 if len(full) else 0, 900)
    step = 5 if 1000 - low <= 150 else 10 if 1000 - low <= 300 else 25 if 1000 - low <= 700 else 50
    edges = np.arange(low, 1000 + step, step, dtype=np.float64) / 10
    return _histogram(edges, step / 10, {"packs": tokens * 100 / cap}, 100.0)


def curves(history: Iterable[Mapping[str, Any]] | None) -> dict[str, list[list[float]]]:
    """Lines of a training log by name: [step, value] of loss, eval_loss, step_s, data_wait_s, tokens_per_s.

    Several validation sets have a line each, `eval_NAME_loss`. Values that are not finite are left out.
    """
    lines: dict[str, list[list[float]]] = {}
    for row in history or ():
        for key, value in row.items():
            wanted = key in _SERIES or (key.startswith("eval_") and key.endswith("loss"))
            if wanted and "step" in row and isinstance(value, int | float) and math.isfinite(value):
                lines.setdefault(key, []).append([int(row["step"]), float(value)])
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a run adds to the figures of its plan.

    Attributes:
        history: rows of its training log.
        steps: what `pipeline.page.step_figures` found of it: `balance`, `forecast`.
        comparison: packed and unpacked loss.
        validation: of its validation plan (`train.runtime.Runtime.eval`).
        keys: which keys of the records were not read.
        metrics: without a plan: closing metrics.
        left_out: without a plan: samples that were left out, by reason.
        consumed: see `train.consumed`; None: not known.
        proof: comparisons of the isolation proof; None: it was not made.
        padded_to: tokens that rows of packs are padded to; None: they are as long as their packs.
    """

    history: Sequence[Mapping[str, Any]] = ()
    steps: Mapping[str, Any] = field(default_factory=dict)
    comparison: Mapping[str, Any] | None = None
    validation: Mapping[str, Any] | None = None
    keys: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    consumed: Mapping[str, Any] | None = None
    proof: int | None = None
    padded_to: int | None = None


def report_figures(plan: Any, lengths: Any, training: Training | None = None) -> dict[str, Any]:
    """All figures of a report, plain JSON.

    Args:
        plan: None: the packs were not planned (streams, growing directories); the figures of training alone.
        lengths: the `Lengths` that the plan was made of.
        training: None: there was none.
    """
    run = training or Training()
    trained = {
        "curves": curves(run.history),
        "steps": dict(run.steps),
        "comparison": run.comparison or None,
        "validation": run.validation or None,
        "keys": run.keys or "all read",
        "consumed": run.consumed or None,
        "proof": run.proof,
    }
    if plan is None:
        return {"metrics": dict(run.metrics), "ledger": dict(run.left_out), **trained}
    slots = token_slots(lengths.tokens, plan, run.padded_to)
    usable = lengths.usable()
    mine = np.asarray(lengths.tokens)[np.asarray(plan.indices)]
    return {
        "checksum": str(plan.checksum),
        "pack_length": int(plan.spec.pack_length),
        "stats": plan.stats(),
        "ledger": {str(reason): int(count) for reason, count in plan.ledger.counts().items()},
        "slots": {
            **asdict(slots),
            "saved_batched": slots.saved(slots.batched),
            "saved_capped": slots.saved(slots.capped),
        },
        "lengths": length_histogram(lengths, plan).to_dict(),
        "fill": fill_histogram(plan).to_dict(),
        "sample_tokens": _spread(mine),
        "pack_tokens": _spread(plan.pack_tokens),
        "classes": distribution(usable, int(plan.spec.pack_length))["classes"],
        "phases": phases_of(plan),
        **trained,
    }


def _spread(values: Any) -> dict[str, float]:
    """Least, median, 95th percentile and largest of whole numbers; empty for none."""
    if not len(values):
        return {}
    least, p95, largest = quantiles(values, 0, 95, 100)
    return {"least": least, "median": median_of(values), "p95": p95, "largest": largest}


def _round_up(step: int) -> int:
    """The next of 1, 2, 4, 5, 8 times a power of ten: friendly bin widths."""
    friendly: Iterator[int] = (head * 10**power for power in itertools.count() for head in (1, 2, 4, 5, 8))
    return next(width for width in friendly if width >= step)
