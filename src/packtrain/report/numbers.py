"""The figures a report leads with: token slots with and without packing, histograms, fills.

Everything is integer arithmetic over the plan's arrays, in one pass each; nothing is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Histogram", "Slots", "fill_histogram", "length_histogram", "token_slots"]

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Token slots that one epoch of the planned samples takes.

    Attributes:
        real: tokens of the samples themselves.
        packed: all packs of the plan: pack_length each, or what a longer single sample takes.
        batched: one sample a row, `batch` rows a batch in id order, padded to the batch's longest.
        capped: one sample a row, every row padded to pack_length.
        batch: rows a batch: the plan's samples per pack, rounded, so that a batch does a pack's work.
    """

    real: int
    packed: int
    batched: int
    capped: int
    batch: int

    def saved(self, against: int) -> float:
        """Share of `against` slots that packed training does not compute: rows are not padded to the cap."""
        return 1 - self.real / against if against else 0.0


def token_slots(tokens: NDArray[Any], plan: Any) -> Slots:
    """Compare the plan with one sample a row. `tokens` int[n] are the lengths by sample id."""
    cap = int(plan.spec.pack_length)
    packed = int(plan.slots)
    mine = np.asarray(tokens)[np.sort(np.asarray(plan.indices), kind="stable")].astype(np.int64)
    if not len(mine):
        return Slots(real=0, packed=packed, batched=0, capped=0, batch=1)
    packs = len(plan.offsets) - 1
    batch = max(1, (2 * len(mine) + packs) // (2 * packs))
    starts = np.arange(0, len(mine), batch)
    rows = np.diff(np.append(starts, len(mine)))
    batched = int((np.maximum.reduceat(mine, starts) * rows).sum())
    capped = int(np.maximum(mine, cap).sum())
    return Slots(real=int(mine.sum()), packed=packed, batched=batched, capped=capped, batch=batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts between edges. `beyond`: the last bin also holds everything above its right edge.

    Attributes:
        edges: float[k+1].
        parts: name -> int64[k] counts, stacked in this order.
    """

    edges: NDArray[np.float64]
    parts: dict[str, I64]
    beyond: bool = False


def length_histogram(lengths: Any, plan: Any, bins: int = 40) -> Histogram:
    """Lengths of the measured samples: those packed, and those in the ledger although measured."""
    tokens = np.asarray(lengths.tokens)
    packed = np.zeros(len(tokens), dtype=bool)
    packed[np.asarray(plan.indices)] = True
    left = ~packed & (tokens > 0)
    cap = int(plan.spec.pack_length)
    longest = int(tokens.max()) if len(tokens) else 1
    shown = min(longest, 2 * cap)
    step = _round_up(max(1, -(-max(shown, 1) // bins)))
    edges = np.arange(0, max(shown, 1) + step, step, dtype=np.float64)
    parts = {
        "packed": _counts(tokens[packed], step, len(edges) - 1),
        "ledger": _counts(tokens[left], step, len(edges) - 1),
    }
    return Histogram(edges=edges, parts=parts, beyond=longest > int(edges[-1]))


def fill_histogram(plan: Any) -> Histogram:
    """How full the packs are, in percent of pack_length; over-long single packs count as full."""
    cap = int(plan.spec.pack_length)
    fill = np.minimum(np.asarray(plan.pack_tokens, dtype=np.int64), cap)
    permille = fill * 1000 // cap
    low = int(permille.min()) // 50 * 50 if len(permille) else 0
    low = min(low, 900)
    step = 5 if 1000 - low <= 150 else 10 if 1000 - low <= 300 else 25 if 1000 - low <= 700 else 50
    edges = np.arange(low, 1000 + step, step, dtype=np.float64) / 10
    counts = _counts(permille - low, step, len(edges) - 1)
    return Histogram(edges=edges, parts={"packed": counts})


def _counts(values: NDArray[Any], step: int, bins: int) -> I64:
    """Counts per bin of width `step` from 0; larger values go to the last bin."""
    where = np.minimum(values.astype(np.int64) // step, bins - 1)
    return np.bincount(where, minlength=bins).astype(np.int64)


def _round_up(step: int) -> int:
    """The next of 1, 2, 4, 5, 8 times a power of ten: friendly bin widths."""
    power = 1
    while True:
        for head in (1, 2, 4, 5, 8):
            if head * power >= step:
                return head * power
        power *= 10
