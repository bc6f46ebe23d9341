"""Waits for the next chunk of a growing directory and reads its packs, for LazyShardedDataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from ..errors import FormatError, InputError, WaitTimeoutError, counted
from ..store.chunks import ChunkReader, OpenChunks
from ..store.growing import (
    HELD_BACK,
    PRODUCER,
    STREAM,
    Order,
    View,
    acknowledged,
    check_folder,
    chunk_name,
    readers,
    register,
)
from ..waiting.claim import STALE_S, Held
from ..waiting.claim import look as look_at
from ..waiting.poll import Clock, SystemClock, Watch
from ..world import World
from ._acknowledge import Cursor, check_reachable
from .ledger_file import Skipping
from .pack import Pack

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# What a waiting reader knows of the producer: its heartbeat by the reader's own clock, and its last word
# --------------------------------------------------------------------------------------------
# A producer that stopped is no reason to give up: it may be started again and goes on where it was. The
# reader says so in its log and waits on, as long as it was told to.
#: Seconds between two log lines of a waiting reader.
_TELL_S = 30.0

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
        if self._clock.now() - self._told >= _TELL_S:
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


def _wait_for(
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
        if first and waited >= _TELL_S and watch.is_held_back:
            raise WaitTimeoutError(
                f"rank {rank} cannot begin: {what} need more "
                f"than the {counted(len(view.counts), 'chunks')} in "
                f"{view.folder}, and the producer waits until some are acknowledged",
                hint="packtrain produce with a larger --max-ahead: at least the number of ranks",
            )
        rest = max_wait_s - waited if max_wait_s else poll_s
        clock.sleep(max(0.001, min(poll_s, rest)))


# --------------------------------------------------------------------------------------------
# Waits for the next chunk of a growing directory and reads its packs, for LazyShardedDataset
# --------------------------------------------------------------------------------------------
class SlotReader:
    """Waits for slots and reads them. Arguments as of `LazyShardedDataset`."""

    def __init__(
        self,
        directory: Path,
        place: World,
        timeout_s: float,
        poll_s: float,
        *,
        start: str | None,
        run: str | Path | None,
        cache_chunks: int,
        encode: Callable[[Any], Mapping[str, Any]] | None,
        clock: Clock | None,
        verify: bool,
        skipping: Skipping,
    ) -> None:
        self.directory = directory
        self.run = None if run is None else Path(run)
        self.rank, self.world_size = place.rank, place.size
        self.timeout_s, self.poll_s = float(timeout_s), float(poll_s)
        self.start, self.cache_chunks, self.encode = start, cache_chunks, encode
        self.skipping = skipping
        self._clock = clock or SystemClock()
        self._view = View(directory, self._clock)
        self._order: Order | None = None
        self._cursor: Cursor | None = None
        self._resumed = False
        self._open = OpenChunks(self._opened, cache_chunks, verify=verify)
        self._asked: Mapping[str, Any] | None = None
        self._resumed_from: Mapping[str, Any] | None = None

    def _begin(self) -> None:
        """Know the stream, and where to start in it."""
        if self._cursor is not None:
            return
        if self._view.stream is None:
            check_folder(self.directory)
            self._wait(lambda: self._view.stream is not None, str(self.directory / STREAM))
        assert self._view.stream is not None
        stream = self._view.stream["stream"]
        cursor = Cursor(self.world_size, 0, self.world_size, self.rank, 0)
        self._resumed_from = self._asked
        if self._asked is not None:
            cursor = Cursor.resumed(self._asked, stream, self.world_size, self.rank)
        elif self.start != "beginning":
            found = acknowledged(self.marks, stream)
            if found is None and self.start == "acknowledged":
                found = self._furthest()
            if found is not None:
                self._resumed_from = found
                cursor = Cursor.resumed(found, stream, self.world_size, self.rank)
                self._resumed = True
                logger.warning(
                    "%s: going on behind %d slots that were acknowledged", self.directory, cursor.slots
                )
        self._cursor = cursor
        self._order = Order(cursor.order_world)
        self._register()

    @property
    def marks(self) -> Path:
        """The folder of this reader's marks: in the run's own; the directory itself without a run, and for
        one that goes on from a state of before runs had marks of their own."""
        if self.run is None or (self._asked is not None and not self._asked.get("registered")):
            return self.directory
        return self.run.absolute() / "consumed" / self._here_stream()[:16]

    def _register(self) -> None:
        """Tell the producer that this run reads here: it removes no chunk that the run has not used."""
        if self.rank or self.marks == self.directory or get_worker_info() is not None:
            return
        try:
            register(self.directory, self._here_stream(), self.marks)
        except (OSError, InputError) as error:
            logger.warning(
                "this run cannot register in %s (%s): its producer may remove chunks that it has not read",
                self.directory,
                error,
            )

    def _furthest(self) -> Mapping[str, Any] | None:
        """What the reader that got furthest has acknowledged."""
        told = [told for told in readers(self.directory, self._here_stream()).values() if told is not None]
        return max(told, key=lambda one: int(one["slots"]), default=None)

    def _here_stream(self) -> str:
        return str((self._view.stream or {}).get("stream"))

    def _here(self) -> Cursor:
        assert self._cursor is not None
        return self._cursor

    def _grown(self) -> Order:
        """The order over all chunks that were seen."""
        order = self._order
        assert order is not None
        for packs in self._view.counts[order.chunks :]:
            order.append(packs)
        return order

    def _end(self) -> int:
        """One past the last slot, rounded up to whole steps. Only behind END.

        Raises:
            ForeignArtefactError: the state that was resumed from stands behind it.
        """
        cursor, order = self._here(), self._grown()
        if self._resumed_from is not None:
            check_reachable(self.directory, self._resumed_from, order.last_rounds * order.world)
        left = max(0, order.last_rounds * order.world - cursor.start)
        return cursor.start + -(-left // cursor.world_size) * cursor.world_size

    def _raw_end(self) -> int | None:
        """Slots of the stream, fillers of the last steps not counted; None before its end is visible."""
        return self._grown().last_rounds * self._grown().world if self._view.is_complete else None

    def _is_visible(self, slots: range) -> bool:
        """Can the packs of all these slots be read (or will they never come)?"""
        order = self._grown()
        return slots.stop <= order.whole_rounds * order.world or all(
            order.place(slot) is not None for slot in slots
        )

    def _wait_for_slot(self, slot: int) -> None:
        """Until a slot is visible, or the stream has ended."""
        slots = range(slot, slot + 1)
        if not self._is_visible(slots) and not self._view.is_complete:
            self._wait(lambda: self._is_visible(slots) or self._view.is_complete, f"the pack of slot {slot}")

    def _wait_for_step(self, step: int) -> bool:
        """Until all ranks can take micro step `step`; False when there is none."""
        cursor = self._here()
        first = cursor.start + step * cursor.world_size
        slots = range(first, first + cursor.world_size)
        if not self._is_visible(slots) and not self._view.is_complete:
            self._wait(
                lambda: self._is_visible(slots) or self._view.is_complete,
                f"the packs of micro step {step}",
                first=first == 0,
            )
        return self._is_visible(slots) or first < self._end()

    def _wait(self, ready: Callable[[], bool], what: str, *, first: bool = False) -> None:
        seconds = (self.timeout_s, self.poll_s)
        _wait_for(ready, self._view, what, self.rank, *seconds, self._clock, first=first)

    def _row(self, slot: int) -> Pack:
        place = self._grown().place(slot)
        if place is None:
            logger.info("slot %d is a filler: one untrained token", slot)
            return Pack.filler(slot)
        chunk, row = place
        members = self._open[chunk][row]
        stay = self.skipping.kept(one["sample_id"] for one in members)
        members = self.skipping.without([members[at] for at in stay])
        if not members:
            logger.info("slot %d: all its samples are skipped: one untrained token", slot)
            return Pack.filler(slot)
        return Pack(members, slot=slot, chunk=chunk, chunk_row=row)

    def _opened(self, chunk: int) -> ChunkReader:
        path = self.directory / chunk_name(chunk)
        try:
            return ChunkReader(path, encode=self.encode, failed=self.skipping.failed_media)
        except FormatError:
            told = self._furthest()
            if path.exists() or told is None:
                raise
            order = Order(int(told["order_world"]))
            for packs in self._view.counts:
                order.append(packs)
            if order.end_of(chunk) > int(told["slots"]):
                raise
            raise FormatError(
                f"{path} was removed: it had been acknowledged by every run that registered",
                hint="start: acknowledged goes on behind that; `packtrain produce --keep-completed` keeps "
                "more chunks",
            ) from None
