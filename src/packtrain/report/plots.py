"""The charts of a report, drawn by matplotlib as inline SVG.

Text stays text and colours become variables of the page, so that one picture serves light, dark and print.
Bars and points carry their figures as hover text. Equal figures give equal bytes.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, optional
from ..files import publish


# --------------------------------------------------------------------------------------------
# The plot of a forecast: epoch time and max/mean over pack lengths, the recommended one marked
# --------------------------------------------------------------------------------------------
def draw_choices(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw rows of `packtrain.forecast` to a .svg or .png file.

    Raises:
        InputError: another suffix, or matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise InputError(f"{path} is neither .svg nor .png", hint="for example --plot forecast.svg")
    optional("matplotlib.figure", "matplotlib", "report")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    (FigureCanvasSVG if path.suffix == ".svg" else FigureCanvasAgg)(figure)
    places = range(len(rows))
    timed = "epoch_hours" in rows[0]
    fastest = min(row["epoch_token_equivalents"] for row in rows)
    bars = [row["epoch_hours"] if timed else row["epoch_token_equivalents"] / fastest for row in rows]
    colours = ["#1f77b4" if row["recommended"] else "#b8c7d9" for row in rows]
    left, right = figure.subplots(1, 2)
    left.bar(places, bars, color=colours)
    left.set_title("epoch, hours (predicted)" if timed else "epoch, relative to the fastest (predicted)")
    right.plot(places, [row["max_over_mean"] for row in rows], "o--", color="#999999", label="plan order")
    right.plot(
        places, [row["max_over_mean_balanced"] for row in rows], "o-", color="#1f77b4", label="balanced"
    )
    right.set_title("slowest rank / mean, a micro step")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xticks(list(places), [f"{row['pack_length']:,}" for row in rows])
        axes.set_xlabel("pack length")
        axes.spines[["top", "right"]].set_visible(False)
    made = io.BytesIO()
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(made, format=path.suffix[1:], metadata=metadata)
    with publish(path) as handle:
        handle.write(made.getvalue())


# --------------------------------------------------------------------------------------------
# The charts of a report, drawn by matplotlib as inline SVG
# --------------------------------------------------------------------------------------------
Points = Sequence[Sequence[float]]

_POINTS = 600  # most points of a curve
_DOTS = 120  # a curve of more points has none to hover over
_SIZE = (340, 200)  # units; about a pixel each where a chart has a column of its own

#: Colours that are drawn -> variables of the page.
_COLOURS = {
    "#010101": "--ink",
    "#020202": "--soft",
    "#030303": "--grid",
    "#040404": "--blue",
    "#050505": "--rose",
    "#060606": "--amber",
    "#070707": "--teal",
}
_INK, _SOFT, _GRID, BLUE, ROSE, AMBER, TEAL = _COLOURS
_OF_PART = {"packed": BLUE, "packs": BLUE, "ledger": ROSE}


#: What matplotlib writes and the page says once, or not at all.
_OF_NO_USE = re.compile(r"<style.*?</style>|font-family: [^;\"]*;? ?| transform=\"rotate\(-0 [^\"]*\"", re.S)


class Chart:
    """A figure of `parts` axes side by side; `hover` names what the pointer is told of an element."""

    def __init__(self, label: str, parts: Sequence[int] = (1,)) -> None:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        self._label = label
        self._hover: list[list[str]] = []
        self.figure = Figure(figsize=(_SIZE[0] / 72, _SIZE[1] / 72), layout="constrained")
        FigureCanvasSVG(self.figure)
        self.figure.patch.set_visible(False)
        grid = self.figure.subplots(1, len(parts), width_ratios=list(parts), sharey=True, squeeze=False)
        self.axes = list(grid[0])
        for axes in self.axes:
            axes.patch.set_visible(False)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.spines["bottom"].set_color(_SOFT)
            axes.tick_params(colors=_SOFT, labelcolor=_SOFT, length=0, labelsize=9.5)
            axes.tick_params(axis="x", pad=7)
            axes.grid(axis="y", color=_GRID)
            axes.set_axisbelow(True)

    def hover(self, artist: Any, *titles: str) -> None:
        artist.set_gid(f"hover-{len(self._hover)}")
        self._hover.append(list(titles))

    def named(self, x_label: str, y_label: str) -> None:
        self.figure.supxlabel(x_label, fontsize=9.5, color=_INK)
        self.axes[0].set_ylabel(y_label, fontsize=9.5, color=_INK)

    def broken(self) -> None:
        """Marks where the axis of the first part ends and that of the second goes on."""
        marks = {"marker": [(-0.5, -1), (0.5, 1)], "markersize": 8, "linestyle": "none", "color": _SOFT}
        for axes, x in zip(self.axes, (1, 0), strict=True):
            axes.plot([x], [0], transform=axes.transAxes, clip_on=False, **marks)

    def svg(self) -> str:
        import matplotlib

        made = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        settings: Any = {"svg.fonttype": "none", "svg.hashsalt": self._label}
        with matplotlib.rc_context(settings):
            self.figure.savefig(made, format="svg", metadata=nothing)
        text = made.getvalue()
        text = text[text.index("<svg") :].replace("xlink:href", "href")
        head = f'<svg viewBox="0 0 {_SIZE[0]} {_SIZE[1]}" role="img" aria-label="{escape(self._label)}">'
        text = re.sub(r"<svg[^>]*>", head, text, count=1)
        text = _OF_NO_USE.sub("", text)
        for number, titles in enumerate(self._hover):
            text = _titled(text, f'<g id="hover-{number}">', titles)
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        for colour, name in _COLOURS.items():
            text = text.replace(colour, f"var({name})")
        return re.sub(r"\s*\n\s*", "\n", text)


def _titled(text: str, begin: str, titles: Sequence[str]) -> str:
    """One title for a group, or one for each of its markers."""
    start = text.index(begin)
    stop = text.index("</g>", start)
    if len(titles) == 1 and "<use" not in text[start:stop]:
        shown = f'<g class="hover"><title>{escape(titles[0])}</title>'
        return text[:start] + shown + text[start + len(begin) :]
    left = iter(titles)

    def mark(found: re.Match[str]) -> str:
        title = escape(next(left, ""))
        return f'{found[1]} class="hover"><title>{title}</title></use>'

    return text[:start] + re.sub(r"(<use[^>]*)/>", mark, text[start:stop]) + text[stop:]


def histogram(
    found: Mapping[str, Any],
    label: str,
    x_label: str,
    y_label: str,
    mark: float | None = None,
    unit: str = "",
) -> str:
    """Stacked bars of a `numbers.Histogram.to_dict`; what lies beyond its edges behind a broken axis.

    Args:
        mark: a line at an x value (the pack length).
    """
    over = found["over_edges"]
    chart = Chart(label, (3, 1) if over else (1,))
    edges = np.asarray(found["edges"])
    _bars(chart, 0, edges, edges, found["counts"], unit)
    if over:
        _bars(chart, 1, np.arange(len(over)), over, found["over_counts"], unit)
        shown = sorted({0, len(over) - 1})
        chart.axes[1].set_xticks(shown, [compact(over[k]) + unit for k in shown])
        chart.broken()
    first = chart.axes[0]
    first.set_xlim(edges[0], edges[-1])
    first.margins(y=0.08)
    ticks = [tick for tick in first.get_xticks() if edges[0] <= tick <= edges[-1]]
    ticks = [tick for tick in ticks[:: 1 + len(ticks) // 6] if not over or tick < edges[-1]]
    first.set_xticks(ticks, [compact(tick, edges[-1]) + unit for tick in ticks])
    if mark is not None and edges[0] < mark <= edges[-1]:
        first.axvline(mark, color=_INK, linestyle="--", linewidth=1)
    _ticks(first.yaxis, whole=True)
    chart.named(x_label, y_label)
    return chart.svg()


def _bars(chart: Chart, part: int, places: Any, edges: Any, counts: Mapping[str, Any], unit: str) -> None:
    base = np.zeros(len(edges) - 1)
    for name, held in counts.items():
        bars = chart.axes[part].bar(
            places[:-1], held, width=np.diff(places) * 0.92, bottom=base, align="edge",
            color=AMBER if part and name == "packs" else _OF_PART[name],
        )  # fmt: skip
        for k, bar in enumerate(bars):
            if held[k]:
                span = f"{compact(float(edges[k]))} to {compact(float(edges[k + 1]))}{unit}"
                chart.hover(bar, f"{span}: {held[k]:,} {name}")
            else:
                bar.remove()
        base = base + np.asarray(held)


def _ticks(axis: Any, *, whole: bool) -> None:
    """Few and short numbers on an axis; whole ones where it counts."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=5, integer=whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))


