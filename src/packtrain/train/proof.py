"""prove_isolation: is a sample in a pack the same as alone, on this model and backend? And its controls.

    report = prove_isolation(model, samples);  report.ok, report.rows, report.first_leak

For every backend, several pack orders and a pad tail:

    logits, loss    packed against each sample alone
    gradients       of the mean token loss over all samples, packed against summed up alone
    tamper          one text token of a sample is changed, each sample in turn, in two orders: the
                    logits of all other samples stay the same bit for bit

A one-token sample is added when none is there. When a sample reads another, `first_leak` names the
first decoder layer whose output differs. The same proof catches leaking set-ups: `alter` makes one
out of every batch (a mask of ones, a cache, positions without the text row), and the proof fails.

Trade-off: the whole row's logits are built, so give it a few short samples (`proof_samples`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..collate import PackBatch
from ..errors import InputError, counted, first_line
from .loss import bare_model
from .probe import (
    Alter,
    Probe,
    Sample,
    as_it_was,
    changed,
    gap_size,
    largest_gap,
    media_fields,
    name_of,
    on_backend,
    opening,
    ordinary_tokens,
    single_token,
    size_of,
)

logger = logging.getLogger(__name__)


#: Largest difference (logits, mean loss, gradient of the mean loss) by dtype. 16-bit results are
#: compared loosely, since another row length rounds differently; there the tamper test decides.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 3e-5, torch.bfloat16: 0.25, torch.float16: 0.05}

_PAD = 5  # tokens of the pad tail


@dataclass(frozen=True)
class ProofRow:
    """One comparison.

    Attributes:
        backend: attention implementation.
        order: which row: "in order", "reversed", "rotated", "padded".
        check: "logits", "loss", "gradients" or "tamper".
        worst: largest absolute difference.
        limit: what it may be; 0 for bitwise.
        where: the sample or parameter of `worst`.
    """

    backend: str
    order: str
    check: str
    worst: float
    limit: float
    where: str = ""

    @property
    def ok(self) -> bool:
        return self.worst <= self.limit  # False for NaN


@dataclass
class IsolationReport:
    """What the proof found. `ok` is True when every comparison held."""

    rows: list[ProofRow] = field(default_factory=list)
    leaking_layer: str | None = None

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def first_leak(self) -> str | None:
        """One line about the first comparison that failed, with the leaking layer when it was found."""
        failed = next((row for row in self.rows if not row.ok), None)
        if failed is None:
            return None
        layer = f", first in {self.leaking_layer}" if self.leaking_layer else ""
        return (
            f"{failed.check} on {failed.backend}, samples {failed.order}: {failed.where} differs by "
            f"{failed.worst:.2g} (limit {failed.limit:.2g}){layer}"
        )


def prove_isolation(
    model: Any,
    samples: Sequence[Mapping[str, Any]],
    backends: Sequence[str] = ("sdpa", "eager"),
    *,
    alter: Alter | None = None,
    gradients: bool = True,
    to_the_end: bool = True,
) -> IsolationReport:
    """Run the proof. Weights, gradients, mode and backend of the model are as before afterwards.

    Args:
        model: transformers model; its dtype decides the tolerance (float32: 3e-5).
        samples: two or more encoded samples, best with and without media, and short.
        backends: attention implementations to try.
        alter: changes every collated batch before the model sees it.
        gradients: False leaves the gradient comparison out (it holds two gradients of the model).
        to_the_end: False: the first leak ends it, and no further pass is made.

    Raises:
        InputError: fewer than two samples, or samples the collator refuses.
        IsolationError: a backend is not available for this model.
    """
    bare = bare_model(model)
    members = [dict(sample) for sample in samples]
    if len(members) < 2:
        raise InputError(f"{counted(len(members), 'samples')} given to the proof", hint="give two or more")
    _check_vocabulary(bare, members)
    ordinary = ordinary_tokens(bare, members)
    if all(size_of(member) > 1 for member in members):
        members.append(single_token(members[0], ordinary))
    report = IsolationReport()
    with as_it_was(bare):
        for backend in backends:
            with on_backend(bare, backend):
                for row in _rows(Probe(bare, alter, gradients), backend, members, ordinary, report):
                    report.rows.append(row)
                    if not (row.ok or to_the_end):
                        break
    if not report.ok:
        # A control is meant to fail.
        level = logging.WARNING if alter is None else logging.DEBUG
        logger.log(level, "isolation does not hold: %s", report.first_leak)
    return report


def _check_vocabulary(model: Any, members: Sequence[Sample]) -> None:
    """InputError where a sample holds tokens that the model has no embedding of."""
    table = getattr(model.get_input_embeddings(), "weight", None) if hasattr(model, "config") else None
    most = max(
        (int(np.asarray(member["input_ids"]).max()) for member in members if size_of(member)), default=0
    )
    if table is not None and table.dim() == 2 and table.shape[0] and most >= table.shape[0]:
        raise InputError(
            f"the samples hold token {most}, the model has {table.shape[0]:,} tokens",
            hint="give samples that the processor of this model encoded",
        )


def proof_samples(
    packs: Sequence[Sequence[Mapping[str, Any]]], model: Any, tokens: int = 512
) -> list[Sample]:
    """Short samples of some packs, up to three with media and three without; together at most `tokens`.

    Where fewer than two samples are short enough, the text before the first medium of others stands in.

    Args:
        packs: encoded packs.
        model: what they are for; it knows the media placeholders.
        tokens: how many tokens the proof's row may have.
    """
    every = sorted((dict(sample) for pack in packs for sample in pack), key=size_of)
    fitting = [sample for sample in every if size_of(sample) <= tokens // 2]
    first = [s for s in fitting if media_fields(s)][:3], [s for s in fitting if not media_fields(s)][:3]
    chosen: list[Sample] = []
    for sample in (s for both in itertools.zip_longest(*first) for s in both if s is not None):
        if sum(map(size_of, chosen)) + size_of(sample) <= tokens:
            chosen.append(sample)
    if len(chosen) < 2:
        whole = {id(sample) for sample in chosen}
        cut = (opening(s, model, tokens // 4) for s in every if id(s) not in whole)
        chosen += itertools.islice((s for s in cut if s is not None), 2)
    return chosen


def _orders(count: int) -> dict[str, list[int]]:
    forward = list(range(count))
    return {"in order": forward, "reversed": forward[::-1], "rotated": [*forward[1:], 0], "padded": forward}


def _rows(
    probe: Probe, backend: str, members: list[Sample], ordinary: list[int], report: IsolationReport
) -> Iterator[ProofRow]:
    """Every comparison on a backend; the next one is made when it is asked for."""
    yield from _compare(probe, backend, members, report)
    for order in ("in order", "reversed"):
        yield _tamper(probe, backend, order, members, ordinary, report)


def _compare(
    probe: Probe, backend: str, members: list[Sample], report: IsolationReport
) -> Iterator[ProofRow]:
    """Logits, loss and gradients of every order against the samples alone."""
    limit = _TOLERANCE[next(probe.model.parameters()).dtype]
    logits, loss, tokens = [], 0.0, 0
    reference: dict[str, torch.Tensor] = {}
    for member in members:
        run = probe.run([member])
        logits.append(run.logits)
        loss, tokens = loss + run.loss, tokens + run.tokens
        for name, grad in run.gradients.items():
            reference[name] = reference[name] + grad if name in reference else grad
    lengths = [size_of(member) for member in members]
    for order, places in _orders(len(members)).items():
        pad = sum(lengths) + _PAD if order == "padded" else None
        packed = probe.run([members[p] for p in places], pad_to_length=pad)
        parts = packed.logits[: sum(lengths)].split([lengths[p] for p in places])
        gaps = {p: largest_gap(part, logits[p]) for p, part in zip(places, parts, strict=True)}
        worst = max(gaps, key=lambda p: gap_size(gaps[p]))
        where = name_of(members[worst], worst)
        found = ProofRow(backend, order, "logits", gaps[worst], limit, where)
        if not found.ok and report.leaking_layer is None:
            row, start = [members[p] for p in places], sum(lengths[p] for p in places[: places.index(worst)])
            part = slice(start, start + lengths[worst])
            report.leaking_layer = probe.first_layer(row, [members[worst]], part, alone=True, limit=limit)
        yield found
        gap = 0.0 if packed.loss == loss else abs(packed.loss - loss) / max(1, tokens)  # infinite ones too
        yield ProofRow(backend, order, "loss", gap, limit, "the mean token loss")
        if probe.gradients:
            value, where = _gradient_gap(packed.gradients, reference, max(1, tokens))
            yield ProofRow(backend, order, "gradients", value, limit, where)


def _gradient_gap(
    packed: dict[str, torch.Tensor], alone: dict[str, torch.Tensor], tokens: int
) -> tuple[float, str]:
    """Largest difference of the gradients of the mean token loss; an absent gradient is zero."""
    worst, where = 0.0, "no parameter"
    for name in {**alone, **packed}:
        one, other = packed.get(name), alone.get(name)
        gap = other if one is None else one if other is None else one - other
        value = float(gap.abs().max()) / tokens if gap is not None and gap.numel() else 0.0
        if gap_size(value) > gap_size(worst):
            worst, where = value, f"the gradient of {name}"
    return worst, where


def _tamper(
    probe: Probe,
    backend: str,
    order: str,
    members: list[Sample],
    ordinary: list[int],
    report: IsolationReport,
) -> ProofRow:
    """Change each sample in turn; the others' logits must not move by a single bit."""
    row = [members[place] for place in _orders(len(members))[order]]
    lengths = [size_of(member) for member in row]
    clean = probe.logits(row).split(lengths)
    worst, where = 0.0, "no sample"
    for index, member in enumerate(row):
        other_text = changed(member, ordinary)
        if other_text is None:
            continue
        tampered = [*row[:index], other_text, *row[index + 1 :]]
        after = probe.logits(tampered).split(lengths)
        for other in range(len(row)):
            if other == index or torch.equal(clean[other], after[other]):
                continue
            gap = largest_gap(clean[other], after[other])
            if gap_size(gap) > gap_size(worst):
                worst, where = gap, f"{name_of(row[other], other)} reads {name_of(member, index)} and"
            if report.leaking_layer is None:
                start = sum(lengths[:other])
                part = slice(start, start + lengths[other])
                report.leaking_layer = probe.first_layer(row, tampered, part)
    return ProofRow(backend, order, "tamper", worst, 0.0, where)


