"""What a trainer that trained on packs leaves: the record and the log of a run, beside its plan.

    <output_dir>/packs/run.json  train_log.jsonl  train/plan-…

`packtrain show <output_dir>` reads them as those of a run of ours: configuration, figures, steps, losses, and
the isolation proof. `run.json` goes with the first step and comes when training has ended.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import FormatError, PacktrainError
from ..pipeline.inputs import lengths_of_plan
from ..pipeline.page import Report
from ..pipeline.run import finish_run
from ..planning.packplan import PackPlan
from ..remote.places import typed
from ..template import ensure_torchvision
from ..train.config import load_config
from ..train.log_file import LOG, LogFile, plain
from ..train.loss import bare_model
from ..train.runtime import resolve_runtime
from ..version import __version__
from ._plan import PLACE, say

ensure_torchvision()  # transformers imports torchvision with its callbacks

from transformers import TrainerCallback  # noqa: E402

logger = logging.getLogger(__name__)


def record_run(trainer: Any) -> None:
    """Let `trainer`, which has its packs, leave the record of its run."""
    folder = Path(trainer.args.output_dir) / PLACE
    trainer.add_callback(LogFile(folder / LOG))
    trainer.add_callback(RunRecord(trainer, folder))


class RunRecord(TrainerCallback):  # type: ignore[misc]
    """Writes `run.json` when training has ended.

    Args:
        trainer: a `HostMixin` with its packs.
        folder: of the record.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self._told():
                files.make_folder(self.folder)
                files.remove_leftovers(self.folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        consumed = self.trainer.packs_consumed()
        if not state.is_world_process_zero:
            return
        with self._told():
            config = _config(self.trainer)
            figures = {**_of_packs(self.trainer, config, self.folder), **_of_training(state)}
            figures |= {"consumed": consumed, "proof": self.trainer.packs_proven}
            finish_run(self.folder, config, figures)
            say("trained: packtrain show %s", typed(self.folder.parent))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A record that cannot be written ends no training: it is a warning."""
        try:
            yield
        except (PacktrainError, OSError) as error:
            logger.warning("this run leaves no record in %s: %s", self.folder, error)


def _config(trainer: Any) -> dict[str, Any]:
    """The settings of the trainer under their names here, as a configuration of ours holds them."""
    args, packs, bare = trainer.args, trainer.packs, bare_model(trainer.model)
    data: dict[str, Any] = {"kind": packs.kind}
    training = {
        "output_dir": str(args.output_dir),
        **({} if args.max_steps > 0 else {"num_train_epochs": args.num_train_epochs}),
        "max_steps": args.max_steps,
        "learning_rate": args.learning_rate,
        "seed": trainer.packs_seed(),
    }
    if packs.kind in ("planned", "exported"):
        order, plan = packs.sampler.order, packs.plan
        data |= {"shuffle": order.shuffle, "drop_last": order.aligned.drop_last}
        mode = None if order.balance is None else order.balance.mode
        data |= {} if mode == "step" else {"balance": mode}
        training["seed"] = order.seed
        if packs.kind == "planned" and plan.spec.samples_per_step is not None:
            data["samples_per_step"] = plan.spec.samples_per_step
    if "samples_per_step" not in data:
        training["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    model = {"name_or_path": getattr(bare.config, "_name_or_path", None) or None}
    template = {"max_length": packs.pack_length}
    return {"model": model, "template": template, "data": data, "training": training}


def _of_packs(trainer: Any, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Figures of the packs, with the folders of plan and lengths."""
    figures: dict[str, Any] = {"packtrain": __version__, "world_size": trainer.args.world_size}
    packs = trainer.packs
    figures["validation_folders"] = {
        name: {part: str(folder / (name or "eval") / f"{part}-{mark[:12]}") for part, mark in marks}
        for name, plan in trainer.packs_eval_plans().items()
        for marks in [(("plan", plan.checksum), ("lengths", plan.lengths_digest))]
    }
    if packs.kind not in ("planned", "exported"):
        ledger = getattr(packs, "ledger_file", None)
        if ledger is not None:
            figures["ledger_file"] = str(Path(ledger).absolute())
        figures["left_out"] = Report.of_run(folder, config, figures).figures()["ledger"]
        return figures
    plan: PackPlan = packs.plan
    figures |= {**plan.stats(), "checksum": plan.checksum}
    place = _place_of(trainer, plan, folder)
    figures["plan_folder"] = str(place.resolve())
    with contextlib.suppress(FormatError):  # a plan that was given without them
        figures["lengths_folder"] = str(lengths_of_plan(place).resolve())
    figures["padded_to"] = getattr(trainer.packs_collator, "pad_to_length", None)
    balance = packs.sampler.order.balance
    figures["sync"] = None if balance is None else balance.sync
    if packs.kind == "planned":
        with contextlib.suppress(PacktrainError):  # settings that only this trainer has: the plan's figures
            found = resolve_runtime(load_config(config), plan, packs.world_size, trainer.packs_eval_plans())
            figures |= found.figures()
    return figures


def _place_of(trainer: Any, plan: PackPlan, folder: Path) -> Path:
    """The folder of the plan: made by `pack`, given to it, of the export, or a copy that is left now."""
    given = trainer.packs_given
    out = getattr(trainer.packs.data, "out", None)
    if given is not None:
        return Path(given)
    if out is not None:
        from ..store import shards

        return Path(shards.hidden(Path(out), "plan"))
    place = folder / "train" / f"plan-{plan.checksum[:12]}"
    if not (place / "plan.json").is_file():
        plan.save(place)
    return place


def _of_training(state: Any) -> dict[str, Any]:
    """Closing metrics, first and last loss."""
    rows = state.log_history
    losses = [float(row["loss"]) for row in rows if "loss" in row]
    metrics: dict[str, Any] = {"steps": state.global_step}
    for key, value in (item for row in rows for item in row.items()):  # the last of each name stays
        if key.startswith("eval_") or key == "train_loss":
            metrics[key] = plain(value)
    ends = {"loss_first": losses[0], "loss_last": losses[-1]} if losses else {}
    return {"metrics": metrics, **ends}
