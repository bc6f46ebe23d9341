"""`packtrain run`: the main job, from raw samples to a trained model and a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..pipeline.unread import told
from ..world import world
from ._app import emit, end_of_training, progress, show_runtime
from ._recipe import KEYS, recipe_of, refuse_streams
from ._show import plan_rows, table
from .export import show_export

if TYPE_CHECKING:
    from ..pipeline.run import RunResult

__all__ = ["command"]

_BARS = "▁▂▃▄▅▆▇█"


@click.command("run", context_settings=KEYS)
@click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG")
@click.option("--output-dir", help="Instead of training.output_dir.")
@click.option("--overwrite", is_flag=True, help="Replace what the output folder holds of another run.")
@click.option(
    "--no-proof", is_flag=True, help="Skip the isolation proof before training: training.proof: false."
)
@click.option("--no-html", is_flag=True, help="Write no report.html.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    config: Path,
    output_dir: str | None,
    overwrite: bool,
    no_proof: bool,
    no_html: bool,
    as_json: bool,
) -> None:
    """Measure, plan, then train and report, or export (`export.format`), as CONFIG (YAML) says.

    Every key of CONFIG, under any of its names, can also be given as --section.key VALUE, and wins.

    \b
    Example:
      packtrain run examples/demo.yaml
      packtrain run examples/demo.yaml --training.num_train_epochs 3 --data.packer diverse
    """
    from ..pipeline.run import run
    from ..pipeline.run_export import run_export
    from ..train.config import load_config

    show_runtime()
    settings = load_config(config, recipe_of({"proof": False} if no_proof else {}, ctx.args))
    refuse_streams(settings)
    if output_dir is not None:
        training = settings.training.model_copy(update={"output_dir": output_dir})
        settings = settings.model_copy(update={"training": training})
    if settings.export.format is not None:
        figures = run_export(settings, overwrite=overwrite, stage=lambda name: progress(name, quiet=as_json))
        emit(figures) if as_json else show_export(figures)
        return
    settings = settings.resumed()
    result = run(
        settings,
        overwrite=overwrite,
        html=False if no_html else None,
        stage=lambda name: progress(name, quiet=as_json),
    )
    if world().is_writer:
        if as_json:
            emit({"run": str(result.folder), **result.figures})
        else:
            print_run(result)
    end_of_training()


def print_run(result: RunResult) -> None:
    """The closing table of a run, and the path of its report as the last line."""
    figures = result.figures
    rows: dict[str, Any] = {**plan_rows(result.plan)}
    rows["padding saved"] = (
        f"{figures['padding_saved']:.1%} of the slots of padded batches, "
        f"{figures['padding_saved_to_cap']:.1%} of one padded sample a row"
    )
    rows["lengths audited"] = f"{figures['audited']} samples encoded for real: 0 mismatches"
    if keys := told(figures["keys"]):
        rows["keys"] = keys
    if figures["truncation"]:
        rows["truncation"] = figures["truncation"]
    if figures["proof"] is not None:
        rows["isolation"] = f"proven before training ({figures['proof']} comparisons)"
    if figures["loss"] is not None:
        loss = figures["loss"]
        rows["packed - unpacked loss"] = (
            f"{loss['packed'] - loss['unpacked']:+.1e} ({loss['packed']:.5f} - {loss['unpacked']:.5f})"
        )
    if result.loss_curve:
        first, last = figures["loss_first"], figures["loss_last"]
        rows["training loss"] = f"{first:.3f} -> {last:.3f} ({1 - last / first:.0%} lower)"
        rows["loss curve"] = _spark([value for _, value in result.loss_curve])
    evaluated = figures["metrics"].get("eval_loss")
    if evaluated is not None:
        rows["validation loss"] = f"{evaluated:.4f} over {int(figures['metrics']['eval_tokens']):,} tokens"
    table(f"Run in {result.folder}", rows)
    if result.report is not None:
        click.echo(f"report: {result.report.resolve()}")


def _spark(values: list[float], width: int = 48) -> str:
    """A line of bars; several values share one bar when there are more than `width`."""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int((value - low) / span * 8))] for value in means)
