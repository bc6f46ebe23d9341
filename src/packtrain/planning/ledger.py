"""Ledger: every sample that is not in the plan, with its reason, also those that the user leaves out by id.

read = packed + ledger, always.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, PlanError, counted, without_path
from .lengths import STATUS_FAILED, Lengths
from .spec import PlanSpec


class Ledger:
    """Sample ids with reason codes. Immutable.

    Attributes:
        ids: int64[m], ascending, each once.
        codes: uint8[m], index into `table`.
        table: reason names in the order of their codes.

    >>> ledger = Ledger.of({4: "empty", 2: "over_long", 9: "empty"})
    >>> ledger.ids.tolist(), ledger.reasons, ledger.counts()
    ([2, 4, 9], ['over_long', 'empty', 'empty'], {'empty': 2, 'over_long': 1})
    """

    __slots__ = ("codes", "ids", "table")

    ids: NDArray[np.int64]
    codes: NDArray[np.uint8]
    table: list[str]

    def __init__(self, ids: NDArray[Any], codes: NDArray[Any], table: Sequence[str]) -> None:
        if len(table) > 256:
            raise PlanError(f"the ledger holds {len(table)} different reasons, limit is 256")
        self.ids = np.array(ids, dtype=np.int64)
        self.codes = np.array(codes, dtype=np.uint8)
        self.table = list(table)
        self.ids.flags.writeable = False
        self.codes.flags.writeable = False

    @classmethod
    def of(cls, reasons: dict[int, str]) -> Ledger:
        """The ledger of a mapping id -> reason."""
        table = sorted(set(reasons.values()))
        ids = sorted(reasons)
        return cls(np.array(ids, dtype=np.int64), np.array([table.index(reasons[i]) for i in ids]), table)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Pairs (sample id, reason), ids ascending."""
        for index, code in zip(self.ids.tolist(), self.codes.tolist(), strict=True):
            yield index, self.table[code]

    def __repr__(self) -> str:
        return f"Ledger({self.counts()})"

    @property
    def reasons(self) -> list[str]:
        """Reason name of each entry, aligned with `ids`."""
        return [self.table[code] for code in self.codes.tolist()]

    def counts(self) -> dict[str, int]:
        """Entries by reason, names ascending; reasons without an entry are left out."""
        number = np.bincount(self.codes, minlength=len(self.table)).tolist()
        return {name: held for name, held in sorted(zip(self.table, number, strict=False)) if held}

    def with_more(self, ids: NDArray[Any], reason: str) -> Ledger:
        """A new ledger that also holds `ids` for `reason`."""
        table = self.table if reason in self.table else [*self.table, reason]
        merged = np.concatenate([self.ids, np.asarray(ids, dtype=np.int64)])
        codes = np.concatenate([self.codes, np.full(len(ids), table.index(reason), dtype=np.uint8)])
        order = np.argsort(merged, kind="stable")
        return Ledger(merged[order], codes[order], table)


# --------------------------------------------------------------------------------------------
# Samples that the user leaves out of a plan, by id: they go to the ledger as `skipped`
# --------------------------------------------------------------------------------------------
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
        raise InputError(
            f"the list of samples to skip, {path}, cannot be read: {without_path(error)}"
        ) from None
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
        if word.isascii() and word.isdigit():
            ids.add(int(word))
        elif word:
            why = f"{path}:{number}: {word!r} is not a sample id"
            raise InputError(why, hint="one id a line: 0, 1, 2, …")
    return tuple(sorted(ids))


def cap_words(reason: str, tokens: int, costs: Mapping[str, int], spec: PlanSpec) -> str:
    """What a sample has of what is capped, and the cap: of the cost that the reason names, or tokens.

    >>> cap_words("over_images", 900, {"images": 9}, PlanSpec(pack_length=1024, limits={"images": 8}))
    '9 images, the cap is 8'
    """
    name = reason.removeprefix("over_")
    if name in spec.limits and name in costs:
        return f"{costs[name]} {name}, the cap is {spec.limits[name]}"
    return f"{tokens} tokens, the cap is {spec.pack_length}"
