"""A run's ledger on disk: samples that it does not train, and what takes them out of packs."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import number, one_of
from ..errors import InputError, SampleError, counted
from ..files import append_line, reading
from ..measuring.encoding import fault_of
from ..measuring.run import drained, located
from ..sources._account import UNREAD, check_share, told

logger = logging.getLogger(__name__)

_FEW = 100  # samples read before a share of them counts

#: What to do about a sample that stops a run.
SKIPS = "on_error='skip' leaves such samples out, into the ledger"


def check_policy(on_error: Any, max_skip_fraction: Any, ledger_file: Any) -> None:
    """Refuse a policy that does not exist, and one that would lose samples without a word."""
    one_of("on_error", on_error, ("raise", "skip", "zero"))
    if max_skip_fraction is not None:
        number("max_skip_fraction", max_skip_fraction, 0, 1, without=(1,))
    if on_error == "raise" and max_skip_fraction is not None:
        logger.warning("max_skip_fraction has no effect with on_error 'raise'")
    if on_error != "raise":
        need_ledger(ledger_file, f"on_error {on_error!r}")


def need_ledger(ledger_file: Any, who: str) -> None:
    """Refuse to leave samples out without a word."""
    if ledger_file is None:
        raise InputError(
            f"{who} needs a ledger_file: samples that are left out must be written down",
            hint="name a ledger_file (a JSON lines file)",
        )


def check_fraction(limit: float | None, skipped: int, total: int, read: int, more: str = "") -> None:
    """Stop where a larger share of the samples than `max_skip_fraction` cannot be used.

    Args:
        total: what the share is of.
        read: samples read so far, for people.
        more: reasons.
    """
    if limit is not None and skipped > limit * total:
        raise InputError(
            f"{skipped:,} of {counted(read, 'samples')} were "
            f"left out, more than max_skip_fraction {limit}{more}",
            hint="see the ledger for each of them; correct the source, or raise max_skip_fraction",
        )


def write_row(path: Path, sample_id: Any, reason: str, detail: str) -> None:
    """Add a line about a sample that is left out, or not trained whole."""
    row = {"sample_id": _as_json(sample_id), "reason": reason, "detail": detail}
    append_line(path, json.dumps(row, ensure_ascii=False))


def _as_json(sample_id: Any) -> Any:
    """The id as a ledger holds it."""
    if sample_id is None or isinstance(sample_id, Integral):
        return None if sample_id is None else int(sample_id)
    return str(sample_id)


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
        with reading(self.path, "a ledger of samples", "move it away; it is written again"):
            self._ids.update(
                json.loads(line)["sample_id"] for line in whole.splitlines() if line.endswith(b"}")
            )
        return self._ids

    def write(self, sample_id: Any, reason: str, detail: str) -> None:
        """Add a row, where the sample has none."""
        if self.path is not None and _as_json(sample_id) not in self.ids():
            write_row(self.path, sample_id, reason, detail)


class Skipping:
    """Takes samples out of packs: those that a run names, and by `on_error` those that cannot be encoded.

    Args:
        ids: of the samples that are named.
        ledger_file: JSON lines file that they are written into when they are met, as `skipped`.
        on_error: what becomes of a sample that cannot be encoded: `raise`; `skip`: it leaves its pack (the
            last one of a pack stays, without weight); `zero`: a segment without weight stands in its place.
        max_skip_fraction: stop beyond this share of the samples.
        total: samples of all packs; None: nobody knows, the share is of those read here (at least 100).

    Raises:
        InputError: samples would be left out, and there is no file; no such policy.
    """

    def __init__(
        self,
        ids: Iterable[int] | None,
        ledger_file: str | Path | None,
        on_error: str = "raise",
        max_skip_fraction: float | None = None,
        total: int | None = None,
    ) -> None:
        self.ids = frozenset(ids or ())
        if self.ids:
            need_ledger(ledger_file, "skip")
        check_policy(on_error, max_skip_fraction, ledger_file)
        self.ledger = LedgerFile(None if ledger_file is None else Path(ledger_file))
        self.on_error, self.max_skip_fraction, self.total = on_error, max_skip_fraction, total
        self._read, self._failed = 0, set[Any]()

    def kept(self, sample_ids: Iterable[Any]) -> list[int]:
        """Places of the samples that no run has named."""
        stay = []
        for place, sample_id in enumerate(sample_ids):
            self._read += 1
            if sample_id in self.ids:
                self.ledger.write(sample_id, "skipped", "named by the run")
            else:
                stay.append(place)
        return stay

    def failed(self, sample_id: Any, error: Exception, place: str, length: int) -> dict[str, Any]:
        """What stands in the place of a sample that cannot be encoded.

        Args:
            place: where it stands, for people; "": nobody knows.
            length: tokens that its pack keeps for it.

        Raises:
            SampleError: `on_error` is `raise`; names the sample.
            InputError: too many failed.
            Exception: the error itself, where it is no fault of the sample (`fault_of`).
        """
        fault = fault_of(error)
        told = located(place, fault.message)
        if self.on_error == "raise" and sample_id not in self.ids:
            where = f" ({place})" if place else ""
            raise SampleError(
                fault.reason, f"sample {sample_id}{where}: {fault.message}", hint=fault.hint or SKIPS
            ) from error
        if sample_id not in self.ids:
            done = "zeroed" if self.on_error == "zero" else "left out"
            logger.warning("sample %s %s (%s): %s", sample_id, done, fault.reason, told)
            self.ledger.write(sample_id, fault.reason, told)
            self._failed.add(sample_id)
            self._check_share()
        return {
            "input_ids": np.zeros(length, dtype=np.int64),
            "labels": np.full(length, -100, dtype=np.int64),
            "sample_id": sample_id,
            "stand_in": True,
        }

    def failed_media(self, sample: Mapping[str, Any], error: Exception, place: str) -> dict[str, Any]:
        """The same for an encoded sample whose media cannot be encoded."""
        return self.failed(sample["sample_id"], error, place, len(sample["input_ids"]))

    def _check_share(self) -> None:
        if self.max_skip_fraction is None:
            return
        if self.total is None:
            check_fraction(self.max_skip_fraction, len(self._failed), max(self._read, _FEW), self._read)
        else:
            failed = len(self.ledger.ids() - self.ids)  # on all ranks
            check_fraction(self.max_skip_fraction, failed, self.total, self.total)

    def without(self, members: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The samples of a pack without what stands in for others, under `skip`."""
        if self.on_error != "skip":
            return members
        return [member for member in members if not member.get("stand_in")] or members[:1]


