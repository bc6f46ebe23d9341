"""The plot of a forecast: epoch time and max/mean over pack lengths, the recommended one marked."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import publish

__all__ = ["draw_choices"]


def draw_choices(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draw rows of `packtrain.forecast` to a .svg or .png file.

    Raises:
        InputError: another suffix, or matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise InputError(f"{path} is neither .svg nor .png", hint="for example --plot forecast.svg")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib", hint="pip install 'packtrain[report]'") from None
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
