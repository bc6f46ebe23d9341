"""One split of a stream in one epoch: read, shuffle, encode, plan, and say where it stands.

What is on the way is known by place at every moment:

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
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DriftError, InputError, PlanError, SampleError
from ..execute.pool import Pool
from ..measuring.eligibility import where_in
from ..measuring.encoding import FAILED
from ..measuring.run import CUT, located
from ..planning._materialise import mix64, seed64
from ..planning.ledger import cap_words
from ..planning.lengths import Lengths
from ..planning.spec import PlanSpec
from ..world import World
from ._splits import Splits
from ._stream_tally import Tally
from .ledger_file import SKIPS

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]
Sample = dict[str, Any]
Pack = tuple[Sequence[int], Sequence[Sample]]  # places, encoded samples
Item = tuple[int, int, Any]  # place, sample id, sample


class Stream(Protocol):
    """What a run asks of its stream, which stands above: settings, and where left out samples are counted."""

    name: str
    passes: int
    spec: PlanSpec
    place: World
    reader: Any
    encode: Any
    encode_workers: int
    shuffle_buffer: int
    seed: int
    on_error: str
    max_skip_fraction: float | None
    ledger_file: Any
    left_out: dict[str, int]
    skip: frozenset[int]
    tells: bool
    cyclic: bool
    epoch: int
    asked: tuple[int, int]

    def began(self, reading: Any) -> None: ...
    def make_packer(self, samples: int) -> Any: ...
    def costs_of(self, samples: list[Sample]) -> dict[str, list[int]]: ...
    def is_full(self, pack: list[Sample]) -> bool: ...
    def leave_out(self, sample_id: int, reason: str, detail: str, *counts: dict[str, int]) -> None: ...
    def tell_cut(self, sample_id: int, note: str) -> None: ...


class Reading(Protocol):
    """What the splits of a reader share, see `StreamPass`."""

    stream: Stream
    splits: Splits
    pool: Pool

    def tally(self, epoch: int) -> Tally: ...
    def items(self, epoch: int, split: int, start: int) -> Iterator[Item]: ...


class Run:
    """Args:
    reading: what it shares with other splits of its reader.
    epoch, split: which.

    Attributes:
        read: samples taken from the source.
    """

    def __init__(self, reading: Reading, epoch: int, split: int) -> None:
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
        waiting = (place for _, place in state["places"])
        planned = (place for places in state["ready"] for place in places)
        return {*state["shuffle"], *state["flight"], *waiting, *planned}

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
        planned = [place for places in state["ready"] for place in places]

        def item(place: int) -> Item:
            return (place, *found[place])

        self.shuffle.held = [item(place) for place in state["shuffle"]]
        self._again = deque(item(place) for place in state["flight"])
        needed = [*(place for _, place in waiting), *planned]
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
            if not buffered:
                fly(item[0])
                yield item
                continue
            for drawn in self.shuffle.push(item):
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
        size: items held; 0 = the order stays.
        key: whole numbers that decide the draws.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self.held: list[Item] = []
        self.draws = 0
        self._key = 0
        for part in key:
            self._key = mix64(self._key ^ seed64(part))

    def push(self, item: Item) -> Iterator[Item]:
        """The item that goes out, if one does."""
        if not self.size:
            yield item
        elif len(self.held) < self.size:
            self.held.append(item)
        else:
            chosen = self._draw(len(self.held))
            out, self.held[chosen] = self.held[chosen], item
            yield out

    def drain(self) -> Iterator[Item]:
        """Everything that is held, in random order."""
        while self.held:
            chosen = self._draw(len(self.held))
            self.held[chosen], self.held[-1] = self.held[-1], self.held[chosen]
            yield self.held.pop()

    def _draw(self, below: int) -> int:
        self.draws += 1
        return mix64(self._key ^ self.draws) % below
