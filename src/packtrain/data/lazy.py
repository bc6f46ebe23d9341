"""LazyShardedDataset: packs out of a directory that may still grow, each rank from its own chunks.

Chunk c belongs to rank c % W. Micro step m starts on a rank only when the packs of all ranks for m are
visible to it, so no rank waits inside a collective for data that one of them lacks; at the end ranks
without a pack get fillers, and all make the same number of steps. Ranks never talk to each other: each
looks at the folder.

A cursor counts micro steps. `state_dict` goes into the checkpoint; when the checkpoint is saved,
`acknowledge` says so on disk: chunks that are used up get their `.completed` mark, and only those may be
removed.

Trade-off: another number of ranks goes on exactly where the old one stopped, in the old order of slots, so
its ranks then read chunks of each other.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ..errors import FormatError, InputError
from ..store.chunks import ChunkReader
from ..store.growing import STREAM, Order, View, acknowledged, chunk_name, raw_place
from ..waiting.poll import Clock, SystemClock
from ..world import World
from ._acknowledge import Cursor, mark_completed, publish_cursor
from ._lazy_views import SlotSampler, SlotStream
from ._producer_watch import wait_for
from .pack_row import PackRow

__all__ = ["LazyShardedDataset", "LengthUnknownError"]

logger = logging.getLogger(__name__)

_STARTS = ("acknowledged", "beginning")


class LengthUnknownError(InputError, TypeError):
    """The stream has not ended: nobody knows its length. (A TypeError too, so `list(ds)` does without.)"""


class LazyShardedDataset(Dataset[PackRow]):  # type: ignore[misc]
    """Packs of one rank from a directory of chunks.

    Iterating yields this rank's packs (`PackRow`: a mapping with `input_ids labels position_ids cu_seq_lens
    lengths sample_ids` and all further fields), micro step by micro step. As a map, `ds[g]` is slot g of
    the global order of consumption: rank r takes r, r + W, r + 2W, … With a DataLoader use
    `DataLoader(ds, sampler=ds.sampler(), batch_size=1, collate_fn=…)` or `DataLoader(ds.stream(), …)`.

    Args:
        directory: what `packtrain produce` writes; it may be empty or absent as yet.
        rank, world_size: this reader among all.
        max_wait_time: longest wait for one pack in seconds of this process; 0 = for ever.
        poll_interval: seconds between two looks at the folder.
        start: `acknowledged`: go on behind what was acknowledged in this folder; `beginning`: slot 0.
        cache_chunks: chunks that stay open.
        encode: makes media tensors anew where the chunks hold media as their bytes.
        clock: this process's time.

    A pass starts at the start, the first one after `load_state_dict` where the state stands.

    Raises (reading):
        WaitTimeoutError: a pack did not come within `max_wait_time`.
        FormatError: a chunk is torn, or was removed; names it.
    """

    def __init__(
        self,
        directory: str | Path,
        rank: int = 0,
        world_size: int = 1,
        max_wait_time: float = 0,
        poll_interval: float = 1.0,
        *,
        start: str = "acknowledged",
        cache_chunks: int = 4,
        encode: Callable[[Any], Mapping[str, Any]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        World(rank, world_size)
        if start not in _STARTS:
            raise InputError(f"start is {start!r}", hint=f"use one of {', '.join(_STARTS)}")
        if max_wait_time < 0 or poll_interval <= 0 or cache_chunks < 1:
            raise InputError(
                f"max_wait_time {max_wait_time}, poll_interval {poll_interval}, cache_chunks {cache_chunks}",
                hint="max_wait_time >= 0 (0 = for ever), poll_interval > 0, cache_chunks >= 1",
            )
        self.directory = Path(directory)
        self.rank, self.world_size = rank, world_size
        self.max_wait_time, self.poll_interval = float(max_wait_time), float(poll_interval)
        self.start, self.cache_chunks, self.encode = start, cache_chunks, encode
        self._clock = clock or SystemClock()
        self._view = View(self.directory, self._clock)
        self._order: Order | None = None
        self._cursor: Cursor | None = None
        self._resumed = False
        self._open: OrderedDict[int, ChunkReader] = OrderedDict()
        self._marked = 0
        self._asked: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------ reading
    def __iter__(self) -> Iterator[PackRow]:
        for slot in self.slots():
            row = self._row(slot)
            cursor = self._here()
            cursor.step = (slot - cursor.start) // cursor.world_size + 1
            yield row

    def slots(self) -> Iterator[int]:
        """This rank's slots from where a pass begins, each when all ranks can take its micro step."""
        self._begin()
        cursor = self._here()
        step = cursor.step if self._resumed else 0
        self._resumed = False
        while self._wait_for_step(step):
            yield cursor.slot(step)
            step += 1

    def __getitem__(self, index: int) -> PackRow:
        """Slot `index` of the global order; waits for it. IndexError behind the end of the stream."""
        slot = operator.index(index)
        if slot < 0:
            raise IndexError(f"slot {slot}: slots count from 0")
        self._begin()
        self._wait_for_slot(slot)
        if slot >= self._end():
            raise IndexError(f"slot {slot} of {self._end()}")
        return self._row(slot)

    def __len__(self) -> int:
        """Slots of the whole stream, fillers included: a multiple of the world size.

        Raises:
            LengthUnknownError: the stream has not ended.
        """
        self._view.refresh()
        if not self._view.is_complete:
            raise LengthUnknownError(
                f"{self.directory} may still grow: it has no END, or not all its chunks are visible",
                hint="iterate, use ds.sampler(), or train a number of steps (max_steps)",
            )
        self._begin()
        return self._end()

    @property
    def steps(self) -> int:
        """Micro steps of a whole pass; equal on every rank. Raises as `len`."""
        total, cursor = len(self), self._here()
        return (total - cursor.start) // cursor.world_size

    @property
    def has_ended(self) -> bool:
        """Is every chunk of the stream visible?"""
        if not self._view.is_complete:
            self._view.refresh()
        return self._view.is_complete

    @property
    def config(self) -> dict[str, Any]:
        """What the producer was told: `pack_length`, `media`, …; waits for the stream to begin."""
        self._begin()
        assert self._view.stream is not None
        return dict(self._view.stream["config"])

    def peek(self, step: int, count: int) -> list[PackRow]:
        """Packs of this rank from micro step `step` on, at most `count`; waits for them, uses none up."""
        self._begin()
        steps = range(step, step + count)
        return [self._row(self._here().slot(one)) for one in steps if self._wait_for_step(one)]

    def locate(self, local: int) -> tuple[int, int]:
        """(chunk, row) of this rank's pack number `local`; waits for it. IndexError where there is none."""
        if local < 0:
            raise IndexError(f"pack {local}: packs count from 0")
        self._begin()
        slot = self._here().slot(local)
        self._wait_for_slot(slot)
        place = self._grown().place(slot)
        if place is None:
            raise IndexError(f"pack {local} of rank {self.rank}: the stream has ended before it")
        return place

    def where(self, sample_id: int) -> tuple[str, int]:
        """(raw shard, record from 0) that a sample came from."""
        return raw_place(self.directory, sample_id)

    def sampler(self) -> SlotSampler:
        """Slots of this rank, as they become visible: for `DataLoader(ds, sampler=ds.sampler())`."""
        return SlotSampler(self)

    def stream(self) -> SlotStream:
        """An iterable view that the workers of a DataLoader share; keeps the order."""
        return SlotStream(self)

    # ------------------------------------------------------------------------------------ cursors
    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands: what was yielded by the last pass counts as used."""
        self._begin()
        cursor = self._here()
        place = self._grown().place(cursor.slot(cursor.step))
        assert self._view.stream is not None
        return {**cursor.to_dict(), "stream": self._view.stream["stream"], "next": place and list(place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind `state`, which any rank of the same step may have given, at any world size.

        Raises:
            ForeignArtefactError: the state is of another stream.
        """
        self._asked = dict(state)
        self._cursor, self._order, self._resumed = None, None, True

    def at_step(self, step: int) -> dict[str, Any]:
        """The state after `step` micro steps: for loaders whose workers run ahead."""
        self._begin()
        cursor = self._here()
        held, cursor.step = cursor.step, step
        try:
            return self.state_dict()
        finally:
            cursor.step = held

    def acknowledge(self, step: int | Mapping[str, Any] | None = None) -> list[int]:
        """A checkpoint at `step` (a count, a state, or None: all that was yielded) is saved.

        Writes this rank's cursor, and the `.completed` marks of its chunks that are used up.

        Returns:
            The numbers of the chunks that were marked.
        """
        self._begin()
        self._view.refresh()  # workers may have read what this process has not seen
        cursor = self._here()
        if isinstance(step, Mapping):
            slots = Cursor.of_dict(step).slots
        else:
            slots = cursor.start + cursor.world_size * (cursor.step if step is None else int(step))
        assert self._view.stream is not None
        publish_cursor(self.directory, self._view.stream["stream"], cursor, slots)
        order = self._grown()
        self._marked, marked = mark_completed(self.directory, self._view, order, cursor, slots, self._marked)
        return marked

    # ------------------------------------------------------------------------------------ waiting
    def _begin(self) -> None:
        """Know the stream, and where to start in it."""
        if self._cursor is not None:
            return
        if self._view.stream is None:
            self._wait(lambda: self._view.stream is not None, str(self.directory / STREAM))
        assert self._view.stream is not None
        stream = self._view.stream["stream"]
        cursor = Cursor(self.world_size, 0, self.world_size, self.rank, 0)
        if self._asked is not None:
            cursor = Cursor.resumed(self._asked, stream, self.world_size, self.rank)
        elif self.start == "acknowledged":
            found = acknowledged(self.directory, stream)
            if found is not None:
                cursor = Cursor.resumed(found, stream, self.world_size, self.rank)
                self._resumed = True
                logger.warning(
                    "%s: going on behind %d slots that were acknowledged", self.directory, cursor.slots
                )
        self._cursor = cursor
        self._order = Order(cursor.order_world)

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
        """One past the last slot, rounded up to whole steps. Only behind END."""
        cursor, order = self._here(), self._grown()
        left = max(0, order.last_rounds * order.world - cursor.start)
        return cursor.start + -(-left // cursor.world_size) * cursor.world_size

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
                lambda: self._is_visible(slots) or self._view.is_complete, f"the packs of micro step {step}"
            )
        return self._is_visible(slots) or first < self._end()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        wait_for(ready, self._view, what, self.rank, self.max_wait_time, self.poll_interval, self._clock)

    def _row(self, slot: int) -> PackRow:
        place = self._grown().place(slot)
        if place is None:
            logger.info("slot %d is a filler: one untrained token", slot)
            return PackRow.filler(slot)
        chunk, row = place
        return PackRow.of(self._reader(chunk), row, slot, chunk)

    def _reader(self, chunk: int) -> ChunkReader:
        reader = self._open.pop(chunk, None)
        if reader is None:
            reader = self._opened(chunk)
        self._open[chunk] = reader
        while len(self._open) > self.cache_chunks:
            self._open.popitem(last=False)
        return reader

    def _opened(self, chunk: int) -> ChunkReader:
        path = self.directory / chunk_name(chunk)
        try:
            return ChunkReader(path, encode=self.encode)
        except FormatError:
            if path.exists():
                raise
            raise FormatError(
                f"{path} was removed: it had been acknowledged",
                hint="go on behind what was acknowledged, or produce into a new folder that keeps its chunks",
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        """Workers open their own chunks."""
        return {**self.__dict__, "_open": OrderedDict()}