class Tally:
    """What a reader has read and left out of an epoch, over all its splits.

    Args:
        stream: its settings.
        reading: splits of this reader that the epoch is not read out of yet.

    Attributes:
        left_out: reason -> samples.
    """

    def __init__(self, stream: Any, reading: int) -> None:
        self.stream, self.reading = stream, reading
        self.runs: list[Any] = []  # splits of this reader in this epoch
        self.left_out: dict[str, int] = {}
        self._keys: Counter[str] = Counter()  # that the source does not read
        self._tell_at = self._told = 0  # samples read; counts that were told
        self._unread = ""  # the last record with a key that is not read

    @property
    def read(self) -> int:
        """Samples taken from the source."""
        return sum(run.read for run in self.runs)

    def add(self, left_out: Mapping[str, int]) -> None:
        """Count what a saved split had left out."""
        for reason, count in left_out.items():
            self.left_out[reason] = self.left_out.get(reason, 0) + count

    def failed(self, sample_id: int, reason: str, message: str) -> None:
        """A sample was left out because of an error; stop where that were too many."""
        self.check_skipped(max(self.read, _FEW))
        if reason == UNREAD:
            self._unread = f"sample {sample_id}: {message}"
            self._check_unread(last=False)

    def read_out(self) -> None:
        """A split has no further sample in this epoch."""
        self.reading -= 1
        if self.reading == 0:
            self.tell_keys(last=True)
            self._check_unread(last=True)
            self.check_skipped(self.read)

    def check_skipped(self, total: int) -> None:
        """Stop where `on_error="skip"` leaves out a larger share than `max_skip_fraction`."""
        skipped = sum(self.left_out.values()) - self.left_out.get("skipped", 0)
        check_fraction(self.stream.max_skip_fraction, skipped, total, self.read, f": {self.left_out}")

    def tell_keys(self, *, last: bool) -> None:
        """Keys that the source does not read: after the first window, each tenfold of it, and at the end."""
        self._keys.update(drained(self.stream.reader.source))
        read = self.read
        if read >= self._tell_at or (last and self._keys.total() > self._told):
            self._tell_at, self._told = 10 * read, self._keys.total()
            if self._keys and self.stream.tells and self.stream.place.is_writer:
                logger.warning("keys of the first %s samples, %s", f"{read:,}", told(self._keys))

    def _check_unread(self, *, last: bool) -> None:
        """Stop where more than 1 % of the records read hold a key that changes training and is not read."""
        if self._unread:
            check_share(self.left_out.get(UNREAD, 0), self.read, self._unread, last=last)
