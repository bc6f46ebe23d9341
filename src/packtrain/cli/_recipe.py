"""Options of `run` and `train` that stand for keys, and the runs of data without a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import files
from ..errors import InputError, counted, nearest
from ..store import shards
from ..version import __version__
from ..workers import own_process
from ..world import World, world
from ._app import emit, end_of_training, progress
from ._show import plan_rows, print_run, stream_figures, stream_rows, table

if TYPE_CHECKING:
    from ..pipeline.prepare import Stage
    from ..train.config import RunConfig

#: Context settings of a verb that takes every key of the YAML as `--section.key VALUE`.
KEYS = {"ignore_unknown_options": True, "allow_extra_args": True}

no_proof_option = click.option(
    "--no-proof",
    is_flag=True,
    help="Skip the isolation proof before training, with a warning (`training.proof: false`); "
    "models nobody has shown to isolate are still refused.",
)

_SECTIONS = ("model", "template", "data", "custom", "training", "train", "report", "export")


def recipe_of(options: Mapping[str, Any], further: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Options that were given, by the section of their key.

    Args:
        options: those that the verb names.
        further: `--section.key VALUE` or `--section.key=VALUE`, values as in YAML. Names that other systems
            have, and fields of transformers' TrainingArguments, need no section: `--streaming true`.

    Raises:
        click.UsageError: an argument is neither.
    """
    from ..train.config.aliases import FOREIGN

    given = {name: value for name, value in options.items() if value is not None}
    custom = {"dataset": given.pop("dataset")} if "dataset" in given else {}
    recipe: dict[str, dict[str, Any]] = {"custom": custom, "training": given}
    words = list(further)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        section, dot, key = name.removeprefix("--").replace("-", "_").partition(".")
        if not dot and word.startswith("--") and _of_training(section):
            section, dot, key = "training", ".", section
        if not (name.startswith("--") and dot and key and section in _SECTIONS):
            meant = FOREIGN.get(section) or _meant(section)
            raise click.UsageError(f"no such option or argument: {word}; {meant}")
        if not equals and not words:
            raise click.UsageError(f"{name} needs a value")
        value = files.parse_yaml(text if equals else words.pop(0), name)
        recipe.setdefault("training" if section == "train" else section, {})[key] = value
    return recipe


def _meant(word: str) -> str:
    """The key that a word without a section comes close to."""
    from ..train.config.sections import TrainingConfig
    from ..train.config.trainer_keys import trainer_fields

    close = nearest(word, [*TrainingConfig.model_fields, *trainer_fields()], 0.8)
    said = "keys of CONFIG are --section.key VALUE"
    return said if close is None else f"did you mean --training.{close}? {said}"


def _of_training(key: str) -> bool:
    """Is this a key of `training`, under any of its names, or a field of transformers' TrainingArguments?"""
    from ..train.config.aliases import IGNORED, MOVED, old_names
    from ..train.config.sections import TrainingConfig
    from ..train.config.trainer_keys import trainer_fields

    known = {*old_names("training"), *TrainingConfig.model_fields, "padding_free"} - {"trainer"}
    return key in known or f"training.{key}" in {*MOVED, *IGNORED} or key in trainer_fields()


def show_result(folder: Path, figures: Mapping[str, Any], as_json: bool, plan: Any = None) -> None:
    """What a training run came to, told by the writing rank; every rank ends here."""
    if world().is_writer:
        emit({"run": str(folder), **figures}) if as_json else print_run(folder, dict(figures), plan)
    end_of_training()


def refuse_streams(config: RunConfig) -> None:
    """`run` plans, trains and compares; packs of other kinds can only be trained on.

    Raises:
        InputError: the configuration is of such a training.
    """
    if config.data.kind != "planned":
        raise InputError(
            f"data of kind {config.data.kind} have no plan to run", hint="use packtrain train CONFIG"
        )


def train_packs(
    config: RunConfig,
    *,
    dry_run: World | None,
    overwrite: bool,
    as_json: bool,
    page: bool,
    told: Sequence[str] = (),
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
    stage = _stage(as_json)
    if dry_run is not None:
        with validation(config, overwrite=overwrite, stage=stage, place=World(0, 1)):
            _dry_run(config, named, source, template, dry_run, as_json)
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


def _dry_run(
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


def no_page(config: RunConfig, told: list[str]) -> bool:
    """Whether the page that is wanted cannot be written; one warning, which `told` gets too."""
    from ..train.early import missing_of_page

    lacking = missing_of_page() if config.report.html else None
    if lacking is None:
        return False
    told.append(f"no report.html: it needs {lacking} (pip install 'packtrain[report]')")
    click.echo(f"warning: {told[-1]}", err=True)
    return True


def _stage(quiet: bool) -> Stage:
    return lambda name: progress(name, quiet=quiet or not world().is_writer)


def _figures(config: RunConfig, named: dict[str, Any], trained: Any) -> dict[str, Any]:
    """What stands in `run.json` of packs that were not planned here."""
    from ..pipeline.run import training_figures

    figures = {"packtrain": __version__, **named, "world_size": world().size}
    if config.data.kind == "exported":
        plan = shards.hidden(shards.at(config.data.path), "plan")
        figures |= {"plan_folder": str(plan.resolve())} if (plan / "plan.json").is_file() else {}
    return figures | training_figures(trained)
