"""Samples that the user leaves out of a plan, by id: they go to the ledger as `skipped`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ..errors import InputError, PlanError, counted
from .lengths import STATUS_FAILED, Lengths
from .spec import PlanSpec

__all__ = ["read_skip_file", "without_skipped"]


def without_skipped(lengths: Lengths, spec: PlanSpec) -> Lengths:
    """`lengths` with the samples of `spec.skip` marked as not usable. The caller's Lengths stays as it is.

    A sample that could not be used anyway keeps its own reason.

    Raises:
        PlanError: an id is not one of the samples.
    """
    if not spec.skip:
        return lengths
    ids = np.array(spec.skip, dtype=np.int64)
    if int(ids[-1]) >= len(lengths):
        raise PlanError(
            f"skip holds sample {int(ids[-1])}, but {counted(len(lengths), 'samples')} were read",
            hint="ids are 0..n-1 of the source that was measured",
        )
    ids = ids[np.asarray(lengths.status)[ids] == 0]
    status = np.array(lengths.status)
    status[ids] = STATUS_FAILED
    reasons = {**lengths.reasons, **dict.fromkeys(ids.tolist(), "skipped")}
    return Lengths(lengths.tokens, lengths.costs, status, reasons)


def read_skip_file(path: str | Path) -> tuple[int, ...]:
    """Sample ids of a file: one a line (empty lines and `#` comments do not count), or a JSON list.

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the list of samples to skip, {path}, cannot be read: {error}") from None
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path} is not a JSON list of sample ids: {error}") from None
        if any(type(value) is not int or value < 0 for value in values):
            raise InputError(f"{path} holds something else than sample ids", hint="ids are 0, 1, 2, …")
        return tuple(sorted(set(values)))
    ids = set()
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if word and not (word.isascii() and word.isdigit()):
            raise InputError(
                f"{path}:{number}: {word!r} is not a sample id", hint="one id a line: 0, 1, 2, …"
            )
        if word:
            ids.add(int(word))
    return tuple(sorted(ids))
