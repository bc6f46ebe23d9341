"""The page of a plan or run, and its figures: from the artefacts alone, the same for `run` and `show`.

A run's plan brings its training log, the balance of its ranks, and its forecast beside what was measured. A
run of packs that were not planned has its log, its validation and what it left out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..checks import whole
from ..errors import FormatError, PacktrainError
from ..measuring.run import CUT
from ..planning.costs import DeviceProfile, FlopsCost, costs_of
from ..planning.epoch_order import EpochOrder
from ..planning.lengths import STATUS_NAMES, Lengths
from ..planning.packplan import PackPlan
from ..report.numbers import Training, report_figures
from ..store import lengths as lengths_store
from .inputs import Inputs, lengths_of_plan, read_origin
from .length_files import lengths_of
from .plan import ledger_rows
from .publish import details, placed, read_keys, told

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Report:
    """What a report is made of.

    Attributes:
        artefact: folder that `packtrain show` takes.
        plan, lengths: None: packs of the run were not planned.
        lengths_folder: None: the lengths lie in a file.
        source: the samples, for their records; None: not at hand.
        where: sample -> where it stands; None: not known.
        order: how the run consumes its packs; None: no run.
        training: what the run adds.
        config: of the run, plain.
        ledger_file: of a run without a plan, what it left out; None: `left_out.jsonl` of the run.
    """

    artefact: Path
    plan: PackPlan | None = None
    lengths: Lengths | None = None
    lengths_folder: Path | None = None
    source: Any = None
    where: Callable[[int], str] | None = None
    order: EpochOrder | None = None
    training: Training = field(default_factory=Training)
    config: Any = None
    ledger_file: Path | None = None

    @classmethod
    def of_run(cls, artefact: Path, config: Any, figures: Mapping[str, Any]) -> Report:
        """Of the training in a run folder alone; `figures` are the result that stands in `run.json`."""
        return cls(
            artefact=artefact,
            training=training_of(config, figures, read_history(artefact)),
            config=config,
            ledger_file=None if "ledger_file" not in figures else Path(figures["ledger_file"]),
        )

    @classmethod
    def of(cls, artefact: Path, plan_folder: Path, plan: PackPlan) -> Report:
        """Of a plan folder, or of a run folder with its plan.

        Raises:
            FormatError: the lengths of the plan are gone.
        """
        lengths = lengths_of(plan_folder)
        lengths_folder: Path | None = None
        with contextlib.suppress(FormatError):  # the lengths lie in a file
            lengths_folder = lengths_of_plan(plan_folder)
        source = source_of(plan_folder)
        made = cls(
            artefact=artefact,
            plan=plan,
            lengths=lengths,
            lengths_folder=lengths_folder,
            source=source,
            where=where_of(plan_folder, source),
        )
        if (artefact / "run.json").is_file():
            from .which import order_of, read_run

            made.config, figures = read_run(artefact)
            made.training = training_of(made.config, figures, read_history(artefact))
            made.order = order_of(artefact).packs_order
        return made

    def figures(self, profile: DeviceProfile | None = None) -> dict[str, Any]:
        """As `report.numbers.report_figures`."""
        history = self.training.history
        more: dict[str, Any] = {}
        if self.lengths_folder is not None:
            more["keys"] = told(read_keys(self.lengths_folder))
        if self.order is not None:
            more["steps"] = step_figures(self.order, history, profile)
        if self.plan is None:
            more["left_out"] = Counter(str(r["reason"]) for r in self._ledger() if r["reason"] != CUT)
        return report_figures(self.plan, self.lengths, replace(self.training, **more))

    def _ledger(self) -> Iterable[dict[str, Any]]:
        """id, reason, where and detail of every sample that is in no pack."""
        if self.plan is not None:
            return ledger_rows(self.plan, self.lengths_folder, self.where)
        path = self.ledger_file or self.artefact / "left_out.jsonl"
        if not os.path.isfile(path):
            return []
        with files.reading(path, "a ledger of samples", None):
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            return [
                {"id": row["sample_id"], "reason": row["reason"], "detail": row["detail"]} for row in rows
            ]

    def write(self, path: Path, *, title: str, profile: DeviceProfile | None = None) -> Path:
        """As `report.html.write_report`."""
        from ..report.html import write_report

        source = self.source
        if self.lengths_folder is not None and (changed := _changed(self.lengths_folder, source)):
            logger.warning("%s: %s", path, changed)
        return write_report(
            path,
            title=title,
            plan=self.plan,
            lengths=self.lengths,
            ledger_rows=self._ledger(),
            figures=self.figures(profile),
            config=self.config,
            artefact=str(self.artefact),
            where=self.where,
            record=None if source is None else lambda i: record_of(source, i),
        )


def training_of(
    config: Mapping[str, Any], figures: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> Training:
    """What a run adds, by its configuration, the figures of `run.json`, and the rows of its log.

    An older version did not write `padded_to`: its configuration says it.
    """
    data = config.get("data")
    older = data.get("pad_to_length") if isinstance(data, Mapping) else None
    padded = figures.get("padded_to", older)
    return Training(
        history=history,
        comparison=figures.get("loss"),
        validation=figures.get("eval"),
        metrics=figures.get("metrics") or {},
        consumed=figures.get("consumed"),
        proof=figures.get("proof"),
        padded_to=padded if type(padded) is int and 0 < padded < 1 << 63 else None,
    )


def source_of(folder: Path) -> Any:
    """The samples that a lengths or plan folder was made from; None where they are not at hand."""
    try:
        return Inputs.of_artefact(folder).open_source()
    except (PacktrainError, OSError):
        return None


def where_of(folder: Path, source: Any) -> Callable[[int], str] | None:
    """Sample -> where it stands: as its source says, or as a row of a host's dataset; None: not known."""
    if source is not None:
        return cast("Callable[[int], str]", source.where)
    return (lambda sample: f"row {sample}") if "rows" in read_origin(folder) else None


