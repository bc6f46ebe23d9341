"""A run's ledger on disk: samples that it does not train, and what takes them out of packs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import append_line

__all__ = ["LedgerFile", "Skipping"]


class LedgerFile:
    """Lines {sample_id, reason, detail}, one a sample; of a file that grew only what was added is read."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._ids: set[Any] = set()
        self._read = 0  # bytes of whole lines

    def ids(self) -> set[Any]:
        """The ids by now."""
        if self.path is None or not self.path.is_file():
            return self._ids
        if self.path.stat().st_size < self._read:  # another file in its place
            self._ids, self._read = set(), 0
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            if line.endswith(b"}"):
                self._ids.add(json.loads(line)["sample_id"])
        return self._ids

    def write(self, sample_id: Any, reason: str, detail: str) -> None:
        """Add a row, where the sample has none."""
        if self.path is not None and sample_id not in self.ids():
            row = {"sample_id": sample_id, "reason": reason, "detail": detail}
            append_line(self.path, json.dumps(row, ensure_ascii=False))


class Skipping:
    """Takes samples out of packs that were made before.

    Args:
        ids: of the samples.
        ledger_file: JSON lines file that they are written into when they are met, as `skipped`.

    Raises:
        InputError: there are ids, and no file.
    """

    def __init__(self, ids: Iterable[int] | None, ledger_file: str | Path | None) -> None:
        self.ids = frozenset(ids or ())
        if self.ids and ledger_file is None:
            raise InputError("samples that are left out must be written down", hint="name a ledger_file")
        self.ledger = LedgerFile(None if ledger_file is None else Path(ledger_file))

    def kept(self, sample_ids: Iterable[Any]) -> list[int]:
        """Places of the samples that stay."""
        if not self.ids:
            return list(range(len(list(sample_ids))))
        stay = []
        for place, sample_id in enumerate(sample_ids):
            if sample_id in self.ids:
                self.ledger.write(sample_id, "skipped", "named by the run")
            else:
                stay.append(place)
        return stay
