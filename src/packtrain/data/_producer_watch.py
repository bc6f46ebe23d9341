"""What a waiting reader knows of the producer: its heartbeat by the reader's own clock, and its last word.

A producer that stopped is no reason to give up: it may be started again and goes on where it was. The reader
says so in its log and waits on, as long as it was told to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..errors import WaitTimeoutError
from ..store.growing import PRODUCER, View
from ..waiting.claim import STALE_S, Held
from ..waiting.claim import look as look_at
from ..waiting.poll import Clock, Watch

__all__ = ["ProducerWatch", "wait_for"]

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


def wait_for(
    ready: Callable[[], bool],
    view: View,
    what: str,
    rank: int,
    max_wait_s: float,
    poll_s: float,
    clock: Clock,
) -> None:
    """Look at the folder until `ready`.

    Raises:
        WaitTimeoutError: it was not ready within `max_wait_s` (0 = for ever); says what was seen.
    """
    watch = ProducerWatch(view.folder, clock)
    began = clock.now()
    while True:
        view.refresh()
        if ready():
            return
        waited = clock.now() - began
        watch.look(rank, what)
        if max_wait_s and waited >= max_wait_s:
            raise WaitTimeoutError(
                f"rank {rank} waited {waited:.1f} s for {what} in {view.folder}; "
                f"{len(view.counts)} chunks are there; {watch.said()}",
                hint="raise max_wait_time (0 = for ever), or see the producer's output",
            )
        rest = max_wait_s - waited if max_wait_s else poll_s
        clock.sleep(max(0.001, min(poll_s, rest)))