def record_of(source: Any, sample: int) -> str:
    """The record of a sample as its source holds it, as JSON text; bytes and objects by their kind.

    Raises:
        PacktrainError, OSError: it cannot be read.
    """

    def short(value: Any) -> str:
        size = f" of {len(value):,} bytes" if isinstance(value, bytes) else ""
        return f"<{type(value).__name__}{size}>"

    return json.dumps(getattr(source, "source", source)[sample], ensure_ascii=False, default=short)


def _changed(lengths: Path, source: Any) -> str | None:
    """What is said of a source that is no longer the one whose samples were measured."""
    held = (lengths_store.read(lengths)[1].get("key") or {}).get("source")
    if source is None or held in (None, source.fingerprint):
        return None
    return "the source is no longer as it was measured: this record may be another than the one counted"


def sample_figures(folder: Path, plan: PackPlan | None, lengths: Lengths, sample: int) -> dict[str, Any]:
    """Where a sample stands, how long it is, its pack or why it has none, and its record; plain JSON."""
    source = source_of(folder)
    where = where_of(folder, source)
    made: dict[str, Any] = {"sample": sample, "tokens": int(lengths.tokens[sample])}
    if plan is None:
        status = int(lengths.status[sample])
        made["status"] = lengths.reason(sample) if status else STATUS_NAMES[status]
    else:
        places = np.flatnonzero(np.asarray(plan.indices) == sample)
        packs = np.searchsorted(np.asarray(plan.offsets), places, side="right") - 1
        made["pack"] = int(packs[0]) if len(packs) else None
        made["reason"] = dict(plan.ledger).get(sample)
    made["where"] = None if where is None else where(sample)
    with contextlib.suppress(FormatError):  # a plan of token counts
        measured = folder if plan is None else lengths_of_plan(folder)
        made["detail"] = placed(details(measured).get(sample, ""), made["where"])[1] or None
        made["changed"] = _changed(measured, source)
    made["record"] = None
    if source is not None:
        try:
            made["record"] = json.loads(record_of(source, sample))
        except (PacktrainError, OSError) as error:
            made["record"] = str(error)
    return made


# --------------------------------------------------------------------------------------------
# What the steps of a run took beside what its plan forecasts, and what `balance` did for them
# --------------------------------------------------------------------------------------------
# Costs are token equivalents (`planning.costs.FlopsCost`) of the rank that the others wait for. Without a
# device profile one factor, the median of the run itself, turns them into seconds: what is compared is how
# steps differ. With a profile the seconds are its own.
F64 = NDArray[np.float64]

#: Places of the first steps that are looked at.
_PLACES = 1 << 20


