"""Negative controls: set-ups that leak, to show that the proof sees leaks on this model and these samples.

    for control in run_controls(model, samples, ("sdpa",)): control.name, control.caught, control.what

A proof that never fails proves nothing. Each control spoils the row in one way that is known to let packed
samples read each other somewhere, and runs the same proof without gradients:

    mask of ones     an attention_mask of ones: transformers then takes the row for one document
    cache            use_cache=True: the cache switches the detection of packed rows off
    one segment      text positions and boundaries as if the row were one sample

A control that does not fail is harmless on this model and backend (flash kernels read boundaries and no
mask, for example), so it is reported as such. Where none is caught, the proof has no power there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..collate import PackBatch
from .probe import size_of
from .proof import prove_isolation

__all__ = ["CONTROLS", "Control", "run_controls"]

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


def mask_of_ones(batch: PackBatch) -> Mapping[str, Any]:
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def cache_on(batch: PackBatch) -> Mapping[str, Any]:
    return {**batch, "use_cache": True}


def one_segment(batch: PackBatch) -> Mapping[str, Any]:
    tokens = batch["input_ids"].shape[1]
    positions = batch["position_ids"].clone()
    if positions.dim() == 3:
        positions[0] = torch.arange(tokens)
    else:
        positions[:] = torch.arange(tokens)
    row = {**batch, "position_ids": positions}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in row:
            row[name] = torch.tensor([0, tokens], dtype=torch.int32)
    for name in ("max_length_q", "max_length_k"):
        if name in row:
            row[name] = tokens
    if "seq_idx" in row:
        row["seq_idx"] = torch.zeros_like(row["seq_idx"])
    return row


CONTROLS: dict[str, Callable[[PackBatch], Mapping[str, Any]]] = {
    "mask of ones": mask_of_ones,
    "cache": cache_on,
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
                refusal = str(error).splitlines()[0] if str(error) else type(error).__name__
                found.append(Control(backend, name, None, f"the model refuses it: {refusal}"))
                continue
            what = report.first_leak or "harmless here: nothing reads another sample"
            found.append(Control(backend, name, not report.ok, what))
    return found
