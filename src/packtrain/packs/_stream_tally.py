"""What a reader has read and left out of an epoch, over all its splits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..measuring.run import drained
from ..sources._account import UNREAD, check_share, told
from .ledger_file import check_fraction

logger = logging.getLogger(__name__)

_FEW = 100  # samples read before a share of them counts


class Tally:
    """Args:
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
