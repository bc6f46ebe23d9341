"""The main job: measure, audit, plan, train on the plan, compare, report. One folder holds it all.

    <output_dir>/lengths  plan  val_lengths  val_plan     artefacts, as the single verbs write them
                 startup/                                 who writes here, and its heartbeat
                 train_log.jsonl  failed.jsonl  sample_loss/  model/     what training leaves
                 report.html  run.json                     the page, and the figures (written last)

Every stage is found again when it is there and equal, so a stopped run goes on. `run.json` is removed at the
start and written at the end: a folder with it is a finished run. On many ranks one process makes the
artefacts while the others wait on files (`ranks`), before any process group exists; rank 0 alone compares and
reports.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..errors import ConfigError, counted
from ..planning.costs import DeviceProfile
from ..planning.packplan import PackPlan
from ..version import __version__
from ..world import World, world
from .export import export, format_of, refuse_foreign
from .page import Report, read_history, training_of
from .plan import told_truncated
from .prepare import Prepared, Stage, as_validation, prepare, prepare_ranks, silent
from .publish import read_keys
from .ranks import StartUp
from .which import order_of_config

if TYPE_CHECKING:
    from ..train.calibrate import Calibration
    from ..train.config import RunConfig
    from ..train.runtime import Runtime
    from ..train.sft import TrainResult


#: Packed and unpacked loss of the trained model differ by less, or something leaks (float32 noise is 1e-7).
_TOLERANCE = 1e-4

#: Packs whose samples are also evaluated one by one at the end, evenly spaced over the plan.
COMPARED = 64


@dataclass(kw_only=True)
class RunResult:
    """What a run found. `figures` is plain JSON and stands in `run.json`."""

    folder: Path
    plan: PackPlan
    figures: dict[str, Any]
    report: Path | None = None
    loss_curve: list[tuple[int, float]] = field(default_factory=list)


def run(
    config: RunConfig,
    *,
    overwrite: bool = False,
    compare: bool = True,
    html: bool | None = None,
    stage: Stage | None = None,
    place: World | None = None,
    told: Sequence[str] = (),
) -> RunResult:
    """The main job of a configuration, on this rank.

    Args:
        config: from `train.load_config`.
        overwrite: replace what `training.output_dir` holds of another run.
        compare: also evaluate the trained model sample by sample, to print packed minus unpacked loss.
        html: write report.html; None = as the configuration says.
        stage: progress display per stage (rank 0).
        place: rank and world size; None: from the launcher's environment.
        told: warnings of reading the configuration, for run.json.

    Raises:
        PacktrainError: what any stage raises; see `prepare`, `train.train`.
    """
    from ..train import train
    from ..train.early import check_early
    from ..train.runtime import check_runtime, resolve_runtime

    place = place or world()
    check_runtime(config, place.size)
    config = config.evaluated(config.data.val is not None)
    check_early(config, page=config.report.html if html is None else html, place=place)
    shown = stage if stage is not None and place.is_writer else silent
    folder = Path(config.training.output_dir)
    _steady(config)
    with (
        Heard() as heard,
        StartUp(folder, place=place, timeout_s=config.data.wait_timeout_s) as start,
    ):
        prepared, checked = prepare_ranks(
            config,
            start,
            before=(lambda: files.remove(folder / "run.json")) if overwrite else None,
            overwrite=overwrite,
            stage=shown,
        )
        if place.is_writer:
            files.remove_leftovers(folder)
        start.calm()
        runtime = resolve_runtime(
            config, prepared.plan, place.size, {name: one.plan for name, one in checked.items()}
        )
        if place.is_writer:
            runtime.log()
        with shown("training") as done, _group():
            trained = train(
                config,
                prepared.plan,
                prepared.source,
                prepared.template,
                lengths=prepared.lengths,
                val=as_validation(checked),
                place=place,
                runtime=runtime,
                progress=done,
            )
        start.check()
        comparison = _compare(config, prepared, trained, shown) if compare and place.is_writer else None
        figures = _figures(config, prepared, trained, comparison, runtime)
        if checked:
            figures["validation_folders"] = {
                name: {"lengths": str(one.lengths_folder), "plan": str(one.plan_folder)}
                for name, one in checked.items()
            }
        figures["warnings"] = list(dict.fromkeys((*told, *heard.lines)))
        page = None
        if place.is_writer:
            if config.report.html if html is None else html:
                report = _page(folder, config, prepared, trained, figures)
                told_by = config.training.device_profile
                page = report.write(
                    folder / "report.html",
                    title=f"packtrain run {folder.name}",
                    profile=None if told_by is None else DeviceProfile.load(told_by),
                )
                figures["report"] = str(page)
            finish_run(folder, config.to_dict(), figures)
    return RunResult(
        folder=folder, plan=prepared.plan, figures=figures, report=page, loss_curve=trained.losses
    )


def dry_run(
    config: RunConfig, *, overwrite: bool = False, stage: Stage | None = None, place: World | None = None
) -> Runtime:
    """Measure and plan as `run` would on `place.size` ranks, and stop before a model is built.

    The world size may be any: this one process makes the artefacts, a later run finds them. A plan by steps
    of samples depends on the world size and is not written.
    """
    from ..train.early import check_early
    from ..train.runtime import check_runtime, resolve_runtime
    from ..train.sft import planned_packs

    place = place or world()
    check_runtime(config, place.size)
    config = config.evaluated(config.data.val is not None)
    check_early(config, needs_model=False, place=place)
    prepared, checked = _prepared_alone(config, place.size, overwrite, stage)
    val = {name: one.plan for name, one in checked.items()}
    runtime = resolve_runtime(config, prepared.plan, place.size, val, prepared.lengths)
    runtime.log()
    planned_packs(
        config,
        prepared.plan,
        prepared.source,
        prepared.template,
        prepared.lengths,
        place,
        runtime.gradient_accumulation_steps,
        ahead=False,
    )
    return runtime


def calibrate_run(config: RunConfig, *, overwrite: bool = False, stage: Stage | None = None) -> Calibration:
    """Measure and plan as `run` would, and train some packs to tell what they cost on this device.

    Raises:
        PacktrainError: what any stage raises; see `train.calibrate`.
    """
    from ..train.calibrate import calibrate
    from ..train.early import check_early
    from ..train.runtime import check_runtime

    training = config.training.model_copy(update={"device_profile": None})  # it may be what is made here
    config = config.model_copy(update={"training": training})
    check_runtime(config, 1)
    check_early(config, page=False, place=World(0, 1))
    prepared, _ = _prepared_alone(config, 1, overwrite, stage)
    with (stage or silent)("calibrating") as done:
        return calibrate(
            config, prepared.plan, prepared.source, prepared.template, prepared.lengths, progress=done
        )


def _prepared_alone(
    config: RunConfig, ranks: int, overwrite: bool, stage: Stage | None
) -> tuple[Prepared, dict[str, Prepared]]:
    """The inputs of a run on so many ranks, made by this process; a plan that depends on them is not kept."""
    folder, keep = Path(config.training.output_dir), config.training.samples_per_step is None
    with StartUp(folder, place=World(0, 1), timeout_s=config.data.wait_timeout_s) as start:
        return prepare_ranks(
            config, start, overwrite=overwrite, stage=stage, world_size=ranks, keep_plan=keep
        )


def training_figures(trained: TrainResult) -> dict[str, Any]:
    """What `run.json` holds of a training, whatever its packs were."""
    told: dict[str, Any] = {"metrics": trained.metrics}
    if trained.losses:
        told |= {"loss_first": trained.losses[0][1], "loss_last": trained.losses[-1][1]}
    return {**told, "consumed": trained.consumed, "proof": trained.proven}


def finish_run(folder: Path, config: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """The folder is a finished run: its configuration and what it found, plain JSON."""
    files.publish_json(
        folder / "run.json",
        {"schema": "packtrain.run/1", "config": dict(config), "result": dict(figures)},
    )


def _compare(config: RunConfig, prepared: Prepared, trained: TrainResult, shown: Stage) -> dict[str, Any]:
    """Loss of the trained model over packed and over single samples, of `COMPARED` packs at most."""
    from ..data import PackedDataset
    from ..train import evaluate_packed_vs_unpacked

    dataset = PackedDataset(
        prepared.plan,
        prepared.source,
        prepared.template.encode,
        lengths=prepared.lengths,
        on_error=config.training.on_error,
        ledger_file=Path(config.training.output_dir) / "failed.jsonl",
    )
    with shown("comparing packed with unpacked") as report:
        found = evaluate_packed_vs_unpacked(trained.model, dataset, most=COMPARED, progress=report)
    return {
        "packs": found.packs,
        "packed": found.packed,
        "unpacked": found.unpacked,
        "difference": found.difference,
        "tolerance": _TOLERANCE,
    }


#: Warnings of one form (of single samples, that is) that are kept.
_ALIKE = 5


class Heard(logging.Handler):
    """The warnings of this package inside of the block, once each, and the first of those that are alike."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._alike: dict[str, set[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        alike, line = self._alike.setdefault(str(record.msg), set()), record.getMessage()
        if line in alike or len(alike) > _ALIKE:
            return
        alike.add(line)
        self.lines.append(line if len(alike) <= _ALIKE else "… and more like these, in the log")

    def __enter__(self) -> Heard:
        logging.getLogger("packtrain").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("packtrain").removeHandler(self)


