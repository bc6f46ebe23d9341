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

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from ..checks import one_of, whole
from ..errors import InputError
from ..measuring.encoding import encoder_of
from ..moved import also_named, renamed
from ..remote.copies import place_of
from ..store.growing import Order, raw_place
from ..waiting.poll import Clock
from ..world import world
from ._acknowledge import Cursor, check_reachable, mark_completed, publish_cursor
from ._waiting_reader import SlotReader
from .handed_out import HandedOut, check_not_sharded
from .ledger_file import Skipping
from .loader import SourceLoader
from .pack import Pack


# --------------------------------------------------------------------------------------------
# LazyShardedDataset for DataLoaders: a sampler of its slots, and an iterable that workers share
# --------------------------------------------------------------------------------------------
class Slots(Protocol):
    """What the views ask of the dataset, which stands above."""

    world_size: int

    @property
    def steps(self) -> int: ...
    def slots(self) -> Iterator[int]: ...
    def sampled(self, *, all_ranks: bool) -> Iterator[int]: ...
    def __iter__(self) -> Iterator[Pack]: ...
    def __getitem__(self, index: int) -> Pack: ...


class SlotSampler(Sampler[int]):  # type: ignore[misc]
    """Slots of the dataset's rank (or of all ranks), each when its micro step can be taken by all ranks."""

    def __init__(self, dataset: Slots, all_ranks: bool) -> None:
        self.dataset, self.all_ranks = dataset, all_ranks

    def __iter__(self) -> Iterator[int]:
        return self.dataset.sampled(all_ranks=self.all_ranks)

    def __len__(self) -> int:
        """Slots of a pass; raises while the stream has no end."""
        return self.dataset.steps * (self.dataset.world_size if self.all_ranks else 1)


class SlotStream(IterableDataset[Pack]):  # type: ignore[misc]
    """The packs of the dataset's rank. Worker w of N reads micro steps w, w + N, …: the order stays."""

    def __init__(self, dataset: Slots) -> None:
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
_STARTS = ("acknowledged", "beginning")


class LengthUnknownError(InputError, TypeError):
    """The stream has not ended: nobody knows its length. (A TypeError too, so `list(ds)` does without.)"""


class LazyShardedDataset(SlotReader, Dataset[Pack]):  # type: ignore[misc]
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
            one_of("start", start, _STARTS)
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
        super().__init__(
            directory,
            world(rank, world_size),
            timeout_s,
            poll_s,
            start=start,
            run=run,
            cache_chunks=cache_chunks,
            encode=encoder_of(encode),
            clock=clock,
            verify=verify,
            skipping=Skipping(skip, ledger_file, on_error, max_skip_fraction),
        )
        self.total_steps = total_steps
        self.handed = HandedOut(
            "use ds.loader(collate, num_workers=…), or state_dict(step): behind so many micro steps"
        )
        self._sampled = False
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
            cursor = self._here()
            cursor.step = (slot - cursor.start) // cursor.world_size + 1
            yield row

    def slots(self, all_ranks: bool = False) -> Iterator[int]:
        """This rank's slots (or all), from where a pass begins, when all ranks can take their micro step."""
        if not all_ranks:
            check_not_sharded(self.world_size)
        self._begin()
        cursor = self._here()
        step = cursor.step if self._resumed else 0
        self._resumed = False
        while step != self.total_steps and self._wait_for_step(step):
            first = cursor.slot(step)
            if all_ranks:
                yield from range(first - self.rank, first - self.rank + self.world_size)
            else:
                yield first
            step += 1

    def __getitem__(self, index: int) -> Pack:
        """Slot `index` of the global order; waits for it. IndexError behind the end of the stream."""
        slot = operator.index(index)
        self._begin()
        if slot >= 0:
            self._wait_for_slot(slot)
        end = self._end() if self.total_steps is None else len(self)
        if not 0 <= slot < end:
            raise IndexError(f"slot {slot} of {end}")
        self.handed.read()
        pack, cursor = self._row(slot), self._here()
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
            self._begin()
            return self._here().start + self.total_steps * self.world_size
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

    @property
    def pack_length(self) -> int:
        """Tokens of a full pack; waits for the stream to begin."""
        return int(self.config["pack_length"])

    @property
    def begins_at(self) -> int:
        """The micro step at which the next pass begins."""
        self._begin()
        return self._here().step if self._resumed else 0

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
        self._begin()
        step = self._here().step if step is None else step
        steps = range(step, step + count)
        return [self._row(self._here().slot(one)) for one in steps if self._wait_for_step(one)]

    def locate(self, local: int) -> tuple[int, int]:
        """(chunk, row) of this rank's pack number `local`; waits for it. IndexError where there is none."""
        self._begin()
        slot = self._here().slot(local)
        self._wait_for_slot(slot)
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
            Cursor.resumed(state, self._view.stream["stream"], self.world_size, self.rank)
        if self.has_ended and was.slots:
            order = Order(was.order_world)  # of its own: nobody may have begun to read here
            for packs in self._view.counts:
                order.append(packs)
            check_reachable(self.directory, state, order.last_rounds * order.world)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where this rank stands: behind `step` micro steps, or behind what was yielded by the last pass."""
        self._begin()
        return self.at_step(self.handed.step(self._here().step) if step is None else step)

    def at_step(self, step: int) -> dict[str, Any]:
        """The state after `step` micro steps: for loaders whose workers run ahead."""
        self._begin()
        cursor = replace(self._here(), step=step)
        place = self._grown().place(cursor.slot(cursor.step))
        assert self._view.stream is not None
        told = {"stream": self._view.stream["stream"], "next": place and list(place), "end": self._raw_end()}
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
        self._begin()
        self._view.refresh()  # workers may have read what this process has not seen
        cursor = self._here()
        assert self._view.stream is not None
        if isinstance(step, Mapping):
            slots = Cursor.resumed(step, self._view.stream["stream"], cursor.world_size, cursor.rank).slots
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
        publish_cursor(self.marks, self._view.stream["stream"], cursor, slots, self._raw_end())
        order = self._grown()
        self._marked, marked = mark_completed(self.marks, self._view, order, cursor, slots, self._marked)
        return marked
