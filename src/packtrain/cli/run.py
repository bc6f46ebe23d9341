"""`packtrain run`: the main job, from raw samples to a trained model and a report."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import InputError
from ._app import PATH, argument, emit, flag, option, show_runtime, stages, verb
from ._options import KEYS, no_page, no_proof_option, recipe_of, show_result
from .export import show_export


@verb("run", context_settings=KEYS)
@argument("config", type=PATH, metavar="CONFIG")
@option("--output-dir", help="Instead of `training.output_dir`.")
@flag("--overwrite", help="Replace what the output folder holds of another run.")
@no_proof_option
@flag("--no-html", help="Write no `report.html`.")
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
    from ..pipeline.run import Heard, run, run_export
    from ..train.config import load_config

    show_runtime()
    with Heard() as heard:
        settings = load_config(config, recipe_of({"proof": False} if no_proof else {}, ctx.args))
    if (kind := settings.data.kind) != "planned":  # those can only be trained on
        raise InputError(f"data of kind {kind} have no plan to run", hint="use packtrain train CONFIG")
    if output_dir is not None:
        training = settings.training.model_copy(update={"output_dir": output_dir})
        settings = settings.model_copy(update={"training": training})
    if settings.export.format is not None:
        figures = run_export(settings, overwrite=overwrite, stage=stages(as_json))
        emit(figures) if as_json else show_export(figures)
        return
    settings = settings.resumed()
    result = run(
        settings,
        overwrite=overwrite,
        html=False if no_html or no_page(settings, heard.lines) else None,
        stage=stages(as_json),
        told=heard.lines,
    )
    show_result(result.folder, result.figures, as_json, result.plan)
