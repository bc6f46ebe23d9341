"""`packtrain train`: train on the plan of a configuration, measuring and planning where that is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import files
from ..checks import whole
from ..errors import InputError, counted
from ..store import shards
from ..version import __version__
from ..workers import own_process
from ..world import World, world
from ._app import PATH, argument, emit, flag, option, progress, show_runtime, stages, verb
from ._options import KEYS, no_page, no_proof_option, recipe_of, show_result
from ._show import plan_rows, stream_figures, stream_rows, table

if TYPE_CHECKING:
    from ..train.config import RunConfig


@verb("train", context_settings=KEYS)
@argument("config", type=PATH, metavar="CONFIG")
@flag(
    "--dry-run",
    help="Check all that a run checks, measure and plan, print the resolved runtime (of a stream its first "
    "pack), stop before a model is built.",
)
@option("--world-size", type=int, help="Ranks to resolve for; default as launched; only with `--dry-run`.")
@flag("--overwrite", help="Replace what the output folder holds of another run.")
@option("--dataset", help="Directory of chunks that may grow: `data.path`.")
@option("--sharded_lazy", type=bool, help="Read it while it grows: data.kind growing.")
@option("--sharded_lazy_pre_packed", type=bool, help="It holds packs: has to be true.")
@option("--packing", type=bool, help="data.packing; false for packs that were made before.")
@option("--train_dataloader_shuffle", type=bool, help="data.shuffle; false for growing directories.")
@no_proof_option
@option("--max_steps", type=int, help="training.max_steps.")
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
        _train_packs(settings, place if dry_run else None, overwrite, as_json, page, told)
        return
    if dry_run:
        _dry_run(settings, place, overwrite, as_json)
        return
    result = run(
        settings,
        overwrite=overwrite,
        compare=False,
        html=False if lacking else None,
        stage=stages(as_json),
        told=told,
    )
    show_result(result.folder, result.figures, as_json, result.plan)


def _dry_run(settings: RunConfig, place: World, overwrite: bool, as_json: bool) -> None:
    from ..pipeline.run import dry_run

    runtime = dry_run(settings, overwrite=overwrite, stage=stages(as_json), place=place)
    values = runtime.to_dict()
    if as_json:
        emit(values)
        return
    shown = {name: str(value) for name, value in values.items() if name not in ("warnings", "eval")}
    rows = {name.replace("_", " "): value for name, value in shown.items()}
    table(f"{settings.training.output_dir} on {counted(place.size, 'ranks')}", rows)
    for warning in runtime.warnings:
        click.echo(f"warning: {warning}")


def _train_packs(
    config: RunConfig, dry_run: World | None, overwrite: bool, as_json: bool, page: bool, told: Sequence[str]
) -> None:
    """Train on packs that are not planned here, and write `run.json`; a dry run shows what they are.

    Args:
        dry_run: the ranks that a dry run is for; None: training.
        page: write report.html.
        told: warnings of reading the configuration, for run.json.
    """
    from ..measuring.run import drained
    from ..pipeline.inputs import Inputs, open_exported
    from ..pipeline.page import Report
    from ..pipeline.prepare import as_validation, validation
    from ..pipeline.run import Heard, finish_run
    from ..train import train
    from ..train.config import Exported
    from ..train.early import check_template

    source: Any = None
    template: Any = None
    data = config.data
    streamed = data.kind in ("stream", "token_budget")
    if streamed:
        inputs = Inputs.of_config(config)
        source = inputs.open_source()
        template = inputs.open_template(source)
        named: dict[str, Any] = {"source": inputs.source}
    else:
        named = {"dataset": str(getattr(data, "path", ""))}
    if isinstance(data, Exported):
        source, template = open_exported(config, data)
    if data.kind != "growing":
        check_template(config, template, source if streamed else None)

    def stage(name: str) -> Any:
        return progress(name, quiet=as_json or not world().is_writer)

    if dry_run is not None:
        with validation(config, overwrite=overwrite, stage=stage, place=World(0, 1)):
            _show_packs(config, named, source, template, dry_run, as_json)
        return
    folder = Path(config.training.output_dir)
    with (
        Heard() as heard,
        validation(config, overwrite=overwrite, stage=stage) as val,
        stage("training") as report,
        own_process(),
    ):
        if world().is_writer:
            files.remove_leftovers(folder)
        trained = train(
            config,
            None,
            source,
            template,
            val=as_validation(val),
            val_template=None if streamed else next((one.template for one in val.values()), None),
            progress=report,
        )
    if streamed:
        named["keys"] = drained(source)
    figures: dict[str, Any] = {}
    if world().is_writer:
        figures = _figures(config, named, trained)
        figures["warnings"] = list(dict.fromkeys((*told, *heard.lines)))
        made = Report.of_run(folder, config.to_dict(), figures)
        figures["left_out"] = made.figures()["ledger"]
        if page:
            path = made.write(folder / "report.html", title=f"packtrain run {folder.name}")
            figures["report"] = str(path)
        finish_run(folder, config.to_dict(), figures)
        figures = {**trained.metrics, **figures} if as_json else figures
    show_result(folder, figures, as_json)


def _show_packs(
    config: RunConfig, named: Mapping[str, Any], source: Any, template: Any, place: World, as_json: bool
) -> None:
    """What the packs are, or of a stream the first one; where they would go on is checked as in a run.

    Raises:
        InputError: the stream has no pack.
        ForeignArtefactError: the checkpoint to resume from is of other packs.
    """
    from ..train.resume import checkpoint_of, load_position
    from ..train.sft import unplanned_packs

    if config.data.kind == "growing":
        figures = stream_figures(Path(named["dataset"]))
        emit(figures) if as_json else table(f"Chunks in {named['dataset']}", stream_rows(figures))
        return
    packs, _, accumulation = unplanned_packs(config, source, template, place)
    asked = config.training.trainer.get("resume_from_checkpoint")
    load_position(packs, checkpoint_of(packs, asked, config.training.output_dir))
    if config.data.kind == "exported":
        plan = source.plan
        figures = {"packs": len(plan), "checksum": plan.checksum, **plan.stats()}
        emit(figures) if as_json else table(f"Packs in {named['dataset']}", plan_rows(plan))
        return
    first = packs.peek(1)
    if not first:
        raise InputError(f"{named['source']} gives no pack", hint="packtrain measure tells why")
    figures = {
        "source": named["source"],
        "world_size": place.size,
        "packing_length": packs.pack_length,
        "gradient_accumulation_steps": accumulation,
        "packs_per_step_realised": accumulation * place.size,
        "steps": config.training.max_steps,
        "first_pack": {"samples": len(first[0].ids), "tokens": int(sum(first[0].lengths))},
    }
    if as_json:
        emit(figures)
        return
    pack = figures.pop("first_pack")
    words = f"{counted(pack['samples'], 'samples')}, {counted(pack['tokens'], 'tokens')}"
    rows = {name.replace("_", " "): value for name, value in figures.items()}
    table(f"Packs of kind {config.data.kind}, nothing written", {**rows, "first pack": words})


def _figures(config: RunConfig, named: dict[str, Any], trained: Any) -> dict[str, Any]:
    """What stands in `run.json` of packs that were not planned here."""
    from ..pipeline.run import training_figures

    figures = {"packtrain": __version__, **named, "world_size": world().size}
    if config.data.kind == "exported":
        plan = shards.hidden(shards.at(config.data.path), "plan")
        figures |= {"plan_folder": str(plan.resolve())} if (plan / "plan.json").is_file() else {}
    return figures | training_figures(trained)
