"""Packs as rows of a page: a bar of segments, one a sample, with ids, lengths and records behind it.

Rows of large plans stay small: packs are an evenly spaced choice, thin segments are drawn as one, and of each
pack the first samples are listed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .contents import percent

__all__ = ["chosen_packs", "pack_rows"]

_SHOWN_PACKS = 60
_SEGMENTS = 12_000  # most segments of a report
_THIN = 0.25  # percent of the widest bar: narrower segments are drawn together with their neighbours
_LISTED = 24  # samples listed of a pack
_WIDER = 1.25  # an over-long pack of more than so many pack lengths is cut


def chosen_packs(count: int, shown: int = _SHOWN_PACKS) -> list[int]:
    """All packs, or `shown` of them evenly spaced from first to last.

    >>> chosen_packs(3), chosen_packs(101, 3)
    ([0, 1, 2], [0, 50, 100])
    """
    if count <= shown:
        return list(range(count))
    return [k * (count - 1) // (shown - 1) for k in range(shown)]


def pack_rows(
    plan: Any,
    tokens: Any,
    kind_of: Callable[[int], str],
    words_of: Callable[[int], str],
    where: Callable[[int], str],
    record: Callable[[int], str],
) -> dict[str, Any]:
    """Rows of the chosen packs.

    Args:
        tokens: int[n], lengths by sample id.
        kind_of: sample id -> CSS class of its segment.
        words_of: sample id -> what to say beside its length.
        where, record: sample id -> where it stands in its source, and its text; "" where that is not at hand.

    Returns:
        rows, and `cap`: the place of the pack length in percent of a bar. A row: pack, used, samples, fill,
        over (longer than the pack length), cut (longer than its bar), segments (kind, width in percent),
        listed (id, tokens, words, where, record), rest (samples that are not listed).
    """
    cap = int(plan.spec.pack_length)
    chosen = chosen_packs(len(plan.offsets) - 1)
    widest = max([cap, *(int(plan.pack_tokens[p]) for p in chosen)])
    shown = min(widest, int(cap * _WIDER))
    rows, drawn = [], 0
    for p in chosen:
        ids = [int(i) for i in plan.indices[int(plan.offsets[p]) : int(plan.offsets[p + 1])]]
        used = int(plan.pack_tokens[p])
        segments = _segments(ids, tokens, kind_of, shown) if drawn < _SEGMENTS else []
        drawn += len(segments)
        listed = [
            {
                "id": i,
                "tokens": int(tokens[i]),
                "words": words_of(i),
                "where": where(i),
                "record": record(i),
            }
            for i in ids[:_LISTED]
        ]
        rows.append(
            {
                "pack": p,
                "used": used,
                "samples": len(ids),
                "fill": f"{100 * used / cap:,.0f} %" if used > cap else percent(used / cap),
                "over": used > cap,
                "cut": used > shown,
                "segments": segments,
                "listed": listed,
                "rest": len(ids) - len(listed),
            }
        )
    return {"rows": rows, "cap": 100 * cap / shown}


def _segments(
    ids: list[int], tokens: Any, kind_of: Callable[[int], str], widest: int
) -> list[dict[str, str]]:
    """Segments of one pack; neighbours that are too thin to see become one of kind `k-run`."""
    made, held, start, left = [], 0, 0, 100.0
    for k, i in enumerate(ids):
        held += int(tokens[i])
        width = 100 * held / widest
        if width < _THIN and k < len(ids) - 1:
            continue
        shown = min(width, left)
        made.append({"kind": kind_of(i) if start == k else "k-run", "width": f"{shown:.2f}"})
        held, start, left = 0, k + 1, left - shown
    return made
