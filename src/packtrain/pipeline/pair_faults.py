"""Records that `packtrain pairs` cannot use: the first stops it by name, or all of them stand in a ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InputError, SampleError
from ..extend import Source
from ..measuring.run import drained
from .unread import refuse_unread

__all__ = ["Faults", "samples_of"]


class Faults:
    """Records that cannot be used: the first stops the command, or all of them go into the ledger."""

    def __init__(self, source: Source, skip: bool) -> None:
        self._source, self._skip = source, skip
        self._rows: dict[int, dict[str, Any]] = {}
        self._keys: dict[str, int] = {}
        drained(source)

    def add(self, number: int, error: SampleError) -> None:
        where = self._source.where(number)
        if not self._skip:
            said = error.message if where in error.message else f"{where}: {error.message}"
            raise InputError(
                f"{error.reason}: {said}", hint=error.hint or "mend it, or leave such records out: skip=True"
            ) from error
        row = {"id": number, "where": where, "reason": error.reason, "message": error.message}
        self._rows.setdefault(number, row)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def read_once(self) -> None:
        """Every record was read once: what nothing read is counted, or refused.

        Raises:
            UnreadKeys: more than 1 % of the records hold a key that changes training and is not read.
        """
        self._keys = drained(self._source)
        rows = [(number, row["reason"], row["message"]) for number, row in self._rows.items()]
        refuse_unread(rows, len(self._source))

    @property
    def counted(self) -> dict[str, Any]:
        """`skipped`, where records may be; `keys`, where nothing read some (`sources._account`)."""
        skipped = {"skipped": len(self._rows)} if self._skip else {}
        return {**skipped, **({"keys": self._keys} if self._keys else {})}

    def publish(self, path: Path) -> None:
        """Write the ledger; without faults there is none."""
        if self._rows:
            lines = [json.dumps(self._rows[number], ensure_ascii=False) for number in sorted(self._rows)]
            files.publish_text(path, "\n".join(lines) + "\n")
        else:
            files.remove(path)


def samples_of(source: Source, faults: Faults) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(number, sample) of the records that have no fault so far; faults of reading are added."""
    for number in range(len(source)):
        if number not in faults:
            try:
                sample = source[number]
            except SampleError as error:
                faults.add(number, error)
                continue
            yield number, sample
