"""The main job: measure, audit, plan, train on the plan, compare, report. One folder holds it all.

    <output_dir>/lengths  plan  val_lengths  val_plan     artefacts, as the single verbs write them
                 train_log.jsonl  failed.jsonl  model/     what training leaves
                 report.html  run.json                     the page, and the figures (written last)

Every stage is found again when it is there and equal, so a stopped run goes on. `run.json` is removed at the
start and written at the end: a folder with it is a finished run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..errors import ConfigError
from ..measuring.audit import audit
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..version import __version__
from ..world import world
from .inputs import Inputs
from .measure import measure
from .plan import ledger_rows, plan_lengths

if TYPE_CHECKING:
    from ..sources.chat import ChatSource
    from ..template import HFTemplate
    from ..train.config import RunConfig
    from ..train.sft import TrainResult

__all__ = ["RunResult", "prepare", "run"]

_log = logging.getLogger(__name__)

#: Opens a progress display for a stage and gives its callback (done, total).
Stage = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]

#: Samples encoded for real before planning.
AUDITED = 32

#: Packed and unpacked loss of the trained model differ by less, or something leaks (float32 noise is 1e-7).
TOLERANCE = 1e-4


@dataclass(kw_only=True)
class Prepared:
    """Measured and planned inputs of a run."""

    source: ChatSource
    template: HFTemplate
    lengths: Lengths
    plan: PackPlan
    lengths_folder: Path
    audited: int


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
) -> RunResult:
    """The main job of a configuration.

    Args:
        config: from `train.load_config`.
        overwrite: replace what `training.output_dir` holds of another run.
        compare: also evaluate the trained model sample by sample, to print packed minus unpacked loss.
        html: write report.html; None = as the configuration says.
        stage: progress display per stage.

    Raises:
        PacktrainError: what any stage raises; see `measure`, `plan_lengths`, `train.train`.
    """
    from ..data import PackedDataset
    from ..train import evaluate_packed_vs_unpacked, train

    _refuse_without_effect(config)
    shown = stage or _silent
    folder = Path(config.training.output_dir)
    files.make_folder(folder)
    files.remove(folder / "run.json")
    _steady(config)
    prepared = prepare(config, folder, overwrite=overwrite, stage=shown)
    val = None
    if config.custom.val_jsonl is not None:
        checked = prepare(config, folder, validation=True, overwrite=overwrite, stage=shown)
        val = (checked.plan, checked.source, checked.lengths)
    with shown("training") as report:
        trained = train(
            config,
            prepared.plan,
            prepared.source,
            prepared.template,
            lengths=prepared.lengths,
            val=val,
            progress=report,
        )
    comparison = None
    if compare:
        dataset = PackedDataset(
            prepared.plan,
            prepared.source,
            prepared.template.encode,
            lengths=prepared.lengths,
            on_error=config.training.on_error,
            ledger_file=folder / "failed.jsonl",
        )
        with shown("comparing packed with unpacked") as report:
            found = evaluate_packed_vs_unpacked(trained.model, dataset, progress=report)
        comparison = {
            "packed": found.packed,
            "unpacked": found.unpacked,
            "difference": found.difference,
            "tolerance": TOLERANCE,
        }
    figures = _figures(config, prepared, trained, comparison)
    page = None
    if config.report.html if html is None else html:
        page = _write_page(folder, config, prepared, trained, comparison)
        figures["report"] = str(page)
    files.publish_json(
        folder / "run.json", {"schema": "packtrain.run/1", "config": config.to_dict(), "result": figures}
    )
    return RunResult(
        folder=folder, plan=prepared.plan, figures=figures, report=page, loss_curve=trained.losses
    )


def prepare(
    config: RunConfig,
    folder: Path,
    *,
    validation: bool = False,
    overwrite: bool = False,
    stage: Stage | None = None,
) -> Prepared:
    """Measure, audit and plan the training (or validation) samples into `folder`.

    Validation never drops a sample for its fill, and its plan is made by the same pipeline.
    """
    shown = stage or _silent
    prefix = "val_" if validation else ""
    inputs = Inputs.of_config(config, validation=validation)
    source = inputs.open_source()
    template = inputs.open_template(source)
    if not validation and hasattr(template, "verify_limits"):
        template.verify_limits()
    with shown(f"measuring {'validation' if validation else 'training'} samples") as report:
        lengths = measure(
            source,
            template,
            folder / f"{prefix}lengths",
            workers=_workers(config, len(source)),
            overwrite=overwrite,
            persist_every=config.training.packing_length_cache_persist_every,
            origin={"inputs": inputs.to_dict()},
            progress=report,
        )
    checked = audit(source, lengths, template.encode, count=AUDITED, seed=config.training.seed)
    from ..train.steps import step_plan_options

    training = config.training
    drop_thin = training.packing_drop_last and not validation
    plan = plan_lengths(
        lengths,
        folder / f"{prefix}plan",
        lengths_folder=folder / f"{prefix}lengths",
        min_fill_ratio=training.packing_min_fill_ratio if drop_thin else None,
        max_drop_fraction=training.max_drop_fraction,
        overwrite=overwrite,
        pack_length=config.pack_length,
        packer=training.packing_strategy,
        long_samples="single" if training.packing_allow_single_long else "drop",
        long_rule=">=",
        **({} if validation else step_plan_options(config, world().size)),
    )
    return Prepared(
        source=source,
        template=template,
        lengths=lengths,
        plan=plan,
        lengths_folder=folder / f"{prefix}lengths",
        audited=len(checked.ids),
    )


def _refuse_without_effect(config: RunConfig) -> None:
    from ..train.steps import check_steps

    check_steps(config)
    if not config.training.packing:
        raise ConfigError(
            "training.packing is false: there is nothing to plan", hint="set training.packing: true"
        )
    if config.custom.fusion_config is not None:
        raise ConfigError("custom.fusion_config is not read by this version", hint="merge the files first")


def _steady(config: RunConfig) -> None:
    """Tiny models run on one thread: more only wait for each other, and the loss then repeats exactly."""
    from ..train.tiny import is_tiny

    if is_tiny(config.model.name_or_path or ""):
        import torch

        torch.set_num_threads(1)


def _workers(config: RunConfig, samples: int) -> int:
    """As configured, but never more than there are cores and 2,048-sample shares."""
    from ..execute.local import available_cpus
    from .measure import SERIAL

    asked = config.training.packing_length_precompute_workers
    return max(1, min(asked, available_cpus(), -(-samples // SERIAL)))


def _figures(
    config: RunConfig, prepared: Prepared, trained: TrainResult, comparison: dict[str, Any] | None
) -> dict[str, Any]:
    from ..report.numbers import token_slots

    plan = prepared.plan
    place = world()
    aligned = plan.align(place.size, config.training.dataloader_drop_last)
    slots = token_slots(prepared.lengths.tokens, plan)
    curve = trained.losses
    figures: dict[str, Any] = {
        **plan.stats(),
        "packtrain": __version__,
        "checksum": plan.checksum,
        "aligned_checksum": aligned.checksum,
        "n_raw_packs": len(plan),
        "n_aligned_packs": len(aligned),
        "world_size": place.size,
        "audited": prepared.audited,
        "padding_saved": slots.saved(slots.batched),
        "padding_saved_to_cap": slots.saved(slots.capped),
        "metrics": trained.metrics,
        "loss": comparison,
        "proof": None if trained.proof is None else len(trained.proof.rows),
    }
    if curve:
        figures["loss_first"], figures["loss_last"] = curve[0][1], curve[-1][1]
    return figures


def _write_page(
    folder: Path,
    config: RunConfig,
    prepared: Prepared,
    trained: TrainResult,
    comparison: dict[str, Any] | None,
) -> Path:
    from ..report.html import write_report

    return write_report(
        folder / "report.html",
        title=f"packtrain run {folder.name}",
        stats=prepared.plan.stats(),
        plan=prepared.plan,
        lengths=prepared.lengths,
        ledger_rows=ledger_rows(prepared.plan, prepared.lengths_folder, prepared.source.where),
        loss=trained.losses,
        comparison=comparison,
        config=config.to_dict(),
    )


def _silent(name: str) -> AbstractContextManager[Callable[[int, int], None]]:
    _log.info("%s", name)
    return nullcontext(lambda done, total: None)
