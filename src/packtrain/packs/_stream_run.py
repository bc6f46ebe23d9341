"""One pass of a reader over its splits of a stream: read, shuffle, encode, plan, and say where each stands.

What is on the way in a split is known by place at every moment:

    shuffle     held by the buffer
    flight      out of the buffer, with the encoders
    window      encoded, waiting for its window to fill, or carried over from an earlier one
    ready       planned, not handed out

A state is these lists, the counters behind them, and the packer's ages. Restored, the samples are fetched
again by place; the next draw, the next window and the next pack are those of the uninterrupted pass.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import DriftError, InputError, PlanError, SampleError
from ..execute.pool import Pool
from ..extend import I64
from ..measuring.eligibility import where_in
from ..measuring.encoding import FAILED, encoded, fault_of
from ..measuring.run import CUT, located
from ..planning._materialise import mix64, seed64
from ..planning.ledger import cap_words
from ..planning.lengths import Lengths
from ._node_reader import node_reader
from ._readers import Record, SharedRead, Splits
from .ledger_file import SKIPS, Tally

logger = logging.getLogger(__name__)

_AHEAD = 8  # samples of an encode worker that may be on the way
_BEHIND = 4  # windows and buffers that a split of an iterable may be behind the others of its reader

Sample = dict[str, Any]
Pack = tuple[Sequence[int], Sequence[Sample]]  # places, encoded samples
Item = tuple[int, int, Any]  # place, sample id, sample


class Run:
    """One split in one epoch.

    Args:
        reading: what it shares with other splits of its reader.
        epoch, split: which.

    Attributes:
        read: samples taken from the source.
    """

    def __init__(self, reading: StreamPass, epoch: int, split: int) -> None:
        self.reading, self.stream, self.epoch, self.split = reading, reading.stream, epoch, split
        splits, stream = reading.splits, reading.stream
        self.step = splits.count
        self.tally = reading.tally(epoch)
        self.tally.runs.append(self)
        self.shuffle = _Shuffle(splits.buffer if stream.reader.in_order else 0, (stream.seed, epoch, split))
        self.packer = stream.make_packer(splits.window)
        self.full_window = min(stream.spec.window or 1, splits.window)
        self.next_place = split
        self.read = 0
        self.count = 0  # samples that reached the packer; their numbers ascend, whatever their places
        self.flight: deque[int] = deque()
        # Lists and plain numbers: of many splits thousands of samples wait, and each object for one of them
        # costs time as memory that has left the cache, and in Python's garbage collection.
        self.window: list[Sample] = []  # since the last window, of the last numbers
        self.window_places, self.lengths = array("q"), array("q")
        self.carried: list[Sample] = []
        self.carried_numbers: I64 = np.zeros(0, dtype=np.int64)  # ascending
        self.carried_places: I64 = np.zeros(0, dtype=np.int64)
        self.ready: deque[Pack] = deque()
        self._again: deque[Item] = deque()  # in flight when the state was saved
        self.left_out: dict[str, int] = {}

    def __iter__(self) -> Iterator[Pack]:
        stream, window, tally = self.stream, self.full_window, self.tally
        leave = self.flight.popleft  # once a sample is dealt with: an error must not lose it from the state
        encodes = stream.encode is not None
        yield from self._hand_out()
        if len(self.window) >= window:  # it could not be planned when the state was saved
            self._plan(last=False)
            yield from self._hand_out()
        for place, sample_id, sample in self.reading.pool.map(self._items()):
            if isinstance(sample, SampleError):
                self._failed(sample_id, sample)
                leave()
                continue
            if encodes and (note := sample.pop(CUT, "")):
                stream.tell_cut(sample_id, note)
            length = _length(sample, sample_id)
            if length == 0:
                self._empty(sample_id)
                leave()
                continue
            self.count += 1
            self.window.append(sample)
            self.window_places.append(place)
            self.lengths.append(length)
            leave()
            if len(self.window) >= window:
                tally.tell_keys(last=False)
                self._plan(last=False)
                yield from self._hand_out()
        tally.read_out()
        self._plan(last=True)
        yield from self._hand_out()

    def state(self, ahead: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """Where this pass stands, as plain values.

        Args:
            ahead: places of packs that were given out here and not used yet; they come first again.
        """
        return {
            "next_place": self.next_place,
            "read": self.read,
            "count": self.count,
            "draws": self.shuffle.draws,
            "shuffle": [item[0] for item in self.shuffle.held],
            "flight": [*self.flight, *(item[0] for item in self._again)],
            "window": list(range(self.count - len(self.window), self.count)),
            "places": [
                *map(list, zip(self.carried_numbers.tolist(), self.carried_places.tolist(), strict=True)),
                *map(list, enumerate(self.window_places, self.count - len(self.window))),
            ],
            "packer": self.packer.state_dict(),
            "ready": [*map(list, ahead), *(list(places) for places, _ in self.ready)],
            "left_out": dict(self.left_out),
            "total": self.stream.reader.total,
        }

    @staticmethod
    def waiting(state: Mapping[str, Any]) -> set[int]:
        """The places of all samples that wait, by a state."""
        planned = (place for places in state["ready"] for place in places)
        return {*state["shuffle"], *state["flight"], *(place for _, place in state["places"]), *planned}

    def restore(self, state: Mapping[str, Any], found: Mapping[int, tuple[int, Any]]) -> None:
        """Go on where `state` stands.

        Args:
            found: place -> (sample id, sample) of what waits.
        """
        self.next_place, self.read, self.count = state["next_place"], state["read"], state["count"]
        self.shuffle.draws = state["draws"]
        waiting = sorted(state["places"])  # the window's have the last numbers
        carried = len(waiting) - len(state["window"])
        self.carried_numbers = np.array([number for number, _ in waiting[:carried]], dtype=np.int64)
        self.carried_places = np.array([place for _, place in waiting[:carried]], dtype=np.int64)
        self.window_places = array("q", (place for _, place in waiting[carried:]))
        self.packer.load_state_dict(state["packer"])
        self.left_out = dict(state["left_out"])

        def item(place: int) -> Item:
            return (place, *found[place])

        self.shuffle.held = [item(place) for place in state["shuffle"]]
        self._again = deque(item(place) for place in state["flight"])
        needed = [*(place for _, place in waiting), *(place for places in state["ready"] for place in places)]
        samples: dict[int, Sample] = {}
        for place, sample_id, sample in self.reading.pool.map(map(item, needed)):
            if isinstance(sample, SampleError):
                raise DriftError(
                    f"sample {sample_id} was encoded before the state was saved and fails now: "
                    f"{sample.message}",
                    hint="restore the source, or start anew",
                )
            sample.pop(CUT, None)  # told when it was read
            _length(sample, sample_id)
            samples[place] = sample
        self.carried = [samples[place] for _, place in waiting[:carried]]
        self.window = [samples[place] for place in self.window_places]
        self.lengths = array("q", map(_length, self.window))
        of_number = dict(zip((number for number, _ in waiting), [*self.carried, *self.window], strict=True))
        for number, tokens in zip(state["packer"]["ids"], state["packer"]["tokens"], strict=True):
            sample = of_number[number]
            if _length(sample) != tokens:
                raise DriftError(
                    f"sample {sample['sample_id']} had {tokens} tokens when the state was saved, "
                    f"now {_length(sample)}",
                    hint="the source or template changed; start anew",
                )
        self.ready = deque((array("q", places), [samples[p] for p in places]) for places in state["ready"])

    def _hand_out(self) -> Iterator[Pack]:
        while self.ready:
            yield self.ready.popleft()

    def _items(self) -> Iterator[Item]:
        fly = self.flight.append
        while self._again:
            item = self._again.popleft()
            fly(item[0])
            yield item
        buffered, step, skip = self.shuffle.size > 0, self.step, self.stream.skip
        for item in self.reading.items(self.epoch, self.split, self.next_place):
            self.next_place = item[0] + step
            self.read += 1
            if skip and item[1] in skip:
                self._leave_out(item[1], "skipped", "named by the run")
                continue
            drawn = self.shuffle.push(item) if buffered else item
            if drawn is not None:
                fly(drawn[0])
                yield drawn
        for item in self.shuffle.drain():
            fly(item[0])
            yield item

    def _failed(self, sample_id: int, error: SampleError) -> None:
        where = where_in(self.stream.reader.source, sample_id)
        told = located(where, error.message)
        hint = error.hint or SKIPS
        if self.stream.on_error == "raise" and error.reason == FAILED:
            named = f"sample {sample_id} ({where})" if where else f"sample {sample_id}"
            raise InputError(f"{named} {error.message}", hint=hint) from error
        if self.stream.on_error == "raise":
            raise SampleError(error.reason, f"sample {sample_id}: {told}", hint=hint) from error
        if self.stream.tells:
            logger.warning("sample %d left out (%s): %s", sample_id, error.reason, told)
        self._leave_out(sample_id, error.reason, told)
        self.tally.failed(sample_id, error.reason, told)

    def _leave_out(self, sample_id: int, reason: str, detail: str) -> None:
        self.stream.leave_out(sample_id, reason, detail, self.left_out, self.tally.left_out)

    def _empty(self, sample_id: int) -> None:
        """Left out as what fails is; under `on_error="raise"` too, where a ledger says so."""
        if self.stream.on_error != "raise":
            self._failed(sample_id, SampleError("empty", "it has no tokens"))
            return
        where = where_in(self.stream.reader.source, sample_id)
        if self.stream.ledger_file is None:
            raise SampleError(
                "empty",
                f"sample {sample_id} has no tokens" + (f": {where}" if where else ""),
                hint="remove it, or name a ledger_file: it is left out and written down there",
            )
        self._leave_out(sample_id, "empty", located(where, "it has no tokens"))

    def _plan(self, *, last: bool) -> None:
        """Plan the window and what was carried; packs that are final go to `ready`."""
        if not self.window and not len(self.packer.waiting):
            return
        lengths = Lengths(np.array(self.lengths, dtype=np.int64), self.stream.costs_of(self.window))
        self._refuse_long(self.window, lengths)
        fresh = np.arange(self.count - len(self.window), self.count, dtype=np.int64)
        made = self.packer.push(fresh, lengths, last=last)
        samples = [*self.carried, *self.window]
        numbers = np.concatenate([self.carried_numbers, fresh])
        places = np.concatenate([self.carried_places, np.array(self.window_places, dtype=np.int64)])
        packed = np.searchsorted(numbers, made.ids)
        out = np.searchsorted(numbers, np.array(list(made.left_out), dtype=np.int64))
        waits = np.ones(len(numbers), dtype=np.bool_)
        waits[packed] = waits[out] = False
        carried = np.flatnonzero(waits)
        self.carried = list(map(samples.__getitem__, carried.tolist()))
        self.carried_numbers, self.carried_places = numbers[carried], places[carried]
        self.window, self.window_places, self.lengths = [], array("q"), array("q")
        for index, reason in zip(out.tolist(), made.left_out.values(), strict=True):
            sample = samples[index]
            costs = {name: values[0] for name, values in self.stream.costs_of([sample]).items()}
            detail = cap_words(reason, _length(sample), costs, self.stream.spec)
            self._leave_out(sample["sample_id"], reason, detail)
        ready, all_places = packed.tolist(), array("q", places[packed].tobytes())
        for start, stop in pairwise(made.offsets.tolist()):
            members = tuple(map(samples.__getitem__, ready[start:stop]))
            self.ready.append((all_places[start:stop], members))
        if last and self.ready:
            self._leave_out_partial()

    def _refuse_long(self, samples: list[Sample], lengths: Lengths) -> None:
        """Under `long_samples="error"`: by the sample's id, which the packer does not know."""
        spec = self.stream.spec
        if all(spec.long_policy(name) != "error" for name in ("tokens", *spec.limits)):
            return
        rounded = -(-lengths.tokens.astype(np.int64) // spec.multiple_of) * spec.multiple_of
        checks = [("tokens", rounded, spec.pack_length)]
        checks += [(name, lengths.costs[name], cap) for name, cap in spec.limits.items()]
        for name, values, cap in checks:
            over = np.flatnonzero(values > cap)
            if spec.long_policy(name) == "error" and len(over):
                raise PlanError(
                    f"sample {samples[over[0]]['sample_id']} is long: {values[over[0]]} {name}, limit {cap}",
                    hint="raise pack_length, or set long_samples to 'single' or 'drop'",
                )

    def _leave_out_partial(self) -> None:
        """Under `drop_last`: the emptiest of the last packs, where it is not full."""
        sizes = [sum(map(_length, pack)) for _, pack in self.ready]
        emptiest = sizes.index(min(sizes))
        if self.stream.is_full(list(self.ready[emptiest][1])):
            return
        for sample in self.ready[emptiest][1]:
            self._leave_out(sample["sample_id"], "partial_batch", "the last batch was not full")
        del self.ready[emptiest]


def _length(sample: Sample, sample_id: int | None = None) -> int:
    """Tokens of an encoded sample; one without `sample_id` is given it."""
    try:
        ids = sample["input_ids"]
    except KeyError:
        raise InputError(
            f"sample {sample_id} has no input_ids", hint="pass a template, or encoded samples"
        ) from None
    if sample_id is not None:
        sample.setdefault("sample_id", sample_id)
    if type(ids) is Tensor and ids.ndim == 1:
        return int(ids.numel())  # a shape costs twice as much
    if type(ids) is list and ids and type(ids[0]) is int:
        return len(ids)  # numpy would read the whole list
    shape = getattr(ids, "shape", None)
    try:
        return int((np.shape(ids) if shape is None else shape)[-1])
    except (IndexError, TypeError, ValueError):
        raise InputError(
            f"sample {sample['sample_id']} has input_ids that are no row of numbers: {str(ids)[:60]!r} "
            f"({type(ids).__name__})",
            hint="input_ids is a list, a numpy array or a tensor of whole numbers",
        ) from None


class _Shuffle:
    """A shuffle buffer whose state is a list of places and a counter.

    Once `size` items are held, each new one takes the place of a random one, which goes out; at the end the
    rest goes out in random order. The draws are a function of (key, number of the draw): no
    generator is saved.

    Args:
        size: items held.
        key: whole numbers that decide the draws.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self.held: list[Item] = []
        self.draws = 0
        self._key = 0
        for part in key:
            self._key = mix64(self._key ^ seed64(part))

    def push(self, item: Item) -> Item | None:
        """The item that goes out, if one does."""
        if len(self.held) < self.size:
            self.held.append(item)
            return None
        chosen = self._draw(len(self.held))
        out, self.held[chosen] = self.held[chosen], item
        return out

    def drain(self) -> Iterator[Item]:
        """Everything that is held, in random order."""
        while self.held:
            chosen = self._draw(len(self.held))
            self.held[chosen], self.held[-1] = self.held[-1], self.held[chosen]
            yield self.held.pop()

    def _draw(self, below: int) -> int:
        self.draws += 1
        return mix64(self._key ^ self.draws) % below


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
    """One pass of one reader over its splits: each a `Run`, their packs in the order of the stream.

    Args:
        stream: its settings, the `StreamingPackedDataset`.
        splits: how it is divided.
        records: where each split of this reader stands; `run` None: at the beginning of its epoch.

    Attributes:
        slots: the splits.
        epoch: the newest that a split has begun.
    """

    def __init__(self, stream: Any, splits: Splits, records: Sequence[Record]) -> None:
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
            return reader.read(epoch, start, step)  # type: ignore[no-any-return]
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
