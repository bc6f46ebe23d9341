"""How the lengths of a set lie against a pack: what decides how well it can be packed.

Classes are the ranges ]C/2, C], ]C/4, C/2], … of the pack length C (halves rounded down). Samples above half
a pack can never share one with each other; lengths that are powers of two fill a pack of 2**N without a gap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..checks import whole
from ..extend import I64
from ..packers.diverse import phase_order


def quantiles(values: Any, *percents: int) -> list[int]:
    """Values of a non-empty int[n] that so many percent of all do not exceed: no means between two.

    >>> quantiles([1, 2, 3, 10], 0, 50, 100)
    [1, 2, 10]
    """
    order = np.sort(np.asarray(values), kind="stable")
    return [int(order[(len(order) - 1) * percent // 100]) for percent in percents]


def median_of(values: Any) -> float:
    """The middle of a non-empty int[n]; the mean of the two middle ones of an even count, whole where it is.

    >>> median_of([1, 2, 3, 10]), median_of([1, 3, 5, 10])
    (2.5, 4)
    """
    middle = float(np.median(np.asarray(values)))
    return int(middle) if middle.is_integer() else middle


def phases_of(plan: Any) -> dict[str, Any]:
    """What each phase of a `diverse` plan did, in the order in which they ran; empty for other plans."""
    told = dict((plan.packer.notes or {}).get("phases") or {})
    return {name: told[name] for name in phase_order(told)}


def distribution(tokens: Any, pack_length: int) -> dict[str, Any]:
    """Samples and tokens per length class, powers of two, and the share over half a pack. Plain JSON.

    Args:
        tokens: int[n] lengths of usable samples.
        pack_length: of the packs.

    >>> view = distribution([100, 64, 40, 33, 32, 1], 64)
    >>> [(row["class"], row["samples"]) for row in view["classes"]]
    [('> 64', 1), ('33 - 64', 3), ('17 - 32', 1), ('1 - 1', 1)]
    >>> view["over_half"], view["powers_of_two"]
    ({'samples': 4, 'share': 0.6667}, {'samples': 3, 'share': 0.5, 'lengths': {'1': 1, '32': 1, '64': 1}})
    """
    whole("pack_length", pack_length, 1)
    sizes, counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
    keep = sizes > 0
    sizes, counts = sizes[keep], counts[keep]
    total = int(counts.sum())
    rows = [_row(f"> {pack_length}", sizes, counts, pack_length + 1, None)]
    high = pack_length
    while high >= 1:
        low = high // 2 + 1
        rows.append(_row(f"{low} - {high}", sizes, counts, low, high))
        high = low - 1
    power = (sizes & (sizes - 1)) == 0
    powers = {str(size): int(count) for size, count in zip(sizes[power], counts[power], strict=True)}
    over = int(counts[2 * sizes > pack_length].sum())
    return {
        "pack_length": pack_length,
        "samples": total,
        "tokens": int((sizes * counts).sum()),
        "distinct_lengths": len(sizes),
        "classes": [row for row in rows if row["samples"]],
        "over_half": {"samples": over, "share": _share(over, total)},
        "powers_of_two": {
            "samples": sum(powers.values()),
            "share": _share(sum(powers.values()), total),
            "lengths": powers,
        },
    }


def _row(name: str, sizes: I64, counts: I64, low: int, high: int | None) -> dict[str, Any]:
    inside = (sizes >= low) & (sizes <= (high if high is not None else np.iinfo(np.int64).max))
    samples, tokens = int(counts[inside].sum()), int((sizes[inside] * counts[inside]).sum())
    return {"class": name, "samples": samples, "share": _share(samples, int(counts.sum())), "tokens": tokens}


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
