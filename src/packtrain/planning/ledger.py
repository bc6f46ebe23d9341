"""Ledger: every sample that is not in the plan, with its reason. read = packed + ledger, always."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError

__all__ = ["Ledger"]


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
        return {
            name: number[self.table.index(name)]
            for name in sorted(self.table)
            if number[self.table.index(name)]
        }

    def with_more(self, ids: NDArray[Any], reason: str) -> Ledger:
        """A new ledger that also holds `ids` for `reason`."""
        table = self.table if reason in self.table else [*self.table, reason]
        merged = np.concatenate([self.ids, np.asarray(ids, dtype=np.int64)])
        codes = np.concatenate([self.codes, np.full(len(ids), table.index(reason), dtype=np.uint8)])
        order = np.argsort(merged, kind="stable")
        return Ledger(merged[order], codes[order], table)