def read_history(run: Path) -> list[dict[str, Any]]:
    """Rows of a run's `train_log.jsonl`; empty where there is none."""
    path = run / "train_log.jsonl"
    if not path.is_file():
        return []
    with files.reading(path, "a training log", None):
        lines = path.read_text(encoding="utf-8").splitlines()
        return [_checked(json.loads(line)) for line in lines if line.strip()]


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the numbers that figures are made of."""
    if "step" in row or "step_s" in row:
        whole("step", row["step"], 0, 1 << 53)
    if "step_s" in row:
        row = {**row, "step_s": float(row["step_s"]), "tokens_per_s": float(row["tokens_per_s"])}
    return dict(row)


def step_figures(
    order: EpochOrder, history: Sequence[Mapping[str, Any]], profile: DeviceProfile | None = None
) -> dict[str, Any]:
    """`balance` and `forecast` of a run, plain JSON.

    Args:
        order: as the run consumes its packs.
        history: rows of its training log.
        profile: what a step costs on its device.

    Returns:
        balance: world_size, grad_accum, mode (null: none), sync, steps, max_over_mean_before, max_over_mean,
        and lines [step, slowest / mean rank] `before` and `after`.
        forecast (where steps were logged): profile, seconds_per_token, step_s and measured_step_s (medians of
        the stretches), deviation (median of |forecast / measured - 1|), tokens_per_step,
        measured_tokens_per_step, and the line [step, seconds] `steps`.
    """
    cost = FlopsCost() if profile is None else profile.cost
    last = max((int(row["step"]) for row in history if "step" in row), default=order.steps)
    count = max(1, min(last, _PLACES // order.width))
    parts = [_epoch(order, epoch, count, cost) for epoch in range(-(-count // order.steps))]
    before, after, mean, tokens, micro = (np.concatenate(held)[:count] for held in zip(*parts, strict=True))
    balance = order.balance
    figures: dict[str, Any] = {
        "balance": {
            "world_size": order.aligned.world_size,
            "grad_accum": order.grad_accum,
            "mode": None if balance is None else balance.mode,
            "sync": _sync(order),
            "steps": count,
            "max_over_mean_before": float(before.sum() / mean.sum()),
            "max_over_mean": float(after.sum() / mean.sum()),
            "before": _line(before / mean),
            "after": _line(after / mean),
        }
    }
    rows = _rows(history, count)
    if rows:
        figures["forecast"] = _forecast(rows, after, tokens, micro, profile)
    return figures


def _sync(order: EpochOrder) -> str:
    """Where ranks wait for each other: `step`, or `micro`."""
    return "step" if order.balance is None else order.balance.sync


def _epoch(order: EpochOrder, epoch: int, count: int, cost: FlopsCost) -> tuple[F64, F64, F64, F64, F64]:
    """Of every step of an epoch: slowest rank before and after balance, mean rank, tokens, micro steps."""
    view = order.view(epoch)
    ranks, steps = view.world_size, min(count, order.steps)
    costs = np.asarray(costs_of(view.plan, cost)[0], dtype=np.float64) / cost.l_star
    lengths = np.asarray(view.plan.pack_tokens, dtype=np.float64)
    after = order.of_steps(0, steps, epoch)
    before = order.at(np.arange(len(after), dtype=np.int64), epoch)
    starts = np.arange(0, len(after) // ranks, order.grad_accum)

    def by_rank(values: F64, positions: NDArray[np.int64]) -> F64:
        packs = view.pack_ids_at(positions)
        return np.where(packs < 0, 0.0, values[packs]).reshape(-1, ranks)

    def slowest(positions: NDArray[np.int64]) -> F64:
        held = by_rank(costs, positions)
        if _sync(order) == "step":
            return np.asarray(np.add.reduceat(held, starts).max(axis=1))
        return np.asarray(np.add.reduceat(held.max(axis=1), starts))

    mean = np.add.reduceat(by_rank(costs, after).mean(axis=1), starts)
    tokens = np.add.reduceat(by_rank(lengths, after).sum(axis=1), starts)
    micro = np.diff(np.append(starts, len(after) // ranks)).astype(np.float64)
    return slowest(before), slowest(after), np.maximum(mean, 1e-9), tokens, micro


def _rows(history: Sequence[Mapping[str, Any]], count: int) -> list[tuple[int, int, float, float]]:
    """(first step, last step + 1, seconds, tokens) of every logged stretch of steps, counted from 0."""
    found, begun = [], 0
    for row in history:
        if "step_s" in row and begun < int(row["step"]) <= count:
            seconds = float(row["step_s"])
            found.append((begun, int(row["step"]), seconds, float(row["tokens_per_s"]) * seconds))
            begun = int(row["step"])
    return found


def _forecast(
    rows: Sequence[tuple[int, int, float, float]],
    costs: F64,
    tokens: F64,
    micro: F64,
    profile: DeviceProfile | None,
) -> dict[str, Any]:
    measured = np.array([seconds for _, _, seconds, _ in rows])
    weights = np.array([stop - start for start, stop, _, _ in rows], dtype=np.float64)

    def mean_of(values: F64) -> F64:
        return np.array([values[start:stop].mean() for start, stop, _, _ in rows])

    equivalents = mean_of(costs)
    if profile is None:
        factor = float(np.median(measured / equivalents))
        predicted = factor * equivalents
    else:
        factor = profile.seconds_per_token
        predicted = np.array(list(map(profile.seconds, equivalents, mean_of(micro))))
    return {
        "profile": None if profile is None else profile.name,
        "seconds_per_token": factor,
        "step_s": float(np.median(predicted)),
        "measured_step_s": float(np.median(measured)),
        "deviation": float(np.median(np.abs(predicted / measured - 1))),
        "tokens_per_step": float(np.average(mean_of(tokens), weights=weights)),
        "measured_tokens_per_step": float(np.average([held for *_, held in rows], weights=weights)),
        "steps": [[stop, float(seconds)] for (_, stop, _, _), seconds in zip(rows, predicted, strict=True)],
    }


def _line(values: F64, most: int = 600) -> list[list[float]]:
    """[step, value] from step 1 on; more than `most` are means of equal runs."""
    parts = np.array_split(np.arange(len(values)), min(len(values), most))
    return [[int(part[-1]) + 1, float(values[part].mean())] for part in parts]
