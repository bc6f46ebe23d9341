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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from ..checks import one_of, whole
from ..errors import FormatError, InputError, WaitTimeoutError, counted
from ..measuring.encoding import encoder_of
from ..moved import also_named, renamed
from ..remote.copies import place_of
from ..store.chunk_folder import (
    STREAM,
    Order,
    View,
    acknowledged,
    check_folder,
    chunk_name,
    raw_place,
    readers,
    register,
)
from ..store.chunks import ChunkReader, OpenChunks
from ..waiting.poll import Clock, SystemClock
from ..world import world
from ._acknowledge import TELL_S, Cursor, ProducerWatch, check_reachable, mark_completed, publish_cursor
from .handed_out import HandedOut, check_not_sharded
from .ledger_file import Skipping
from .loader import SourceLoader
from .pack import Pack

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# LazyShardedDataset for DataLoaders: a sampler of its slots, and an iterable that workers share
# --------------------------------------------------------------------------------------------
class SlotSampler(Sampler[int]):  # type: ignore[misc]
    """Slots of the dataset's rank (or of all ranks), each when its micro step can be taken by all ranks."""

    def __init__(self, dataset: LazyShardedDataset, all_ranks: bool) -> None:
        self.dataset, self.all_ranks = dataset, all_ranks

    def __iter__(self) -> Iterator[int]:
        return self.dataset.sampled(all_ranks=self.all_ranks)

    def __len__(self) -> int:
        """Slots of a pass; raises while the stream has no end."""
        return self.dataset.steps * (self.dataset.world_size if self.all_ranks else 1)


class SlotStream(IterableDataset[Pack]):  # type: ignore[misc]
    """The packs of the dataset's rank. Worker w of N reads micro steps w, w + N, …: the order stays."""

    def __init__(self, dataset: LazyShardedDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Pack]:
        worker = get_worker_info()
        if worker is None:
            yield from self.dataset
            return
        mine, of = worker.id, worker.num_workers
        for number, slot in enumerate(self.dataset.slots()):
            if number % of == mine:
                yield self.dataset[slot]


# --------------------------------------------------------------------------------------------
# LazyShardedDataset: packs out of a directory that may still grow, each rank from its own chunks
# --------------------------------------------------------------------------------------------


class LengthUnknownError(InputError, TypeError):
    """The stream has not ended: nobody knows its length. (A TypeError too, so `list(ds)` does without.)"""


