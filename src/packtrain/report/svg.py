"""A small canvas of inline SVG: enough for bars, segments and lines, with all text escaped.

Colours are CSS classes, so one picture serves light and dark pages; numbers have one decimal, so
equal data give equal bytes. No plotting library: its SVG would be ten times larger.
"""

from __future__ import annotations

import math
from html import escape

__all__ = ["Canvas", "compact", "ticks"]


class Canvas:
    """A picture of `width` x `height` user units that scales to its column."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._label = label
        self._out: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, kind: str, title: str = "") -> None:
        shape = f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"'
        self._add(shape, "rect", title)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._out.append(f'<line class="{kind}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>')

    def dot(self, x: float, y: float, r: float, kind: str, title: str = "") -> None:
        self._add(f'<circle class="{kind}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}"', "circle", title)

    def path(self, points: list[tuple[float, float]], kind: str) -> None:
        """A line through points."""
        steps = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._out.append(f'<polyline class="{kind}" points="{steps}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "t", anchor: str = "start") -> None:
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._out.append(f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}"{place}>{escape(words)}</text>')

    def _add(self, shape: str, name: str, title: str) -> None:
        self._out.append(f"{shape}><title>{escape(title)}</title></{name}>" if title else f"{shape}/>")

    def render(self) -> str:
        box = f"0 0 {_n(self.width)} {_n(self.height)}"
        head = f'<svg viewBox="{box}" role="img" aria-label="{escape(self._label)}">'
        return "\n".join([head, *self._out, "</svg>"])


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from `low` to `high`, about `about` of them (1, 2 or 5 times a power of ten apart).

    >>> ticks(0, 1024)
    [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]
    """
    span = high - low
    if not (span > 1e-9 * max(abs(low), abs(high)) and math.isfinite(span)):
        return [low]
    raw = span / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def compact(value: float, scale: float | None = None) -> str:
    """A short number for an axis: 1,200 · 34k · 1.5M · 0.25.

    Args:
        scale: the largest value of the axis, so that all its labels have one unit.

    >>> compact(1500000), compact(34000), compact(5000), compact(5000, 20000), compact(0.25)
    ('1.5M', '34k', '5,000', '5k', '0.25')
    """
    size = abs(value) if scale is None else abs(scale)
    if value and size >= 1e4:
        unit, name = next((u, n) for u, n in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if size >= u)
        return f"{value / unit:.4g}{name}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _n(value: float) -> str:
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text
