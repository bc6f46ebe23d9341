"""Draw the pictures of the concept pages from real plans: docs/pictures/*.svg.

python scripts/pictures.py          (a test fails when a picture is not up to date)
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import packtrain as pt

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
#: Seen on a white page and on a dark one.
COLOURS = ("#4c8bd0", "#d0764c", "#57a868", "#9a6fc0", "#c9a43a", "#4aa7a7", "#c75d8c", "#7d8791")
INK, FREE, WRONG = "#808890", "#8088903a", "#d63c3c"
LENGTHS = [30, 30, 20, 60, 50, 10, 40, 30]
CAP = 80


def sheet(titles: list[str], height: float = 2.6) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8.2, height), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    axes = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for one, title in zip(axes, titles, strict=True):
        one.set_title(title, color=INK, fontsize=10)
        one.patch.set_visible(False)
        one.tick_params(colors=INK, length=0, labelsize=8)
        for side in one.spines.values():
            side.set_visible(False)
    return figure, axes


def rows(axes: Axes, held: list[list[int]], cap: int, unit: str) -> None:
    """One bar a row: its samples, then what is empty."""
    for y, ids in enumerate(held):
        x = 0
        axes.add_patch(Rectangle((0, y - 0.36), cap, 0.72, facecolor=FREE))
        for number in ids:
            size = LENGTHS[number]
            axes.add_patch(Rectangle((x, y - 0.36), size - 0.6, 0.72, facecolor=COLOURS[number % 8]))
            axes.text(x + size / 2, y, str(number), color="white", ha="center", va="center", fontsize=8)
            x += size
    axes.set(xlim=(0, cap), ylim=(len(held) - 0.5, -0.5), yticks=[], xlabel="tokens")
    axes.xaxis.label.set_color(INK)
    axes.set_ylabel(unit, color=INK)


def planning() -> Figure:
    plan = pt.plan(LENGTHS, pack_length=CAP)
    packs = [pack.tolist() for pack in plan]
    longest = max(LENGTHS)
    share = sum(LENGTHS) / (longest * len(LENGTHS))
    full = sum(LENGTHS) / (CAP * len(packs))
    figure, axes = sheet(
        [f"padded: {share:.0%} of the slots are tokens", f"packed to {CAP}: {full:.0%} of the slots"]
    )
    rows(axes[0], [[number] for number in range(len(LENGTHS))], longest, "samples")
    rows(axes[1], packs, CAP, "packs")
    return figure


def attention() -> Figure:
    sizes = (5, 3, 4)
    owner = np.repeat(np.arange(3), sizes)
    figure, axes = sheet(
        ["causal mask alone: samples read each other", "with boundaries: each reads itself"], 3.2
    )
    for one, apart in zip(axes, (False, True), strict=True):
        for query in range(owner.size):
            for key in range(query + 1):
                same = owner[query] == owner[key]
                if same or not apart:
                    colour = COLOURS[owner[query]] if same else WRONG
                    one.add_patch(
                        Rectangle((key, query), 0.92, 0.92, facecolor=colour, alpha=1 if same else 0.55)
                    )
        one.set(xlim=(0, owner.size), ylim=(owner.size, 0), aspect="equal")
        one.set(xticks=np.arange(owner.size) + 0.46, yticks=np.arange(owner.size) + 0.46)
        restart = [str(place) for size in sizes for place in range(size)]
        one.set_xticklabels(restart)
        one.set_yticklabels(restart)
        one.set_xlabel("position of the token that is read", color=INK)
        one.set_ylabel("position of the reader", color=INK)
    return figure


def steps() -> Figure:
    plan = pt.plan([CAP] * 12, pack_length=CAP)
    figure, axes = sheet([f"epoch {epoch}: 12 packs, 2 ranks, 2 accumulated" for epoch in (0, 1)], 1.9)
    for epoch, one in enumerate(axes):
        for rank in range(2):
            for place, number in enumerate(plan.epoch(seed=0, epoch=epoch, rank=rank, world_size=2).tolist()):
                x = place + 0.25 * (place // 2)
                one.add_patch(Rectangle((x, rank + 0.06), 0.9, 0.88, facecolor=COLOURS[place // 2]))
                one.text(
                    x + 0.45, rank + 0.5, str(number), color="white", ha="center", va="center", fontsize=9
                )
        one.set(xlim=(0, 6.5), ylim=(2, 0), yticks=[0.5, 1.5], xticks=[0.95, 3.2, 5.45])
        one.set_yticklabels(["rank 0", "rank 1"])
        one.set_xticklabels(["step 0", "step 1", "step 2"])
    return figure


def streaming() -> Figure:
    """4 splits; pack g is turn g // 4 of split g % 4, whoever reads it."""
    readers = ((0, 6, 2), (6, 12, 4))
    titles = [f"packs {first} to {last - 1}: {count} readers" for first, last, count in readers]
    figure, axes = sheet(titles, 1.9)
    for one, (first, last, count) in zip(axes, readers, strict=True):
        for pack in range(first, last):
            x, split, reader = pack - first, pack % 4, (pack - first) % count
            one.add_patch(Rectangle((x, reader + 0.06), 0.9, 0.88, facecolor=COLOURS[split]))
            text = f"{pack}\nsplit {split}"
            one.text(x + 0.45, reader + 0.5, text, color="white", ha="center", va="center", fontsize=7)
        one.set(xlim=(0, last - first), ylim=(count, 0), yticks=np.arange(count) + 0.5, xticks=[])
        one.set_yticklabels([f"reader {reader}" for reader in range(count)])
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "planning": planning,
    "attention": attention,
    "steps": steps,
    "streaming": streaming,
}


def svg(name: str) -> str:
    """The picture, the same bytes at every call."""
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        buffer = io.StringIO()
        PICTURES[name]().savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for one in PICTURES:
        (FOLDER / f"{one}.svg").write_text(svg(one), encoding="utf-8")