def curve(lines: Mapping[str, Points], *, label: str, y_label: str) -> str:
    """Lines over steps, each `name -> [step, value] ...`, in the order of the page's legend."""
    chart = Chart(label)
    axes = chart.axes[0]
    wheel = itertools.cycle((BLUE, AMBER, TEAL, ROSE))
    for (name, points), colour in zip(lines.items(), wheel, strict=False):
        shown = thin(points)
        dots = len(shown) <= _DOTS
        (line,) = axes.plot(
            [x for x, _ in shown], [y for _, y in shown], color=colour, linewidth=1.5,
            marker="o" if dots else None, markersize=3, markeredgewidth=0,
        )  # fmt: skip
        if dots:
            chart.hover(line, *(f"{name}, step {x:g}: {y:.4g}" for x, y in shown))
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low) if low < 0.3 * high else low, high)
    _ticks(axes.xaxis, whole=True)
    _ticks(axes.yaxis, whole=False)
    chart.named("optimizer step", y_label)
    return chart.svg()


def thin(points: Points, most: int = _POINTS) -> list[tuple[float, float]]:
    """At most `most` points: means of equal runs; the first and the last point stay.

    >>> thin([(1, 8.0), (2, 6.0), (3, 4.0)], 10)
    [(1, 8.0), (2, 6.0), (3, 4.0)]
    """
    if len(points) <= most:
        return [(x, y) for x, y in points]
    inner = np.asarray(points[1:-1], dtype=np.float64)
    means = [run.mean(axis=0) for run in np.array_split(inner, most - 2)]
    first, last = points[0], points[-1]
    return [(first[0], first[1]), *((float(x), float(y)) for x, y in means), (last[0], last[1])]


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