class _group:
    """Ends a process group that began inside the block."""

    def __enter__(self) -> None:
        self._before = self._is_up()

    def __exit__(self, *_: object) -> None:
        if self._is_up() and not self._before:
            sys.modules["torch"].distributed.destroy_process_group()

    @staticmethod
    def _is_up() -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _steady(config: RunConfig) -> None:
    """Tiny models run on one thread: more only wait for each other, and the loss then repeats exactly."""
    from ..testing.tiny import is_tiny

    if is_tiny(config.model.name_or_path or ""):
        import torch

        torch.set_num_threads(1)


def _figures(
    config: RunConfig,
    prepared: Prepared,
    trained: TrainResult,
    comparison: dict[str, Any] | None,
    runtime: Runtime,
) -> dict[str, Any]:
    from ..report.numbers import token_slots

    padded_to = config.row_length
    slots = token_slots(prepared.lengths.tokens, prepared.plan, padded_to)
    return {
        **prepared.plan.stats(),
        **runtime.figures(),
        "packtrain": __version__,
        "checksum": prepared.plan.checksum,
        "lengths_folder": str(prepared.lengths_folder),
        "plan_folder": str(prepared.plan_folder),
        "audited": prepared.audited,
        "keys": read_keys(prepared.lengths_folder),
        "truncation": told_truncated(prepared.lengths_folder, prepared.lengths),
        "padded_to": padded_to,
        "padding_saved": slots.saved(slots.batched),
        "padding_saved_to_cap": slots.saved(slots.capped),
        "loss": comparison,
        **training_figures(trained),
    }


