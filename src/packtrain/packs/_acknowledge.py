"""A reader and its producer: how far ranks have acknowledged on disk, which chunks are used up, and what a
waiting reader sees of the producer.

A cursor is published whole, one file for each rank, and only ever counts what a saved checkpoint covers. What
all ranks of one launch have acknowledged is the least of their cursors: behind that nobody goes back, and
only chunks that lie wholly before it may be removed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..errors import ForeignArtefactError, FormatError
from ..store.chunk_folder import (
    ACKS,
    COMPLETED,
    HELD_BACK,
    PRODUCER,
    Order,
    View,
    acknowledged,
    chunk_name,
    is_cursor,
)
from ..waiting.claim import STALE_S, Held
from ..waiting.claim import look as look_at
from ..waiting.poll import Clock, Watch, fresh_json

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Cursor:
    """Where a rank stands: it takes slot `start + step * world_size + rank` next.

    Attributes:
        order_world: ranks that the chunks are dealt to; that of the first launch on the stream.
        start: first slot of this launch's numbering of steps.
    """

    order_world: int
    start: int
    world_size: int
    rank: int
    step: int

    def slot(self, step: int) -> int:
        return self.start + step * self.world_size + self.rank

    @property
    def slots(self) -> int:
        """Slots that all ranks together have used."""
        return self.start + self.step * self.world_size

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "slots": self.slots}

    @classmethod
    def of_dict(cls, state: Mapping[str, Any]) -> Cursor:
        try:
            names = ("order_world", "start", "world_size", "rank", "step")
            found = cls(*(int(state[name]) for name in names))
            if min(found.order_world, found.world_size) < 1 or min(found.start, found.rank, found.step) < 0:
                raise ValueError("below its least value")
            return found
        except (KeyError, TypeError, ValueError, OverflowError):
            raise FormatError(
                f"{state!r} is not the state of a reader", hint="use what state_dict gave"
            ) from None

    @classmethod
    def resumed(cls, state: Mapping[str, Any], stream: str, world_size: int, rank: int) -> Cursor:
        """The cursor of `rank` of `world_size` behind a state.

        Raises:
            ForeignArtefactError: the state is of another stream.
        """
        was = cls.of_dict(state)
        if state.get("stream") != stream:
            raise ForeignArtefactError(
                f"the state is of stream {str(state.get('stream'))[:12]}, the folder holds {stream[:12]}",
                hint="resume on the folder that the checkpoint was trained on",
            )
        if world_size == was.world_size:
            return cls(was.order_world, was.start, world_size, rank, was.step)
        return cls(was.order_world, was.slots, world_size, rank, 0)


def publish_cursor(marks: Path, stream: str, cursor: Cursor, slots: int, end: int | None) -> None:
    """Write what one rank has acknowledged into the folder of marks, unless it has said as much before.

    A launch that went back to an older checkpoint says less than one before it: chunks may be gone by now,
    and the producer counts on what was said, so a cursor never goes back.

    Args:
        end: slots of the stream where it has ended.
    """
    step = (slots - cursor.start) // cursor.world_size
    told = Cursor(cursor.order_world, cursor.start, cursor.world_size, cursor.rank, step).to_dict()
    # one file for each rank of a launch; launches that began elsewhere count other slots as theirs
    plain = cursor.start == 0 and cursor.order_world == cursor.world_size
    launch = "" if plain else f"_o{cursor.order_world:05d}_s{cursor.start:012d}"
    path = marks / ACKS / f"w{cursor.world_size:05d}{launch}_r{cursor.rank:05d}.json"
    held = fresh_json(path)
    if is_cursor(held) and held["stream"] == stream and int(held["slots"]) >= slots:
        return
    files.remove_leftovers(path.parent, path.name)
    files.publish_json(path, {**told, "stream": stream, "end": end})


def check_reachable(folder: Path, state: Mapping[str, Any], end: int) -> None:
    """Refuse a state that stands behind the end of its stream: it would read nothing, and say nothing.

    Slots are counted in whole steps, so the last step of a stream, and a launch that began behind it, may
    stand a little behind the end; a state that was made there says where the end was (fillers are taken only
    when it is known).

    Args:
        state: what is resumed from.
        end: slots of the stream, which has ended.

    Raises:
        ForeignArtefactError: it does.
    """
    was = Cursor.of_dict(state)
    if was.slots <= end or state.get("end") == end:
        return
    raise ForeignArtefactError(
        f"the state stands behind slot {was.slots:,}, and the stream in {folder} ended after {end:,}",
        hint="resume on the folder that the checkpoint was trained on; it was perhaps produced anew since, "
        "of fewer samples",
    )


def mark_completed(
    marks: Path, view: View, order: Order, cursor: Cursor, slots: int, first: int
) -> tuple[int, list[int]]:
    """Mark this rank's chunks that lie wholly before `slots`, in the folder of marks.

    Returns:
        (chunk to begin with next time, numbers that were marked now)
    """
    # does this launch deal chunks as the order does?
    own = cursor.world_size == cursor.order_world and cursor.start % cursor.world_size == 0
    if not own:  # ranks read chunks of each other: a chunk is used up when all are past it
        least = acknowledged(marks, str((view.stream or {})["stream"]))
        slots = 0 if least is None else min(slots, int(least["slots"]))
    marked: list[int] = []
    begin = first
    for chunk in range(first + (cursor.rank - first) % cursor.world_size, order.chunks, cursor.world_size):
        if order.end_of(chunk) > slots:
            if own:
                break
            continue
        path = marks / f"{chunk_name(chunk)}{COMPLETED}"
        if chunk_name(chunk) in view.names and not path.exists():
            files.remove_leftovers(marks, path.name)
            files.publish_text(path, "")
            marked.append(chunk)
        if own:
            begin = chunk + cursor.world_size
    return begin, marked


# --------------------------------------------------------------------------------------------
# What a waiting reader knows of the producer: its heartbeat by the reader's own clock, and its last word
# --------------------------------------------------------------------------------------------
# A producer that stopped is no reason to give up: it may be started again and goes on where it was. The
# reader says so in its log and waits on, as long as it was told to.
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
