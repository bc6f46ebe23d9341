"""What a waiting reader knows of the producer: its heartbeat by the reader's own clock, and its last word.

A producer that stopped is no reason to give up: it may be started again and goes on where it was. The reader
says so in its log and waits on, as long as it was told to.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ..store.growing import PRODUCER
from ..waiting.claim import STALE_S, Held
from ..waiting.claim import look as look_at
from ..waiting.poll import Clock, Watch

__all__ = ["ProducerWatch"]

logger = logging.getLogger(__name__)

#: Seconds between two log lines of a waiting reader.
TELL_S = 30.0


class ProducerWatch:
    """The producer as it is seen during one wait."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder / PRODUCER
        self._clock = clock
        self._watch = Watch(clock)
        self._told = clock.now()
        self._held: Held | None = None
        self._quiet = 0.0

    def look(self, rank: int, what: str) -> None:
        """Look at the heartbeat; a log line now and then."""
        self._held = look_at(self._folder)
        self._quiet = 0.0 if self._held is None else self._watch.quiet(self._held.pulse)
        if self._clock.now() - self._told >= TELL_S:
            self._told = self._clock.now()
            logger.warning("rank %d waits for %s; %s", rank, what, self.said())

    def said(self) -> str:
        """One line on the producer."""
        held = self._held
        if held is None or held.owner is None:
            return "no producer has begun"
        who = f"the producer ({held.owner})"
        beat = held.beat
        if beat.get("state") == "failed":
            return f"{who} failed: {(beat.get('error') or {}).get('message', 'no reason given')}"
        if beat.get("state") == "released":
            return f"{who} has stopped"
        if held.owner.is_dead:
            return f"{who} is gone"
        if self._quiet >= STALE_S:
            return f"{who} has given no sign of life for {self._quiet:.0f} s"
        return f"{who} is {beat.get('stage', 'working')}"
