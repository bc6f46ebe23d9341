"""`packtrain train`: train on the plan of a configuration, measuring and planning where that is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checks import whole
from ..errors import InputError, counted
from ..world import World, world
from ._app import PATH, emit, progress, show_runtime, verb
from ._recipe import KEYS, no_page, no_proof_option, recipe_of, show_result, train_packs
from ._show import table

if TYPE_CHECKING:
    from ..train.config import RunConfig


@verb("train", context_settings=KEYS)
@click.argument("config", type=PATH, metavar="CONFIG")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check all that a run checks, measure and plan, print the resolved runtime (of a stream its first "
    "pack), stop before a model is built.",
)
@click.option(
    "--world-size", type=int, help="Ranks to resolve for; default as launched; only with `--dry-run`."
)
@click.option("--overwrite", is_flag=True, help="Replace what the output folder holds of another run.")
@click.option("--dataset", help="Directory of chunks that may grow: `data.path`.")
@click.option("--sharded_lazy", type=bool, help="Read it while it grows: data.kind growing.")
@click.option("--sharded_lazy_pre_packed", type=bool, help="It holds packs: has to be true.")
@click.option("--packing", type=bool, help="data.packing; false for packs that were made before.")
@click.option("--train_dataloader_shuffle", type=bool, help="data.shuffle; false for growing directories.")
@no_proof_option
@click.option("--max_steps", type=int, help="training.max_steps.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    config: Path,
    dry_run: bool,
    world_size: int | None,
    overwrite: bool,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Train as CONFIG (YAML) says; lengths and plan in its output folder are used when they are equal.

    Unlike `run`, it does not compare packed with unpacked loss. Every key of CONFIG, under any of its names,
    can also be given as --section.key VALUE, and wins; keys of `training` need no section.

    \b
    Example:
      packtrain train examples/demo.yaml
      packtrain train examples/demo.yaml --dry-run --world-size 8
      torchrun --nproc-per-node 2 -m packtrain train examples/demo.yaml
      packtrain train run.yaml --dataset packed/ --sharded_lazy true --sharded_lazy_pre_packed true
        --packing false --train_dataloader_shuffle false
      packtrain train run.yaml --max_steps 100 --train.dyn_bsz true --train.micro_batch_size 2
    """
    from ..pipeline.run import Heard, run
    from ..train.config import load_config

    show_runtime()
    if recipe.pop("no_proof"):
        recipe["proof"] = False
    with Heard() as heard:
        settings = load_config(config, recipe_of(recipe, ctx.args))
    told = heard.lines
    settings = settings.resumed()
    place = world()
    if world_size is not None and not dry_run:
        raise InputError(
            "--world-size needs --dry-run",
            hint="the launcher says how many ranks train, for example torchrun",
        )
    if world_size is not None:
        place = World(0, whole("--world-size", world_size, 1))
    if dry_run and not place.is_writer:
        return
    lacking = not dry_run and no_page(settings, told)
    if settings.data.kind != "planned":
        from ..train.early import check_early

        settings = settings.evaluated(settings.data.val is not None)
        check_early(settings, needs_model=not dry_run, place=place)
        page = settings.report.html and not lacking
        dry = place if dry_run else None
        train_packs(settings, dry_run=dry, overwrite=overwrite, as_json=as_json, page=page, told=told)
        return
    if dry_run:
        _dry_run(settings, place, overwrite, as_json)
        return
    result = run(
        settings,
        overwrite=overwrite,
        compare=False,
        html=False if lacking else None,
        stage=lambda name: progress(name, quiet=as_json),
        told=told,
    )
    show_result(result.folder, result.figures, as_json, result.plan)


def _dry_run(settings: RunConfig, place: World, overwrite: bool, as_json: bool) -> None:
    from ..pipeline.run import dry_run

    runtime = dry_run(
        settings, overwrite=overwrite, stage=lambda name: progress(name, quiet=as_json), place=place
    )
    values = runtime.to_dict()
    if as_json:
        emit(values)
        return
    shown = {name: str(value) for name, value in values.items() if name not in ("warnings", "eval")}
    rows = {name.replace("_", " "): value for name, value in shown.items()}
    table(f"{settings.training.output_dir} on {counted(place.size, 'ranks')}", rows)
    for warning in runtime.warnings:
        click.echo(f"warning: {warning}")
