"""What a waiting reader knows of the producer: its heartbeat by the reader's own clock, and its last word.

A producer that stopped is no reason to give up: it may be started again and goes on where it was. The reader
says so in its log and waits on, as long as it was told to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..errors import WaitTimeoutError, counted
from ..store.growing import HELD_BACK, PRODUCER, View
from ..waiting.claim import STALE_S, Held
from ..waiting.claim import look as look_at
from ..waiting.poll import Clock, Watch

__all__ = ["ProducerWatch", "wait_for"]

logger = logging.getLogger(__name__)

#: Seconds between two log lines of a waiting reader.
TELL_S = 30.0

_NEITHER = (
    "where a rank needs more chunks before its next checkpoint, neither goes on: raise --max-ahead, at least "
    "to the number of ranks, or save more often"
)


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
            home = self._folder.parent
            return "no producer has begun" + ("" if home.is_dir() else f": there is no folder {home}")
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
        more = f" ({_NEITHER})" if self.is_held_back else ""
        return f"{who} is {beat.get('stage', 'working')}{more}"

    @property
    def is_held_back(self) -> bool:
        """Does a living producer wait for chunks to be acknowledged?"""
        held = self._held
        if held is None or held.owner is None or held.owner.is_dead or self._quiet >= STALE_S:
            return False
        working = held.beat.get("state") not in ("failed", "released")
        return working and str(held.beat.get("stage", "")).startswith(HELD_BACK)


def wait_for(
    ready: Callable[[], bool],
    view: View,
    what: str,
    rank: int,
    max_wait_s: float,
    poll_s: float,
    clock: Clock,
    *,
    first: bool = False,
) -> None:
    """Look at the folder until `ready`.

    Args:
        first: no rank can have used a pack as yet, so none can acknowledge one.

    Raises:
        WaitTimeoutError: it was not ready within `max_wait_s` (0 = for ever), or never will be: the producer
            waits for readers that cannot begin; says what was seen.
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
                f"{counted(len(view.counts), 'chunks')} are there; {watch.said()}",
                hint="raise timeout_s (0 = for ever), or see the producer's output",
            )
        if first and waited >= TELL_S and watch.is_held_back:
            raise WaitTimeoutError(
                f"rank {rank} cannot begin: {what} need more "
                f"than the {counted(len(view.counts), 'chunks')} in "
                f"{view.folder}, and the producer waits until some are acknowledged",
                hint="packtrain produce with a larger --max-ahead: at least the number of ranks",
            )
        rest = max_wait_s - waited if max_wait_s else poll_s
        clock.sleep(max(0.001, min(poll_s, rest)))
