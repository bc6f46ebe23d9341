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

from .. import files
from ..errors import FormatError, PacktrainError
from ..measuring.run import CUT
from ..planning.costs import DeviceProfile
from ..planning.epoch_order import EpochOrder
from ..planning.lengths import STATUS_NAMES, Lengths
from ..planning.packplan import PackPlan
from ..report.numbers import Training, report_figures
from ..store import lengths as lengths_store
from .inputs import Inputs, lengths_of_plan
from .length_files import lengths_of
from .plan import ledger_rows
from .publish import details, placed
from .step_times import read_history, step_figures
from .unread import read_keys, told

logger = logging.getLogger(__name__)


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
            more["left_out"] = self._left_out()
        return report_figures(self.plan, self.lengths, replace(self.training, **more))

    def _left_out(self) -> Counter[str]:
        return Counter(str(row["reason"]) for row in self._ledger() if row["reason"] != CUT)

    def _ledger(self) -> Iterable[dict[str, Any]]:
        """id, reason, where and detail of every sample that is in no pack."""
        if self.plan is not None:
            source = self.source
            where = self.where or (None if source is None else source.where)
            return ledger_rows(self.plan, self.lengths_folder, where)
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
        where = self.where or (None if source is None else source.where)
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
            where=where,
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
