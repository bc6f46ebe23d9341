"""One pass of one reader over its splits: each a `Run`, their packs in the order of the stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any

from ..errors import InputError, SampleError
from ..execute.pool import Pool
from ..measuring.encoding import encoded, fault_of
from ._node_reader import node_reader
from ._readers import SharedRead
from ._splits import Record, Splits
from ._stream_run import Item, Pack, Run, Stream
from ._stream_tally import Tally

logger = logging.getLogger(__name__)

_AHEAD = 8  # samples of an encode worker that may be on the way
_BEHIND = 4  # windows and buffers that a split of an iterable may be behind the others of its reader


class Slot:
    """A split that this reader reads.

    Attributes:
        turn: packs that it gave.
        run: the epoch that it is in.
        done: it has no further pack.
    """

    __slots__ = ("asked", "done", "packs", "run", "split", "turn")

    def __init__(self, split: int, turn: int, run: Run, *, done: bool, asked: tuple[int, int]) -> None:
        self.split, self.turn, self.run, self.done = split, turn, run, done
        self.asked = asked  # what was chosen last when its epoch began
        self.packs = iter(run)

    def record(self, given: Sequence[tuple[Run, Sequence[int]]] = ()) -> Record:
        """Where it stands.

        Args:
            given: packs that it gave and nobody has used yet, with their runs.
        """
        run = given[0][0] if given else self.run
        ahead = [places for held, places in given if held is run]
        known = {"split": self.split, "epoch": run.epoch, "turn": self.turn - len(given)}
        done = {"done": True} if self.done and not given else {}
        return {**known, "run": run.state(ahead), **done}


class StreamPass:
    """Args:
    stream: its settings.
    splits: how it is divided.
    records: where each split of this reader stands; `run` None: at the beginning of its epoch.

    Attributes:
        slots: the splits.
        epoch: the newest that a split has begun.
    """

    def __init__(self, stream: Stream, splits: Splits, records: Sequence[Record]) -> None:
        self.stream, self.splits = stream, splits
        self.reader = node_reader(stream)
        self.pool = Pool(
            _encoded,
            stream.encode,
            0 if stream.encode is None else stream.encode_workers,
            ahead=_AHEAD,
            name=lambda item: f"sample {item[1]}",
            alone="encode_workers=0",
        )
        self._shared: dict[int, SharedRead] = {}
        self._tallies: dict[int, Tally] = {}
        # where each split begins to read: (epoch, place)
        self._at = {
            one["split"]: (one["epoch"], one["run"]["next_place"] if one["run"] else one["split"])
            for one in records
            if not one.get("done")
        }
        self.epoch = max(one["epoch"] for one in records)
        stream.left_out = self.tally(self.epoch).left_out
        found = self._found(records)
        begun = [place for split, (_, place) in self._at.items() if place != split]
        if begun and not stream.reader.can_seek and stream.place.is_writer:
            logger.warning(
                "the source cannot be indexed: its first %s samples are read again to go on behind them",
                f"{max(begun):,}",
            )
        self.slots = [self._slot(one, found) for one in records]

    def _found(self, records: Sequence[Record]) -> dict[int, dict[int, tuple[int, Any]]]:
        """epoch -> place -> (sample id, sample) of what waits; an iterable is read once for all splits."""
        wanted: dict[int, set[int]] = {}
        for one in records:
            if one["run"] and not one.get("done"):
                self.stream.reader.check_total(one["run"].get("total"))
                wanted.setdefault(one["epoch"], set()).update(Run.waiting(one["run"]))
        return {epoch: self.reader.again(epoch, places) for epoch, places in wanted.items()}

    def _slot(self, one: Record, found: Mapping[int, Any]) -> Slot:
        epoch, done, saved = one["epoch"], bool(one.get("done")), one["run"]
        if saved:
            self.tally(epoch).add(saved["left_out"])
        run = Run(self, epoch, one["split"])
        if saved:
            run.restore(saved, {} if done else found[epoch])
        return Slot(one["split"], one["turn"], run, done=done, asked=self.stream.asked)

    def tally(self, epoch: int) -> Tally:
        """The counts of an epoch."""
        if epoch not in self._tallies:
            reading = sum(1 for begun, _ in self._at.values() if begun <= epoch)
            self._tallies[epoch] = Tally(self.stream, reading)
        return self._tallies[epoch]

    def items(self, epoch: int, split: int, start: int) -> Iterator[Item]:
        """The samples of a split from a place on."""
        reader, step = self.reader, self.splits.count
        if reader.can_seek or len(self._at) < 2:
            found: Iterator[Item] = reader.read(epoch, start, step)
            return found
        if epoch not in self._shared:
            starts = {
                other: place if begun == epoch else other
                for other, (begun, place) in self._at.items()
                if begun <= epoch or other == split
            }
            limit = _BEHIND * (self.splits.window + self.splits.buffer)
            self._shared[epoch] = SharedRead(reader, epoch, {**starts, split: start}, step, limit)
        return self._shared[epoch].take(split, start)

    def packs(self) -> Iterator[tuple[Slot, Run, Pack]]:
        """What is planned, by (turn, split)."""
        coming = [(slot.turn, slot.split, slot) for slot in self.slots if not slot.done]
        heapify(coming)
        try:
            while coming:
                turn, split, slot = coming[0]
                pack = next(slot.packs, None)
                if pack is not None:
                    slot.turn = turn + 1
                    heapreplace(coming, (slot.turn, split, slot))
                    yield slot, slot.run, pack
                elif self.stream.cyclic:
                    self._begin_next(slot)
                else:
                    slot.done = True
                    heappop(coming)
        finally:
            self.pool.close()

    def _begin_next(self, slot: Slot) -> None:
        """The epoch behind the one that has ended, or the one that was chosen meanwhile."""
        if slot.run.read == 0:
            raise InputError(
                f"split {slot.split} of {self.splits.count} got no sample: a cycle without a pack",
                hint="use fewer splits (or ranks and workers), or more samples",
            )
        stream, epoch = self.stream, slot.run.epoch + 1
        if slot.asked != stream.asked:
            slot.asked = stream.asked
            epoch = stream.asked[1]
        elif epoch > stream.epoch:
            stream.epoch = epoch
        self._at[slot.split] = (epoch, slot.split)
        slot.run = Run(self, epoch, slot.split)
        slot.packs = iter(slot.run)
        if epoch != self.epoch and epoch == stream.epoch:
            self.epoch = epoch
            for old in [held for held in self._tallies if held != epoch and not self._is_read(held)]:
                del self._tallies[old]
            for old in [held for held in self._shared if held != epoch and not self._is_read(held)]:
                del self._shared[old]
            stream.left_out = self.tally(epoch).left_out
        stream.began(self)

    def _is_read(self, epoch: int) -> bool:
        return any(slot.run.epoch == epoch for slot in self.slots)


def _encoded(encode: Callable[[Any], Any] | None, item: Item) -> Item:
    """Place, id, and the encoded sample, or why there is none as a SampleError.

    Args:
        encode: None = the samples are encoded already.
    """
    place, sample_id, sample = item
    if isinstance(sample, SampleError):  # it could not be read
        return item
    try:
        return place, sample_id, encoded(encode, sample)
    except Exception as error:
        return place, sample_id, fault_of(error)
