"""Which samples a step of training sees and with which losses, and which steps see a sample.

Steps are counted from 0: over the whole run, or inside an epoch where one is named. `train_log.jsonl`
counts finished steps, so its row 1 belongs to step 0.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..checks import whole
from ..errors import FormatError, InputError, PacktrainError, counted
from ..planning.epoch_order import EpochOrder
from ..planning.packplan import PackPlan
from ..planning.replan import EpochPlans
from ..remote.places import typed
from ..store.plans import undamaged
from .length_files import lengths_of


# --------------------------------------------------------------------------------------------
# The losses of a step's samples, from what training wrote: `RUN/sample_loss/rank-N.jsonl`
# --------------------------------------------------------------------------------------------
# Only lines of the step are parsed. After a resume a rank may have a step twice:
# its later line counts.
def losses_of(folder: Path, step: int) -> list[dict[str, Any]]:
    """Samples of a step of the run (from 0) with loss and supervised tokens, the largest loss first.

    Returns:
        Rows {id, loss (None: nothing supervised, or not finite), tokens, rank, source of a mixture}.

    Raises:
        InputError: the run wrote no losses, or none of this step.
    """
    last = {rank: held for rank, at, held in _told(folder, f'"step": {step},') if at == step}
    found = [sample for held in last.values() for sample in held]
    if not found:
        raise InputError(f"{folder} holds no losses of step {step}", hint="steps count from 0")
    return sorted(found, key=_descending)


def steps_of(folder: Path, sample: int) -> list[dict[str, Any]]:
    """The steps of the run (from 0) that trained a sample: rows {run_step, rank, loss, tokens}, in order.

    Raises:
        InputError: the run wrote no losses.
    """
    last = {(step, rank): [one for one in held if one["id"] == sample] for rank, step, held in _told(folder)}
    return [
        {"run_step": step, "rank": rank, "loss": one["loss"], "tokens": one["tokens"]}
        for (step, rank), held in sorted(last.items())
        for one in held
    ]


def _told(folder: Path, mark: str = "") -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """(rank, step, samples) of lines that hold `mark`; what a stopped run left half written is skipped."""
    for path in _paths(folder):
        with files.reading(path, "a file of losses of samples", None), path.open(encoding="utf-8") as lines:
            for row in filter(None, (_row(line) for line in lines if mark in line)):
                yield operator.index(row["rank"]), operator.index(row["step"]), _samples(row)


def _paths(folder: Path) -> list[Path]:
    paths = sorted((folder / "sample_loss").glob("rank-*.jsonl"))
    if paths:
        return paths
    kind = unplanned_kind(folder)
    raise InputError(
        f"{folder} holds no losses of samples" + (f", and a run of kind {kind} has no plan" if kind else ""),
        hint="packtrain train alone writes them, with training.log_sample_loss: true",
    )


def _samples(row: dict[str, Any]) -> list[dict[str, Any]]:
    sources = row.get("sources") or [None] * len(row["ids"])
    return [
        {
            "id": operator.index(i),
            "loss": None if loss is None else float(loss),
            "tokens": operator.index(tokens),
            "rank": operator.index(row["rank"]),
            **({} if source is None else {"source": str(source)}),
        }
        for i, loss, tokens, source in zip(row["ids"], row["loss"], row["tokens"], sources, strict=True)
    ]


def _descending(row: dict[str, Any]) -> tuple[bool, float]:
    """A loss that is not finite stands first, samples without supervised tokens last."""
    if row["loss"] is None:
        return (row["tokens"] == 0, -float("inf"))
    return (False, -row["loss"])


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


# --------------------------------------------------------------------------------------------
# Which samples a step of training sees and with which losses, and which steps see a sample
# --------------------------------------------------------------------------------------------
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order in which a run consumes a plan.

    Attributes:
        packs_order: of its packs.
        run_steps: steps of the whole run; None = not known.
        folder: plan folder, to find the source again.
    """

    packs_order: EpochOrder
    run_steps: int | None
    folder: Path

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.packs_order.steps

    @property
    def epochs(self) -> int:
        """Epochs of the run, the last perhaps in part; 1 where that is not known."""
        return 1 if self.run_steps is None else -(-self.run_steps // self.steps)

    def packs(self, start: int, stop: int, epoch: int) -> I64:
        """Raw pack ids of steps start..stop-1 of an epoch, micro step by micro step, rank by rank."""
        order = self.packs_order
        return order.view(epoch).pack_ids_at(order.of_steps(start, stop, epoch))

    def step(self, step: int, *, epoch: int | None = None, rank: int | None = None) -> dict[str, Any]:
        """Packs and sample ids of a step.

        Args:
            step: from 0; over the run, or inside `epoch`.
            rank: only what this rank takes.

        Raises:
            InputError: no such step or rank.
        """
        ranks = self.packs_order.aligned.world_size
        of_epoch, inside = divmod(step, self.steps) if epoch is None else (epoch, step)
        run_step = of_epoch * self.steps + inside
        counts_inside, why = epoch is not None or self.run_steps is None, ""
        if rank is not None and not 0 <= rank < ranks:
            why, hint = f"rank {rank} of {counted(ranks, 'ranks')}", f"0 to {ranks - 1}"
        elif counts_inside and (of_epoch < 0 or not 0 <= inside < self.steps):
            why = f"step {step} of epoch {epoch or 0}: an epoch has {counted(self.steps, 'steps')}"
            hint = f"0 to {self.steps - 1}, or no epoch, to count over the whole run"
        elif self.run_steps is not None and not 0 <= run_step < self.run_steps:
            why = f"step {run_step} of a run of {counted(self.run_steps, 'steps')}"
            hint = f"0 to {self.run_steps - 1}"
        if why:
            raise InputError(why, hint=hint)
        plan = self.packs_order.view(of_epoch).plan
        packs = self.packs(inside, inside + 1, of_epoch)
        rows = [
            {
                "micro_step": place // ranks,
                "rank": place % ranks,
                "pack": pack,
                "ids": [] if pack < 0 else plan[pack].tolist(),
            }
            for place, pack in enumerate(packs.tolist())
            if rank is None or place % ranks == rank
        ]
        return {
            "epoch": of_epoch,
            "step": inside,
            "run_step": run_step,
            "steps_per_epoch": self.steps,
            "packs": rows,
            "ids": sorted({i for row in rows for i in row["ids"]}),
        }

    def sample(self, sample: int, epochs: list[int]) -> list[dict[str, int]]:
        """Where a sample is consumed in the named epochs of the run; a repeated pack occurs twice.

        Raises:
            InputError: the sample is not in the plan (its ledger reason is named).
        """
        ranks = self.packs_order.aligned.world_size
        rows = []
        last: Any = "any" if self.run_steps is None else self.epochs - 1
        for epoch in epochs:
            if epoch < 0 or (self.run_steps is not None and epoch >= self.epochs):
                raise InputError(f"there is no epoch {epoch}", hint=f"0 to {last}, or leave it out")
            pack = self._pack_of(sample, epoch)
            packs = self.packs(0, self.steps, epoch)
            for place in np.flatnonzero(packs == pack).tolist():
                step, rest = divmod(place, self.packs_order.width)
                run_step = epoch * self.steps + step
                if self.run_steps is None or run_step < self.run_steps:
                    place_of = {"micro_step": rest // ranks, "rank": rest % ranks, "pack": pack}
                    rows.append({"epoch": epoch, "step": step, "run_step": run_step, **place_of})
        return rows

    def _pack_of(self, sample: int, epoch: int) -> int:
        """The raw pack that holds a sample in an epoch."""
        plan = self.packs_order.view(epoch).plan
        found = np.flatnonzero(np.asarray(plan.indices) == sample)
        if len(found) == 0:
            reasons, read = dict(plan.ledger), plan.stats()["read"]
            why = f"there is no such sample: {sample} of {counted(read, 'samples')}"
            hint = f"0 to {read - 1}"
            if sample in reasons:
                why = f"sample {sample} is in no pack; it is in the ledger: {reasons[sample]}"
                hint = f"packtrain show {typed(self.folder)} --sample {sample} says what is wrong"
            raise InputError(why, hint=hint)
        return int(np.searchsorted(np.asarray(plan.offsets), found[0], side="right")) - 1


def order_of(
    folder: Path,
    *,
    world_size: int | None = None,
    grad_accum: int | None = None,
    seed: int | None = None,
    balance: str | None = None,
    replan: str | None = None,
) -> Order:
    """The order of a run folder, or of a plan folder with the settings given.

    `replan` "epoch": every epoch has a plan of its own, made from the lengths that the plan names.

    Raises:
        FormatError: the folder is neither. InputError: a setting contradicts the run.
    """
    if (folder / "run.json").is_file():
        given = {"world_size": world_size, "grad_accum": grad_accum, "seed": seed, "balance": balance}
        named = [name for name, value in {**given, "replan": replan}.items() if value is not None]
        if named:
            raise InputError(f"{folder} is a run: it knows its {', '.join(named)}", hint="leave them out")
        return _of_run(folder, *read_run(folder))
    if not (folder / "plan.json").is_file():
        why = "holds no plan and no finished run" if folder.exists() else "does not exist"
        raise FormatError(f"{folder} {why}", hint=files.recipe_hint(folder) or _hint(folder))
    plan = undamaged(folder)
    ranks = 1 if world_size is None else whole("world_size", world_size, 1, 1 << 20)
    if grad_accum is not None:
        whole("grad_accum", grad_accum, 1, 1 << 31)
    aligned = plan.align(ranks)
    own = aligned.block // aligned.world_size if aligned.block > 1 else None
    if own is not None and grad_accum not in (None, own):
        raise InputError(
            f"grad_accum is {grad_accum}, a step of this plan has {counted(own, 'micro steps')} on "
            f"{counted(aligned.world_size, 'ranks')}",
            hint="leave grad_accum out",
        )
    accumulation = own or grad_accum or 1
    order = EpochOrder(
        aligned,
        seed=seed or 0,
        shuffle=seed is not None,
        grad_accum=accumulation,
        balance=balance,
        replan=None if replan is None else EpochPlans(plan, lengths_of(folder)),
    )
    order.warn_without_effect()
    return Order(packs_order=order, run_steps=None, folder=folder)


def _hint(folder: Path) -> str:
    if (folder / "plan" / "plan.json").is_file():
        return f"the run has not ended; its plan is {folder / 'plan'}"
    if (folder / "train_log.jsonl").is_file():
        return "the run has not ended; training.log_sample_loss: true writes down the samples of its steps"
    return "name a run or plan folder"


#: Keys that every record named before `data` was a section, though a plan never followed them.
_OF_OTHERS = ("train_dataloader_shuffle", "sharded_lazy", "packing_mode")


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `run.json` holds: the configuration, and the figures.

    Raises:
        FormatError: it was edited.
    """
    told = files.read_json(folder / "run.json")
    with files.reading(folder / "run.json", "the record of a run", None):
        config, result = told["config"], told["result"]
        if not isinstance(config, dict) or not isinstance(result, dict):
            raise FormatError(f"{folder / 'run.json'} holds no configuration and figures of a run")
    return config, result


def unplanned_kind(folder: Path) -> str | None:
    """The kind of data of a finished run whose packs were not planned; None of any other folder."""
    if not (folder / "run.json").is_file():
        return None
    config, figures = read_run(folder)
    if (folder / "plan").is_dir() or "plan_folder" in figures or "data" not in config:
        return None  # before `data` was a section, every run had a plan
    with files.reading(folder / "run.json", "the record of a run", None):
        kind = str(config["data"].get("kind", "planned"))
    return None if kind in ("planned", "exported") else kind


def is_unplanned(folder: Path) -> bool:
    """Is it of a run whose samples only its losses name: of another kind, or one that has not ended?"""
    made = any((folder / name).exists() for name in ("run.json", "plan.json"))
    return unplanned_kind(folder) is not None or (not made and (folder / "sample_loss").is_dir())


def _of_run(folder: Path, written: Mapping[str, Any], figures: Mapping[str, Any]) -> Order:
    from ..train.config import load_config

    with files.reading(folder / "run.json", "the record of a run", None):
        config = load_config(_layout(written))
        ranks = whole("world_size", figures["world_size"], 1, 1 << 20)
        place = folder / "plan"
        if not place.is_dir() and "plan_folder" in figures:
            place = Path(figures["plan_folder"])  # in a shared cache
    return order_of_config(config, undamaged(place), ranks, place, sync=figures.get("sync"))


def order_of_config(
    config: Any, plan: PackPlan, ranks: int, folder: Path, *, sync: str | None = None
) -> Order:
    """The order in which a run of `config` on `ranks` ranks consumes a plan that lies in `folder`.

    Args:
        sync: where the ranks of another trainer wait for each other; None: as our own trainer does.
    """
    from ..train.runtime import accumulation_of, balance_of

    accumulation = accumulation_of(config, plan, ranks)
    training = config.training
    aligned = plan.align(ranks, training.dataloader_drop_last)
    steps = -(-aligned.steps // accumulation)
    asked = training.max_steps if training.max_steps > 0 else int(np.ceil(training.num_train_epochs * steps))
    order = EpochOrder(
        aligned,
        seed=training.seed,
        shuffle=bool(training.train_dataloader_shuffle),
        grad_accum=accumulation,
        balance=balance_of(config, accumulation, sync),
        replan=None if training.replan is None else EpochPlans(plan, lengths_of(folder)),
    )
    return Order(packs_order=order, run_steps=max(1, asked), folder=folder)


def _layout(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of a record; before `data` was a section it named every key, with effect or not."""
    if "data" in config:
        return config
    from ..train.config.aliases import alias_of, aliases_of

    def holds(key: str) -> bool:
        name = f"training.{key}"
        return not aliases_of(name) or (alias_of(name, "planned") is not None and key not in _OF_OTHERS)

    return {**config, "training": {key: held for key, held in config["training"].items() if holds(key)}}


def rows_of(folder: Path, ids: list[int]) -> list[str] | None:
    """Where samples stand in their source, or None when the source is not at hand."""
    from .inputs import Inputs

    try:
        source = Inputs.of_artefact(folder).open_source()
        return [source.where(i) for i in ids]
    except (PacktrainError, OSError):
        return None