class LazyShardedDataset(Dataset[Pack]):  # type: ignore[misc]
    """Packs of one rank from a directory of chunks.

    Iterating yields this rank's packs (`Pack`: a list of encoded samples, whose string keys read `input_ids
    labels position_ids cu_seq_lens lengths sample_ids` and all further fields), micro step by micro step. As
    a map, `ds[g]` is slot g of the global order of consumption: rank r takes r, r + W, r + 2W, … With a
    DataLoader use `ds.loader(collate)`, or `DataLoader(ds, sampler=ds.sampler(), batch_size=1)`, or
    `DataLoader(ds.stream(), …)`.

    Args:
        directory: what `packtrain produce` writes, or its URL; it may be empty or absent as yet.
        rank, world_size: this reader among all; None: from the launcher.
        timeout_s: longest wait for one pack in seconds of this process; 0 = for ever.
        poll_s: seconds between two looks at the folder.
        total_steps: micro steps that will be read, for samplers that ask for a length before the stream has
            ended; slots behind the end of the stream are fillers then.
        start: None: behind what this run has acknowledged, else slot 0; `acknowledged`: where this run has
            not acknowledged anything, behind what the run that got furthest has; `beginning`: slot 0.
        run: the folder of this run (`output_dir`), for its marks; None: they lie in the directory, as those
            of one reader.
        cache_chunks: chunks that stay open.
        encode: makes media tensors anew where the chunks hold media as their bytes.
        clock: this process's time.
        verify: hash each chunk once before its first pack is read: damaged bytes are named, never trained.
        skip: ids of samples that leave their packs; a pack without any other is a filler.
        ledger_file: JSON lines file that they are written into; needed for `skip` and `on_error`.
        on_error: `raise`; `skip` or `zero`: a sample whose media cannot be decoded leaves its pack, or a
            segment without weight stands in its place, and stands in the ledger.
        max_skip_fraction: stop when more than this share of the samples read here has failed.

    A pass starts at the start, the first one after `load_state_dict` where the state stands.

    Raises (reading):
        WaitTimeoutError: a pack did not come within `timeout_s`.
        FormatError: a chunk is torn, or was removed; names it.
        ChecksumError: the bytes of a chunk are not those that were written.
    """

    @renamed("max_wait_time", "poll_interval")
    @also_named("LazyShardedDataset")
    def __init__(
        self,
        directory: str | Path,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = 0,
        poll_s: float = 1.0,
        *,
        total_steps: int | None = None,
        start: str | None = None,
        run: str | Path | None = None,
        cache_chunks: int = 4,
        encode: Callable[[Any], Mapping[str, Any]] | None = None,
        clock: Clock | None = None,
        verify: bool = True,
        skip: Iterable[int] | None = None,
        ledger_file: str | Path | None = None,
        on_error: str = "raise",
        max_skip_fraction: float | None = None,
    ) -> None:
        if start is not None:
            one_of("start", start, ("acknowledged", "beginning"))
        if total_steps is not None:
            whole("total_steps", total_steps, 1)
        directory = Path(place_of(directory))
        if directory.is_file():
            raise InputError(f"{directory} is a file", hint="name the folder that `packtrain produce` writes")
        if not timeout_s >= 0 or not poll_s > 0 or cache_chunks < 1:
            raise InputError(
                f"timeout_s {timeout_s}, poll_s {poll_s}, cache_chunks {cache_chunks}",
                hint="timeout_s >= 0 (0 = for ever), poll_s > 0, cache_chunks >= 1",
            )
        place = world(rank, world_size)
        self.directory = directory
        self.run = None if run is None else Path(run)
        self.rank, self.world_size = place.rank, place.size
        self.timeout_s, self.poll_s = float(timeout_s), float(poll_s)
        self.start, self.cache_chunks, self.encode = start, cache_chunks, encoder_of(encode)
        self.skipping = Skipping(skip, ledger_file, on_error, max_skip_fraction)
        self._clock = clock or SystemClock()
        self._view = View(directory, self._clock)
        self._order: Order | None = None
        self._cursor: Cursor | None = None
        self._open = OpenChunks(self._opened, cache_chunks, verify=verify)
        self._asked: Mapping[str, Any] | None = None
        self._resumed_from: Mapping[str, Any] | None = None
        self.total_steps = total_steps
        self.handed = HandedOut(
            "use ds.loader(collate, num_workers=…), or state_dict(step): behind so many micro steps"
        )
        self._resumed = self._sampled = False
        self._marked = 0

    kind = "growing"
    state_file = "stream.json"
    per_rank_state = False
    epoch = 0

    # ------------------------------------------------------------------------------------ reading
    def __iter__(self) -> Iterator[Pack]:
        self.handed.begin_pass()
        for slot in self.slots():
            row = self._row(slot)
            cursor = self._begin()
            cursor.step = (slot - cursor.start) // cursor.world_size + 1
            yield row

    def slots(self, all_ranks: bool = False) -> Iterator[int]:
        """This rank's slots (or all), from where a pass begins, when all ranks can take their micro step."""
        if not all_ranks:
            check_not_sharded(self.world_size)
        cursor = self._begin()
        step = cursor.step if self._resumed else 0
        self._resumed = False
        while step != self.total_steps and self._wait_for_step(step):
            first = cursor.slot(step)
            own = first - self.rank
            yield from range(own, own + self.world_size) if all_ranks else (first,)
            step += 1

    def __getitem__(self, index: int) -> Pack:
        """Slot `index` of the global order; waits for it. IndexError behind the end of the stream."""
        slot = operator.index(index)
        cursor = self._begin()
        if slot >= 0:
            self._wait_for(range(slot, slot + 1), f"the pack of slot {slot}")
        end = self._end() if self.total_steps is None else len(self)
        if not 0 <= slot < end:
            raise IndexError(f"slot {slot} of {end}")
        self.handed.read()
        pack = self._row(slot)
        if self._sampled and get_worker_info() is None:  # by a loader without workers, which reads in turn
            cursor.step = (slot - cursor.start) // cursor.world_size + 1
        return pack

    def sampled(self, *, all_ranks: bool) -> Iterator[int]:
        """Slots for a sampler: what is read by number from now on moves this reader on."""
        self.handed.begin_pass()
        self._sampled = not all_ranks
        if all_ranks:
            self.handed.deal()
        return self.slots(all_ranks)

    def check_equal(self) -> str:
        """What every rank must have alike."""
        state = self.state_dict()
        return f"{state['stream']} {state['start']} {state['step']} {state['order_world']}"

    def __len__(self) -> int:
        """Slots of the whole stream, fillers included: a multiple of the world size.

        Raises:
            LengthUnknownError: the stream has not ended.
        """
        if self.total_steps is not None:
            return self._begin().start + self.total_steps * self.world_size
        if not self.has_ended:
            raise LengthUnknownError(
                f"{self.directory} may still grow: it has no END, or not all its chunks are visible",
                hint="iterate, use ds.sampler(), or name total_steps",
            )
        self._begin()
        return self._end()

    @property
    def steps(self) -> int:
        """Micro steps of a whole pass; equal on every rank. Raises as `len`."""
        total, cursor = len(self), self._begin()
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
        return dict((self._view.stream or {})["config"])

    @property
    def pack_length(self) -> int:
        """Tokens of a full pack; waits for the stream to begin."""
        return int(self.config["pack_length"])

    @property
    def begins_at(self) -> int:
        """The micro step at which the next pass begins."""
        step = self._begin().step
        return step if self._resumed else 0

    def mark_in(self, run: str | Path) -> None:
        """Keep the marks in the folder of a run, where none was named; before anything is read."""
        if self.run is None and self._cursor is None:
            self.run = Path(run)

    def set_epoch(self, epoch: int) -> None:
        """A directory is read once or over again: every epoch has the same packs."""
        self.epoch = epoch

    def peek(self, count: int, *, step: int | None = None) -> list[Pack]:
        """The next packs of this rank (those from micro step `step` on), at most `count`.

        Waits for them, uses none up.
        """
        cursor = self._begin()
        begin = cursor.step if step is None else step
        steps = range(begin, begin + count)
        return [self._row(cursor.slot(one)) for one in steps if self._wait_for_step(one)]

    def locate(self, local: int) -> tuple[int, int]:
        """(chunk, row) of this rank's pack number `local`; waits for it. IndexError where there is none."""
        slot = self._begin().slot(local)
        self._wait_for(range(slot, slot + 1), f"the pack of slot {slot}")
        place = None if local < 0 else self._grown().place(slot)
        if place is None:
            raise IndexError(f"pack {local} of rank {self.rank}: the stream has no such pack")
        return place

    def where(self, sample_id: int) -> tuple[str, int]:
        """(raw shard, record from 0) that a sample came from."""
        return raw_place(self.directory, sample_id)

    def sampler(self, *, all_ranks: bool = False) -> SlotSampler:
        """Slots of this rank, as they become visible: for `DataLoader(ds, sampler=ds.sampler())`.

        Args:
            all_ranks: slots of all ranks in turn, for loaders that deal them out themselves (accelerate).
        """
        return SlotSampler(self, all_ranks)

    def stream(self) -> SlotStream:
        """An iterable view that the workers of a DataLoader share; keeps the order."""
        return SlotStream(self)

    # ------------------------------------------------------------------------------------ cursors
    def loader(self, collate: Any, *, num_workers: int = 0, **options: Any) -> Any:
        """A DataLoader of batches of one pack each; its workers share the packs and keep their order."""
        return SourceLoader(self.stream(), self, self.handed, collate, num_workers=num_workers, **options)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would; change nothing."""
        was = Cursor.of_dict(state)
        if self._view.stream is not None:
            Cursor.resumed(state, self._stream(), self.world_size, self.rank)
        if self.has_ended and was.slots:
            order = self._grown(Order(was.order_world))  # of its own: nobody may have begun to read here
            check_reachable(self.directory, state, order.last_rounds * order.world)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where this rank stands: behind `step` micro steps, or behind what was yielded by the last pass."""
        return self.at_step(self.handed.step(self._begin().step) if step is None else step)

    def at_step(self, step: int) -> dict[str, Any]:
        """The state after `step` micro steps: for loaders whose workers run ahead."""
        cursor = replace(self._begin(), step=step)
        place = self._grown().place(cursor.slot(cursor.step))
        told = {"stream": self._stream(), "next": place and list(place), "end": self._raw_end()}
        own = {} if self.marks == self.directory else {"registered": True}
        return {**cursor.to_dict(), **told, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind `state`, which any rank of the same step may have given, at any world size.

        Raises:
            ForeignArtefactError: the state is of another stream, or stands behind its end (as soon as both
                are known).
        """
        Cursor.of_dict(state)
        self._asked = dict(state)
        self._cursor, self._order, self._resumed = None, None, True
        self.handed.restart()

    def acknowledge(self, step: int | Mapping[str, Any] | None = None) -> list[int]:
        """A checkpoint at `step` (a count, a state, or None: all that was yielded) is saved.

        Writes this rank's cursor (never one below what it has said before), and the `.completed` marks of
        its chunks that are used up.

        Returns:
            The numbers of the chunks that were marked.
        """
        cursor = self._begin()
        self._view.refresh()  # workers may have read what this process has not seen
        if isinstance(step, Mapping):
            slots = Cursor.resumed(step, self._stream(), cursor.world_size, cursor.rank).slots
        else:
            slots = cursor.start + cursor.world_size * operator.index(
                self.handed.step(cursor.step) if step is None else step
            )
        end = self._end() if self._view.is_complete else self._grown().last_rounds * cursor.order_world
        if self.total_steps is not None:
            end = max(end, len(self))  # a promised length: fillers follow the end
        if not cursor.start <= slots <= max(end, cursor.slots):
            raise InputError(
                f"step {step!r} is none that was read: {slots - cursor.start} slots from {cursor.start} on, "
                f"{end} are there",
                hint="acknowledge what state_dict or at_step gave",
            )
        self._register()  # again: an empty directory may have been begun anew
        publish_cursor(self.marks, self._stream(), cursor, slots, self._raw_end())
        order = self._grown()
        self._marked, marked = mark_completed(self.marks, self._view, order, cursor, slots, self._marked)
        return marked

    # ------------------------------------------------------------------------------------ waiting
    def _begin(self) -> Cursor:
        """Where this rank stands, once the stream has begun."""
        if self._cursor is not None:
            return self._cursor
        if self._view.stream is None:
            check_folder(self.directory)
            self._wait(lambda: self._view.stream is not None, str(self.directory / STREAM))
        stream = self._stream()
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
        return cursor

    @property
    def marks(self) -> Path:
        """The folder of this reader's marks: in the run's own; the directory itself without a run, and for
        one that goes on from a state of before runs had marks of their own."""
        if self.run is None or (self._asked is not None and not self._asked.get("registered")):
            return self.directory
        return self.run.absolute() / "consumed" / self._stream()[:16]

    def _register(self) -> None:
        """Tell the producer that this run reads here: it removes no chunk that the run has not used."""
        if self.rank or self.marks == self.directory or get_worker_info() is not None:
            return
        try:
            register(self.directory, self._stream(), self.marks)
        except (OSError, InputError) as error:
            logger.warning(
                "this run cannot register in %s (%s): its producer may remove chunks that it has not read",
                self.directory,
                error,
            )

    def _furthest(self) -> Mapping[str, Any] | None:
        """What the reader that got furthest has acknowledged."""
        told = [told for told in readers(self.directory, self._stream()).values() if told is not None]
        return max(told, key=lambda one: int(one["slots"]), default=None)

    def _stream(self) -> str:
        return str((self._view.stream or {}).get("stream"))

    def _grown(self, order: Order | None = None) -> Order:
        """The order over all chunks that were seen."""
        order = order or self._order
        assert order is not None
        for packs in self._view.counts[order.chunks :]:
            order.append(packs)
        return order

    def _end(self) -> int:
        """One past the last slot, rounded up to whole steps. Only behind END.

        Raises:
            ForeignArtefactError: the state that was resumed from stands behind it.
        """
        cursor, order = self._begin(), self._grown()
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

    def _wait_for(self, slots: range, what: str, *, first: bool = False) -> bool:
        """Until all these slots are visible, or the stream has ended; whether they are visible."""

        def ready() -> bool:
            return self._is_visible(slots) or self._view.is_complete

        if not ready():
            self._wait(ready, what, first=first)
        return self._is_visible(slots)

    def _wait_for_step(self, step: int) -> bool:
        """Until all ranks can take micro step `step`; False when there is none."""
        cursor = self._begin()
        first = cursor.start + step * cursor.world_size
        slots = range(first, first + cursor.world_size)
        return (
            self._wait_for(slots, f"the packs of micro step {step}", first=first == 0) or first < self._end()
        )

    def _wait(self, ready: Callable[[], bool], what: str, *, first: bool = False) -> None:
        """Look at the folder until `ready`.

        Args:
            first: no rank can have used a pack as yet, so none can acknowledge one.

        Raises:
            WaitTimeoutError: it was not ready within `timeout_s` (0 = for ever), or never will be: the
                producer waits for readers that cannot begin; says what was seen.
        """
        view, clock = self._view, self._clock
        watch, began = ProducerWatch(view.folder, clock), clock.now()
        while True:
            view.refresh()
            if ready():
                return
            waited, there = clock.now() - began, counted(len(view.counts), "chunks")
            watch.look(self.rank, what)
            if self.timeout_s and waited >= self.timeout_s:
                raise WaitTimeoutError(
                    f"rank {self.rank} waited {waited:.1f} s for {what} in {view.folder}; "
                    f"{there} are there; {watch.said()}",
                    hint="raise timeout_s (0 = for ever), or see the producer's output",
                )
            if first and waited >= TELL_S and watch.is_held_back:
                raise WaitTimeoutError(
                    f"rank {self.rank} cannot begin: {what} need more than the {there} in {view.folder}, and "
                    "the producer waits until some are acknowledged",
                    hint="packtrain produce with a larger --max-ahead: at least the number of ranks",
                )
            rest = self.timeout_s - waited if self.timeout_s else self.poll_s
            clock.sleep(max(0.001, min(self.poll_s, rest)))

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
            if (
                path.exists()
                or told is None
                or self._grown(Order(int(told["order_world"]))).end_of(chunk) > int(told["slots"])
            ):
                raise
            raise FormatError(
                f"{path} was removed: it had been acknowledged by every run that registered",
                hint="start: acknowledged goes on behind that; `packtrain produce --keep-completed` keeps "
                "more chunks",
            ) from None
