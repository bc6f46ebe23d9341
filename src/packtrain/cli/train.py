"""`packtrain train`: train on the plan of a configuration, measuring and planning where that is missing."""

from __future__ import annotations

from pathlib import Path

import click

from ._app import emit, progress
from .run import print_run

__all__ = ["command"]


@click.command("train")
@click.argument("config", type=click.Path(path_type=Path), metavar="CONFIG")
@click.option("--overwrite", is_flag=True, help="Replace what the output folder holds of another run.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def command(config: Path, overwrite: bool, as_json: bool) -> None:
    """Train as CONFIG (YAML) says; lengths and plan in its output folder are used when they are equal.

    Unlike `run`, it neither compares packed with unpacked loss nor writes a page.

    \b
    Example:
      packtrain train examples/demo.yaml
    """
    from ..pipeline.run import run
    from ..train.config import load_config

    result = run(
        load_config(config),
        overwrite=overwrite,
        compare=False,
        html=False,
        stage=lambda name: progress(name, quiet=as_json),
    )
    if as_json:
        emit({"run": str(result.folder), **result.figures})
    else:
        print_run(result)
