"""The report's pictures as inline SVG: histograms, packs as segments, slots, loss curve.

Each takes plain numbers and returns SVG text. Pictures of large plans stay small: packs are an
evenly spaced choice, thin segments are drawn as one, curves are thinned by averaging.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .numbers import Histogram
from .svg import Canvas, compact, ticks

__all__ = ["chosen_packs", "curve", "histogram", "packs", "slot_bars"]

Points = Sequence[tuple[float, float]]

_SHOWN_PACKS = 60
_SEGMENTS = 12_000  # most segments of a report: about 1.2 MB
_THIN = 2.0  # narrower segments are drawn together with their neighbours
_POINTS = 600  # most points of a curve
_SMOOTHED = 120  # a curve of more points gets its moving mean drawn over it


def histogram(found: Histogram, *, label: str, x_label: str, mark: float | None, unit: str = "") -> str:
    """Stacked bars. `mark` draws a line at an x value (the pack length)."""
    canvas = Canvas(520, 236, label)
    left, right, top, bottom = 44.0, 510.0, 18.0, 194.0
    low, high = float(found.edges[0]), float(found.edges[-1])
    total = sum(found.parts.values())
    most = max(1, int(np.max(total)))
    y_of = _axis(canvas, (left, right, top, bottom), most)

    def x_of(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    for k in range(len(found.edges) - 1):
        a, b = float(found.edges[k]), float(found.edges[k + 1])
        base = 0
        for name, counts in found.parts.items():
            count = int(counts[k])
            if count:
                last = found.beyond and k == len(found.edges) - 2
                span = f"{compact(a)}{unit} and more" if last else f"{compact(a)} to {compact(b)}{unit}"
                y = y_of(base + count)
                height = max(1.0, y_of(base) - y)
                width = max(0.6, x_of(b) - x_of(a) - 1)
                canvas.rect(x_of(a), y, width, height, f"s-{name}", f"{span}: {count:,} {name}")
                base += count
    for value in ticks(low, high, 6):
        canvas.text(x_of(value), bottom + 16, compact(value, high) + unit, "t", "middle")
    if mark is not None and low < mark <= high:
        canvas.line(x_of(mark), top - 6, x_of(mark), bottom, "mark")
        at_right = x_of(mark) > right - 90
        canvas.text(
            x_of(mark) + (-5 if at_right else 5),
            top + 2,
            f"pack length {mark:,.0f}",
            "t",
            "end" if at_right else "start",
        )
    canvas.text((left + right) / 2, bottom + 34, x_label, "t strong", "middle")
    return canvas.render()


def chosen_packs(count: int, shown: int = _SHOWN_PACKS) -> list[int]:
    """All packs, or `shown` of them evenly spaced from first to last.

    >>> chosen_packs(3), chosen_packs(101, 3)
    ([0, 1, 2], [0, 50, 100])
    """
    if count <= shown:
        return list(range(count))
    return [k * (count - 1) // (shown - 1) for k in range(shown)]


def packs(plan: Any, tokens: Any, kind_of: Callable[[int], str], words_of: Callable[[int], str]) -> str:
    """Packs as rows of segments, one a sample, with the empty rest.

    Args:
        tokens: int[n], lengths by sample id.
        kind_of: sample id -> CSS class of its segment.
        words_of: sample id -> what to add to its hover text.
    """
    cap = int(plan.spec.pack_length)
    rows = [(p, _pack(plan, p)) for p in chosen_packs(len(plan.offsets) - 1)]
    widest = max([cap, *(int(plan.pack_tokens[p]) for p, _ in rows)])
    left, width, high, gap = 58.0, 884.0, 12.0, 3.0
    scale = width / widest
    canvas = Canvas(1000, len(rows) * (high + gap) + 22, "Packs as rows of samples")
    y, drawn = 18.0, 0
    for p, ids in rows:
        if drawn > _SEGMENTS:
            break
        used = int(plan.pack_tokens[p])
        canvas.text(left - 8, y + 9.5, f"{p:,}", "t", "end")
        empty = f"pack {p}: {max(0, cap - used):,} slots empty"
        canvas.rect(left, y, max(cap, used) * scale, high, "rest", empty)
        x, held, start = left, 0, 0
        for k, i in enumerate(ids):
            held += int(tokens[i])
            last = k == len(ids) - 1
            if held * scale < _THIN and not last:
                continue
            run = ids[start : k + 1]
            if len(run) == 1:
                more = words_of(i)
                title = f"sample {i}: {held:,} tokens{', ' + more if more else ''}"
            else:
                title = f"samples {run[0]} to {run[-1]}: {len(run):,} samples, {held:,} tokens"
            canvas.rect(x, y, held * scale, high, f"seg {kind_of(i) if len(run) == 1 else 'k-run'}", title)
            x, held, start, drawn = x + held * scale, 0, k + 1, drawn + 1
        canvas.text(left + width + 8, y + 9.5, f"{100 * used / cap:.1f} %", "t")
        y += high + gap
    canvas.height = y + 4
    canvas.line(left + cap * scale, 14, left + cap * scale, y, "mark")
    canvas.text(left - 8, 10, "pack", "t", "end")
    canvas.text(left + cap * scale, 10, f"pack length {cap:,}", "t", "end")
    canvas.text(left + width + 8, 10, "full", "t")
    return canvas.render()


def _pack(plan: Any, p: int) -> list[int]:
    return [int(i) for i in plan.indices[int(plan.offsets[p]) : int(plan.offsets[p + 1])]]


def slot_bars(rows: Sequence[tuple[str, int, str]], real: int) -> str:
    """Horizontal bars of token slots; the part that is real tokens is solid, padding is pale."""
    canvas = Canvas(1000, len(rows) * 46 + 6, "Token slots of one epoch")
    most = max([real, 1, *(slots for _, slots, _ in rows)])
    for k, (name, slots, note) in enumerate(rows):
        y = k * 46.0
        canvas.text(0, y + 13, name, "t strong big")
        canvas.text(1000, y + 13, note, "t big", "end")
        padding = f"{slots:,} slots, {slots - real:,} of them padding"
        canvas.rect(0, y + 20, 1000 * slots / most, 14, "pad", padding)
        canvas.rect(0, y + 20, 1000 * min(real, slots) / most, 14, "s-packed", f"{real:,} real tokens")
    return canvas.render()


def curve(lines: Mapping[str, Points], *, label: str) -> str:
    """Lines over steps, each `name -> (step, value) ...`; values that are not finite are left out."""
    canvas = Canvas(1000, 280, label)
    left, right, top, bottom = 48.0, 984.0, 14.0, 238.0
    clean = {name: thin([p for p in points if all(map(math.isfinite, p))]) for name, points in lines.items()}
    flat = [point for points in clean.values() for point in points]
    if not flat:
        canvas.text(500, 130, "no finite loss was logged", "t", "middle")
        return canvas.render()
    xs, ys = [x for x, _ in flat], [y for _, y in flat]
    low_x, high_x = min(xs), max(max(xs), min(xs) + 1)
    y_ticks = ticks(min(0.0, *ys), max(max(ys) * 1.04, 1e-9), 6)
    low, high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x)
        return left + across * (right - left), bottom - (y - low) / (high - low or 1) * (bottom - top)

    for value in y_ticks:
        _, y = at(low_x, value)
        canvas.line(left, y, right, y, "grid")
        canvas.text(left - 8, y + 4, compact(value), "t", "end")
    for value in ticks(low_x, high_x, 8):
        canvas.text(at(value, low)[0], bottom + 18, compact(value, high_x), "t", "middle")
    canvas.text((left + right) / 2, bottom + 36, "optimizer step", "t strong", "middle")
    for name, points in clean.items():
        kind = "train" if name == "train" else "other"
        if len(points) > _SMOOTHED:
            canvas.path([at(x, y) for x, y in points], f"c faint c-{kind}")
            points = smooth(points)
        canvas.path([at(x, y) for x, y in points], f"c c-{kind}")
        for x, y in points if len(points) <= _SMOOTHED else points[-1:]:
            canvas.dot(*at(x, y), 2.5, f"d-{kind}", f"{name}, step {x:g}: {y:.4f}")
    return canvas.render()


def thin(points: Points, most: int = _POINTS) -> list[tuple[float, float]]:
    """At most `most` points: means of equal runs; the first and the last point stay.

    >>> thin([(1, 8.0), (2, 6.0), (3, 4.0)], 10)
    [(1, 8.0), (2, 6.0), (3, 4.0)]
    """
    if len(points) <= most:
        return list(points)
    inner = np.asarray(points[1:-1], dtype=np.float64)
    means = [run.mean(axis=0) for run in np.array_split(inner, most - 2)]
    return [points[0], *((float(x), float(y)) for x, y in means), points[-1]]


def smooth(points: Points, parts: int = 30) -> list[tuple[float, float]]:
    """Centred moving mean over about a `parts`-th of the points (fewer at the ends).

    >>> smooth([(0, 1.0), (1, 4.0), (2, 1.0), (3, 4.0)], 2)
    [(0, 2.5), (1, 2.0), (2, 3.0), (3, 2.5)]
    """
    half = max(1, len(points) // parts // 2)
    total = np.concatenate([[0.0], np.cumsum([y for _, y in points])])
    out = []
    for k, (x, _) in enumerate(points):
        a, b = max(0, k - half), min(len(points), k + half + 1)
        out.append((x, float(total[b] - total[a]) / (b - a)))
    return out


def _axis(canvas: Canvas, frame: tuple[float, float, float, float], most: int) -> Callable[[float], float]:
    """Grid lines and labels of counts; returns count -> y."""
    left, right, top, bottom = frame
    marks = [value for value in ticks(0, most, 5) if float(value).is_integer()]
    high = max(most * 1.02, 1)

    def y_of(count: float) -> float:
        return bottom - count / high * (bottom - top)

    for value in marks:
        canvas.line(left, y_of(value), right, y_of(value), "grid")
        canvas.text(left - 6, y_of(value) + 4, compact(value, most), "t", "end")
    return y_of
