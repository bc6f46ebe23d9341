"""The page of a plan or run, and its figures: from the artefacts alone, the same for `run` and `show`.

A run's plan brings its training log, the balance of its ranks, and its forecast beside what was measured. A
run of packs that were not planned has its log, its validation and what it left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from .. import files
from ..errors import FormatError, PacktrainError
from ..measuring.run import CUT
from ..planning.costs import DeviceProfile
from ..planning.epoch_order import EpochOrder
from ..planning.lengths import STATUS_NAMES, Lengths
from ..planning.packplan import PackPlan
from .inputs import Inputs, lengths_of_plan
from .length_files import lengths_of
from .plan import ledger_rows
from .step_times import read_history, step_figures
from .unread import read_keys, told


@dataclass(kw_only=True)
class Report:
    """What a report is made of.

    Attributes:
        artefact: folder that `packtrain show` takes.
        plan, lengths: None: packs of the run were not planned.
        lengths_folder: None: the lengths lie in a file.
        source: the samples, for their records; None: not at hand.
        where: sample -> where it stands; None: as `source` says.
        order: how the run consumes its packs; None: no run.
        history: rows of its training log.
        comparison: packed and unpacked loss.
        validation: figures of the validation plan.
        config: of the run, plain.
        metrics: of the run, where it has no plan.
        consumed: what the run consumed; None: not known.
        proof: comparisons of its isolation proof; None: there was none.
        padded_to: tokens that rows of packs are padded to; None: they are as long as their packs.
        ledger_file: of a run without a plan, what it left out; None: `left_out.jsonl` of the run.
    """

    artefact: Path
    plan: PackPlan | None = None
    lengths: Lengths | None = None
    lengths_folder: Path | None = None
    source: Any = None
    where: Callable[[int], str] | None = None
    order: EpochOrder | None = None
    history: Sequence[Mapping[str, Any]] = field(default_factory=list)
    comparison: Mapping[str, Any] | None = None
    validation: Mapping[str, Any] | None = None
    config: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    consumed: Mapping[str, Any] | None = None
    proof: int | None = None
    padded_to: int | None = None
    ledger_file: Path | None = None

    @classmethod
    def of_run(cls, artefact: Path, config: Any, figures: Mapping[str, Any]) -> Report:
        """Of the training in a run folder alone; `figures` are the result that stands in `run.json`."""
        return cls(
            artefact=artefact,
            history=read_history(artefact),
            validation=figures.get("eval"),
            config=config,
            metrics=figures.get("metrics") or {},
            consumed=figures.get("consumed"),
            proof=figures.get("proof"),
            ledger_file=None if "ledger_file" not in figures else Path(figures["ledger_file"]),
        )

    @classmethod
    def of(cls, artefact: Path, plan_folder: Path, plan: PackPlan) -> Report:
        """Of a plan folder, or of a run folder with its plan.

        Raises:
            FormatError: the lengths of the plan are gone.
        """
        lengths = lengths_of(plan_folder)
        try:
            lengths_folder: Path | None = lengths_of_plan(plan_folder)
        except FormatError:
            lengths_folder = None
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
            made.comparison, made.validation = figures.get("loss"), figures.get("eval")
            made.consumed, made.proof = figures.get("consumed"), figures.get("proof")
            made.padded_to = _padded_to(made.config, figures)
            made.history = read_history(artefact)
            made.order = order_of(artefact).packs_order
        return made

    def figures(self, profile: DeviceProfile | None = None) -> dict[str, Any]:
        """As `report.numbers.report_figures`."""
        from ..report.numbers import report_figures

        keys = "" if self.lengths_folder is None else told(read_keys(self.lengths_folder))
        return report_figures(
            self.plan,
            self.lengths,
            history=self.history,
            steps=None if self.order is None else step_figures(self.order, self.history, profile),
            comparison=self.comparison,
            validation=self.validation,
            keys=keys,
            metrics=self.metrics,
            left_out=None if self.plan is not None else self._left_out(),
            consumed=self.consumed,
            proof=self.proof,
            padded_to=self.padded_to,
        )

    def _left_out(self) -> Counter[str]:
        return Counter(str(row["reason"]) for row in self._ledger() if row["reason"] != CUT)

    def _ledger(self) -> Iterable[dict[str, Any]]:
        """id, reason, where and detail of every sample that is in no pack."""
        if self.plan is not None:
            source = self.source
            where = self.where or (None if source is None else source.where)
            return ledger_rows(self.plan, self.lengths_folder, where)
        path = self.ledger_file or self.artefact / "left_out.jsonl"
        if not path.is_file():
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
        where = self.where or (None if source is None else source.where)
        return write_report(
            path,
            title=title,
            plan=self.plan,
            lengths=self.lengths,
            ledger_rows=self._ledger(),
            figures=self.figures(profile),
            config=self.config,
            artefact=str(self.artefact),
            where=where,
            record=None if source is None else lambda i: record_of(source, i),
        )


def _padded_to(config: Mapping[str, Any], figures: Mapping[str, Any]) -> int | None:
    """What rows of a run were padded to; of an older version by its configuration."""
    data = config.get("data")
    older = data.get("pad_to_length") if isinstance(data, Mapping) else None
    found = figures.get("padded_to", older)
    return found if type(found) is int and found > 0 else None


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
    path = folder / "origin.json"
    origin = files.read_json(path) if path.is_file() else {}
    return (lambda sample: f"row {sample}") if isinstance(origin, dict) and "rows" in origin else None


def record_of(source: Any, sample: int) -> str:
    """The record of a sample as its source holds it, as JSON text; bytes and objects by their kind.

    Raises:
        PacktrainError, OSError: it cannot be read.
    """

    def short(value: Any) -> str:
        size = f" of {len(value):,} bytes" if isinstance(value, bytes) else ""
        return f"<{type(value).__name__}{size}>"

    return json.dumps(getattr(source, "source", source)[sample], ensure_ascii=False, default=short)


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
    made["record"] = None
    if source is not None:
        try:
            made["record"] = json.loads(record_of(source, sample))
        except (PacktrainError, OSError) as error:
            made["record"] = str(error)
    return made
