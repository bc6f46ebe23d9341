"""Looking again until something is there: fresh reads, own time, pauses that grow and differ.

A network client caches which names a folder holds, and `stat` of a name that was absent keeps saying so
for up to a minute. So every look lists the parent folder first, which renews that cache, and then opens
the file: what is read is the content, never the mere existence. Times are this process's own monotonic
clock; no time stamp that another host wrote is ever read.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from ..errors import SourceError
from ..files import parse_json
from ..remote.copies import names, renew
from ..remote.places import url_of

_log = logging.getLogger(__name__)

#: Seconds between two looks: from the first to the last, growing.
FIRST_PAUSE, LAST_PAUSE = 0.05, 2.0


class Clock(Protocol):
    """Time of this process alone."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Watch:
    """How long a value has not changed, by this process's own clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._value: object = self
        self._since = clock.now()
        self.changes = -1

    def quiet(self, value: object) -> float:
        """Seconds since `value` was first seen as it is now."""
        if value != self._value:
            self._value, self._since = value, self._clock.now()
            self.changes += 1
        return self._clock.now() - self._since


def fresh_names(folder: Path) -> list[str]:
    """The names in a folder, sorted; none when it is absent or unreadable for the moment.

    For a folder of copies (`remote.copies`) those that are behind its URL now.
    """
    try:
        if (held := names(folder)) is not None:
            return held
        return sorted(os.listdir(folder))
    except OSError:
        return []
    except SourceError as error:
        _log.warning("%s", error)
        return []


def fresh_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None while it is absent, torn or unreadable for the moment."""
    try:
        if url_of(path) is None:
            fresh_names(path.parent)
        else:
            renew(path)
        with open(path, "rb") as handle:
            value = parse_json(handle.read())
    except (OSError, ValueError):  # also a remote one that is not there, or not to be reached now
        return None
    return value if isinstance(value, dict) else None


def pauses(seed: str) -> Iterator[float]:
    """Pauses in seconds without end: growing, and up to a quarter shorter by chance.

    Many waiters that began at once so spread their looks instead of all asking at the same instant.
    """
    chance = random.Random(seed)
    pause = FIRST_PAUSE
    while True:
        yield pause * (1 - chance.random() / 4)
        pause = min(LAST_PAUSE, pause * 1.5)