# --------------------------------------------------------------------------------------------
# Negative controls: set-ups that leak, to show that the proof sees leaks on this model and these samples
# --------------------------------------------------------------------------------------------
#     for control in run_controls(model, samples, ("sdpa",)): control.name, control.caught, control.what
#
# A proof that never fails proves nothing. Each control spoils the row in one way that is known to let packed
# samples read each other somewhere, and runs the same proof without gradients:
#
#     mask of ones     an attention_mask of ones: transformers then takes the row for one document
#     cache            use_cache=True: the cache switches the detection of packed rows off
#     one segment      text positions and boundaries as if the row were one sample
#
# A control that does not fail is harmless on this model and backend (flash kernels read boundaries and no
# mask, for example), so it is reported as such. Where none is caught, the proof has no power there.
#: Samples of a control: the shortest, enough for one to read another.
_MEMBERS = 3


@dataclass(frozen=True)
class Control:
    """What the proof said about a spoiled set-up.

    Attributes:
        backend: attention implementation.
        name: one of `CONTROLS`.
        caught: True when the proof failed, as it should; None when the model itself refuses the row.
        what: the first leak, the refusal, or why nothing leaks.
    """

    backend: str
    name: str
    caught: bool | None
    what: str


def one_segment(batch: PackBatch) -> Mapping[str, Any]:
    tokens = batch["input_ids"].shape[1]
    positions = batch["position_ids"].clone()
    text = positions[0] if positions.dim() == 3 else positions
    text[:] = torch.arange(tokens)
    row = {**batch, "position_ids": positions}
    ends = torch.tensor([0, tokens], dtype=torch.int32)
    said = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": tokens, "max_length_k": tokens}
    row |= {name: value for name, value in said.items() if name in row}
    if "seq_idx" in row:
        row["seq_idx"] = torch.zeros_like(row["seq_idx"])
    return row


