"""One pass of one reader over one epoch of a stream: read, shuffle, encode, plan, and say where it stands.

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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from torch.utils.data import get_worker_info

from ..errors import DriftError, InputError, PlanError, SampleError
from ..measuring.run import CUT
from ..planning.lengths import Lengths
from ..planning.spec import PlanSpec
from ..sources._account import UNREAD, check_share
from ..world import World
from ._encode_pool import Item, encoded
from ._shuffle import Shuffle

__all__ = ["Run", "Stream"]

logger = logging.getLogger(__name__)

_FEW = 100  # samples read before a share of them counts

Sample = dict[str, Any]
Pack = tuple[Sequence[int], Sequence[Sample]]  # places, encoded samples


class Stream(Protocol):
    """What a run asks of its stream, which stands above: settings, and where left out samples are counted."""

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

    def make_packer(self) -> Any: ...
    def costs_of(self, samples: list[Sample]) -> dict[str, list[int]]: ...
    def is_full(self, pack: list[Sample]) -> bool: ...
    def leave_out(self, sample_id: int, reason: str, detail: str) -> None: ...
    def tell_cut(self, sample_id: int, note: str) -> None: ...


class Run:
    """Args:
    stream: its settings.
    epoch: which.
    state: of `state`, or None to begin.

    Attributes:
        read: samples taken from the source.
    """

    def __init__(self, stream: Stream, epoch: int, state: Mapping[str, Any] | None) -> None:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        self.stream, self.epoch = stream, epoch
        self.step = stream.place.size * workers
        first = stream.place.rank * workers + worker
        buffer = 0 if stream.reader.can_seek else stream.shuffle_buffer
        self.shuffle = Shuffle(buffer, (stream.seed, epoch, first))
        self.packer = stream.make_packer()
        self.next_place = first
        self.read = 0
        self.count = 0  # samples that reached the packer; their numbers ascend, whatever their places
        self.flight: deque[int] = deque()
        self.held: dict[int, tuple[int, Sample]] = {}  # number -> place, encoded sample: window and carry
        self.window: list[int] = []  # numbers since the last window
        self.lengths: list[int] = []  # their tokens
        self.ready: deque[Pack] = deque()
        self._unread = ""  # the last record with a key that is not read
        self._again: list[Item] = []  # in flight when the state was saved
        if state is None:
            self.left_out: dict[str, int] = {}
        else:
            self._restore(state["run"])
        stream.left_out = self.left_out  # the stream counts here; an earlier pass keeps its own

    def __iter__(self) -> Iterator[Pack]:
        stream, window = self.stream, self.stream.spec.window or 1
        leave = self.flight.popleft  # once a sample is dealt with: an error must not lose it from the state
        held, encodes = self.held, stream.encode is not None
        yield from self._hand_out()
        if len(self.window) >= window:  # it could not be planned when the state was saved
            self._plan(last=False)
            yield from self._hand_out()
        for place, sample_id, sample in encoded(self._items(), stream.encode, stream.encode_workers):
            if isinstance(sample, SampleError):
                self._failed(sample_id, sample)
                leave()
                continue
            if encodes and (note := sample.pop(CUT, "")):
                stream.tell_cut(sample_id, note)
            length = _length(sample, sample_id)
            if length == 0:
                self._empty(sample)
                leave()
                continue
            number, self.count = self.count, self.count + 1
            held[number] = (place, sample)
            self.window.append(number)
            self.lengths.append(length)
            leave()
            if len(self.window) >= window:
                self._plan(last=False)
                yield from self._hand_out()
        self._check_unread(last=True)
        self._check_skipped(self.read)
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
            "flight": list(self.flight),
            "window": list(self.window),
            "places": [[number, place] for number, (place, _) in self.held.items()],
            "packer": self.packer.state_dict(),
            "ready": [*map(list, ahead), *(list(places) for places, _ in self.ready)],
            "left_out": dict(self.left_out),
            "total": self.stream.reader.total,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        stream = self.stream
        stream.reader.check_total(state.get("total"))
        self.next_place, self.read, self.count = state["next_place"], state["read"], state["count"]
        self.shuffle.draws = state["draws"]
        self.window = list(state["window"])
        places = {number: place for number, place in state["places"]}
        self.packer.load_state_dict(state["packer"])
        self.left_out = dict(state["left_out"])
        planned = [place for places in state["ready"] for place in places]
        wanted = {*state["shuffle"], *state["flight"], *places.values(), *planned}
        found = stream.reader.again(self.epoch, wanted)

        def item(place: int) -> Item:
            return (place, *found[place])

        self.shuffle.held = [item(place) for place in state["shuffle"]]
        self._again = [item(place) for place in state["flight"]]
        needed = [*places.values(), *planned]
        samples: dict[int, Sample] = {}
        for place, sample_id, sample in encoded(map(item, needed), stream.encode, stream.encode_workers):
            if isinstance(sample, SampleError):
                raise DriftError(
                    f"sample {sample_id} was encoded before the state was saved and fails now: "
                    f"{sample.message}",
                    hint="restore the source, or start anew",
                )
            sample.pop(CUT, None)  # told when it was read
            _length(sample, sample_id)
            samples[place] = sample
        self.held = {number: (place, samples[place]) for number, place in places.items()}
        self.lengths = [_length(self.held[number][1]) for number in self.window]
        for number, tokens in zip(state["packer"]["ids"], state["packer"]["tokens"], strict=True):
            sample = self.held[number][1]
            if _length(sample) != tokens:
                raise DriftError(
                    f"sample {sample['sample_id']} had {tokens} tokens when the state was saved, "
                    f"now {_length(sample)}",
                    hint="the source or template changed; start anew",
                )
        self.ready = deque((list(places), [samples[p] for p in places]) for places in state["ready"])

    def _hand_out(self) -> Iterator[Pack]:
        while self.ready:
            yield self.ready.popleft()

    def _items(self) -> Iterator[Item]:
        fly = self.flight.append
        again, self._again = self._again, []
        for item in again:
            fly(item[0])
            yield item
        buffered, step, skip = self.shuffle.size > 0, self.step, self.stream.skip
        for item in self.stream.reader.read(self.epoch, self.next_place, step):
            self.next_place = item[0] + step
            self.read += 1
            if skip and item[1] in skip:
                self.stream.leave_out(item[1], "skipped", "named by the run")
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
        if self.stream.on_error == "raise" and error.reason == "encode_failed":
            raise InputError(f"sample {sample_id} {error.message}", hint=error.hint) from error
        if self.stream.on_error == "raise":
            raise SampleError(
                error.reason, f"sample {sample_id}: {error.message}", hint=error.hint
            ) from error
        logger.warning("sample %d left out (%s): %s", sample_id, error.reason, error.message)
        self.stream.leave_out(sample_id, error.reason, error.message)
        self._check_skipped(max(self.read, _FEW))
        if error.reason == UNREAD:
            self._unread = f"sample {sample_id}: {error.message}"
            self._check_unread(last=False)

    def _check_skipped(self, total: int) -> None:
        """Stop where `on_error="skip"` leaves out a larger share than `max_skip_fraction`."""
        limit = self.stream.max_skip_fraction
        skipped = sum(self.left_out.values()) - self.left_out.get("skipped", 0)
        if limit is not None and skipped > limit * total:
            raise InputError(
                f"{skipped:,} of {self.read:,} samples were left out, more than max_skip_fraction {limit}: "
                f"{self.left_out}",
                hint="see the ledger for each of them; correct the source, or raise max_skip_fraction",
            )

    def _check_unread(self, *, last: bool) -> None:
        """Stop where more than 1 % of the records read hold a key that changes training and is not read."""
        if self._unread:
            check_share(self.left_out.get(UNREAD, 0), self.read, self._unread, last=last)

    def _empty(self, sample: Sample) -> None:
        if self.stream.ledger_file is None:
            raise SampleError(
                "empty",
                f"sample {sample['sample_id']} has no tokens",
                hint="remove it, or name a ledger_file: it is left out and written down there",
            )
        self.stream.leave_out(sample["sample_id"], "empty", "no tokens")

    def _plan(self, *, last: bool) -> None:
        """Plan the window and what was carried; packs that are final go to `ready`."""
        numbers = self.window
        if not numbers and not len(self.packer.waiting):
            return
        samples = [self.held[number][1] for number in numbers]
        lengths = Lengths(self.lengths, self.stream.costs_of(samples))
        self._refuse_long(samples, lengths)
        made = self.packer.push(np.array(numbers, dtype=np.int64), lengths, last=last)
        self.window, self.lengths = [], []
        for number, reason in made.left_out.items():
            _, sample = self.held.pop(number)
            detail = f"{_length(sample)} tokens, pack_length {self.stream.spec.pack_length}"
            self.stream.leave_out(sample["sample_id"], reason, detail)
        ids = made.ids.tolist()
        for start, stop in pairwise(made.offsets.tolist()):
            places, members = zip(*map(self.held.pop, ids[start:stop]), strict=True)
            self.ready.append((places, members))
        if last and self.ready:
            self._leave_out_partial()

    def _refuse_long(self, samples: list[Sample], lengths: Lengths) -> None:
        """Under `long_samples="error"`: by the sample's id, which the packer does not know."""
        spec = self.stream.spec
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
            self.stream.leave_out(sample["sample_id"], "partial_batch", "the last batch was not full")
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
