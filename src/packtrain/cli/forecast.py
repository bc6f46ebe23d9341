"""`packtrain forecast`: steps, balance, padding saved and time of an epoch, before a GPU is booked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import InputError, counted
from ._app import PATH, argument, emit, option, verb
from ._show import open_lengths


def _numbers(option: str, text: str, auto: str) -> list[int | str]:
    """Numbers, and the word `auto`, between commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    hint = f"for example {option} 4096,8192, or {auto}, or both: 4096,{auto}"
    if not words or not all(word == auto or (word.isascii() and word.isdecimal()) for word in words):
        raise InputError(f"{option} {text!r} is not a list of numbers", hint=hint)
    made = [word if word == auto else int(word) for word in words]
    if not all(made):
        raise InputError(f"{option} {text!r} holds 0, expected numbers >= 1", hint=hint)
    return made


@verb("forecast")
@argument("lengths", type=PATH, metavar="LENGTHS")
@option(
    "--pack-lengths",
    "--pack-length",
    help="Pack lengths to compare, such as 4096,8192; `auto`, also beside numbers: the powers of two that "
    "suit the lengths and the device.",
)
@option("--world-size", default=1, help="Ranks.")
@option("--grad-accum", default=1, help="Micro steps per optimizer step.")
@option(
    "--samples-per-step",
    type=int,
    help="Plan by steps of exactly this many samples; accumulation follows from the plan.",
)
@option("--long-samples", default="single", help="single, drop or error.")
@option(
    "--profile",
    type=PATH,
    help="Device profile (JSON): adds step time, hours and peak memory, and leaves out rows that do not fit.",
)
@option("--seed", default=0, help="Seed of the epoch order that is measured.")
@option("--plot", type=PATH, help="Also draw the choices to a `.svg` or `.png` file.")
def command(
    lengths: Path, pack_lengths: str | None, plot: Path | None, as_json: bool, **options: Any
) -> None:
    """Compare pack lengths for LENGTHS (a lengths folder, or a file of token counts as `plan` takes).

    \b
    Example:
      packtrain forecast lengths --pack-lengths 4096,8192,16384 --world-size 64 --grad-accum 4
      packtrain forecast lengths --pack-length auto --world-size 8 --profile h100.json --plot forecast.svg
    """
    from ..planning.forecast import AUTO, forecast

    tried = AUTO if pack_lengths is None else _numbers("--pack-lengths", pack_lengths, AUTO)
    rows = forecast(open_lengths(lengths), tried, **options)
    if plot is not None:
        from ..report.plots import draw_choices

        draw_choices(rows, plot)
    if as_json:
        emit({"lengths": str(lengths), "rows": rows, **({} if plot is None else {"plot": str(plot)})})
        return
    _print(rows)
    if plot is not None:
        click.echo(f"plot: {plot}")


def _print(rows: list[dict[str, Any]]) -> None:
    """One column per choice."""
    from rich.console import Console
    from rich.table import Table

    from ..planning.forecast import samples_words

    grid = Table(title=f"Forecast for {counted(rows[0]['samples'], 'samples')}", title_justify="left")
    grid.add_column("pack length", style="cyan")
    for row in rows:
        mark = " *" if row["recommended"] else ""
        grid.add_column(f"{row['pack_length']:,}{mark}", justify="right")
    for name, text in _LINES.items():
        cells = [_cell({**row, "samples_of_step": samples_words(row)}, text) for row in rows]
        if any(cells):
            grid.add_row(name, *cells)
    Console(markup=False, emoji=False).print(grid)
    for row in rows:
        if row["recommended"]:
            click.echo(f"* recommended: {row['pack_length']:,}: {row['why']}")


def _cell(row: dict[str, Any], text: str) -> str:
    try:
        return text.format(**row)
    except (KeyError, TypeError):
        return ""  # a figure that needs a device profile


_LINES = {
    "packs": "{packs:,}",
    "  over-long, longest": "{over_long_packs:,}, {longest_pack:,}",
    "efficiency": "{efficiency:.2%}",
    "samples per pack": "{samples_per_pack:.2f}",
    "long samples, alone": "{long_samples:,}",
    "dropped samples": "{dropped:,}",
    "micro steps a rank": "{micro_steps:,}",
    "micro steps a step": "{grad_accum:,}",
    "optimizer steps": "{optimizer_steps:,}",
    "  unpacked": "{optimizer_steps_unpacked:,}",
    "partial windows": "{partial_windows}",
    "repeated packs": "{repeated:,}",
    "fillers": "{fillers:,}",
    "tokens per step": "{tokens_per_step_mean:,.0f} (sd {tokens_per_step_sd:,.0f})",
    "samples per step": "{samples_of_step}",
    "saved, padded to the cap": "{saved_padded:.1%}",
    "samples of a batch, n": "{batch_rows:,}",
    "  saved, padded batches of n": "{saved_batched:.1%}",
    "  saved, bucketed batches of n": "{saved_bucketed:.1%}",
    "max/mean a micro step": "{max_over_mean:.3f}",
    "  balanced": "{max_over_mean_balanced:.3f}",
    "  over step totals": "{max_over_mean_step:.3f}",
    "step": "{step_seconds:.3f} s",
    "epoch": "{epoch_hours:.2f} h",
    "peak memory": "{peak_bytes:,.0f} bytes",
}