CONTROLS: dict[str, Callable[[PackBatch], Mapping[str, Any]]] = {
    "mask of ones": lambda batch: {**batch, "attention_mask": torch.ones_like(batch["input_ids"])},
    "cache": lambda batch: {**batch, "use_cache": True},
    "one segment": one_segment,
}


def run_controls(
    model: Any, samples: Sequence[Mapping[str, Any]], backends: Sequence[str] = ("sdpa", "eager")
) -> list[Control]:
    """Every control on every backend, with the shortest of the samples.

    Args:
        model: transformers model; left as it was.
        samples: two or more encoded samples.
        backends: attention implementations.
    """
    ordered = sorted((dict(sample) for sample in samples), key=size_of)
    longer = [sample for sample in ordered if size_of(sample) > 1]
    members = longer[:_MEMBERS] if len(longer) > 1 else ordered
    found = []
    for backend in backends:
        for name, alter in CONTROLS.items():
            try:
                report = prove_isolation(
                    model, members, (backend,), alter=alter, gradients=False, to_the_end=False
                )
            except (ValueError, TypeError, RuntimeError, IndexError) as error:
                found.append(Control(backend, name, None, f"the model refuses it: {first_line(error)}"))
                continue
            what = report.first_leak or "harmless here: nothing reads another sample"
            found.append(Control(backend, name, not report.ok, what))
    return found