def _page(
    folder: Path, config: RunConfig, prepared: Prepared, trained: TrainResult, figures: dict[str, Any]
) -> Report:
    order = order_of_config(config, prepared.plan, figures["world_size"], prepared.plan_folder)
    return Report(
        artefact=folder,
        plan=prepared.plan,
        lengths=prepared.lengths,
        lengths_folder=prepared.lengths_folder,
        source=prepared.source,
        where=prepared.source.where,
        order=order.packs_order,
        training=training_of(config.to_dict(), figures, read_history(folder) or trained.history),
        config=config.to_dict(),
    )


# --------------------------------------------------------------------------------------------
# The main job with an `export` section: measure, audit, plan, and write packs as files, train nothing
# --------------------------------------------------------------------------------------------
def run_export(config: RunConfig, *, overwrite: bool = False, stage: Stage | None = None) -> dict[str, Any]:
    """Export what a configuration would train on; one process.

    Args:
        config: from `train.load_config`, with `export.format`.
        overwrite: replace what the folders hold of another run or export.
        stage: progress display per stage.

    Returns:
        As `export`.

    Raises:
        ConfigError: started on several ranks.
    """
    place = world()
    if place.size > 1:
        raise ConfigError(
            f"an export is no job for {counted(place.size, 'ranks')}",
            hint="start one process; export.workers adds others",
        )
    asked, folder = config.export, Path(config.training.output_dir)
    if asked.format is None:
        raise ConfigError("export.format is not set", hint="raw, webdataset, energon or chunks")
    from ..train.early import check_folders

    out = Path(asked.out or folder / "export")
    options = {name: getattr(asked, name) for name in ("prompts", "layout", "media")}
    format_of(asked.format, options)
    refuse_foreign(out, {"format": asked.format}, overwrite)
    check_folders(config, place)
    prepared = prepare(config, folder, overwrite=overwrite, stage=stage, world_size=1)
    with (stage or silent)("exporting") as report:
        return export(
            prepared.plan_folder,
            out,
            format=asked.format,
            task=asked.task,
            maxcount=asked.maxcount,
            maxsize=asked.maxsize,
            options=options,
            source=prepared.source,
            template=prepared.template,
            workers=asked.workers,
            overwrite=overwrite,
            progress=report,
        )
