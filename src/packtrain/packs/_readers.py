"""The samples of a split: every sample in exactly one split, and a way back to any place.

Of S splits split s holds the places s, s + S, s + 2S, … of the stream, also where there are fewer files than
splits. A source that can be indexed is read at these places alone, in an order that is a seeded permutation
of the whole (no buffer needed). Any other iterable is read through by every reader, once for all its splits
(`SharedRead`), or by one process of the node (`_node_reader`); its order is shuffled through a buffer.

Places are what a state holds: `at(place)` gives the samples of an indexable source again at once; an
iterable is read from its start and the places that are wanted are kept on the way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..checks import divisors
from ..errors import (
    InputError,
    PacktrainError,
    SampleError,
    SourceError,
    counted,
    described,
)
from ..measuring.eligibility import set_epoch
from ..planning.permutation import Permutation
from ..world import World
from ._iterable import OfSplits, Places, Wanted, samples_of, shorter

# --------------------------------------------------------------------------------------------
# The splits of a stream: who owns which, and the order of all packs
# --------------------------------------------------------------------------------------------
# A stream is `count` splits. Split s holds the places s, s + count, s + 2 * count, … of an epoch, has a
# shuffle, a packer and a cursor of its own, and is read by one reader at a time (readers: ranks times the
# workers of a torch DataLoader). Its packs do not depend on the reader, so the number of readers may change
# at any state.
#
# The order of packs is by (turn, split): the first pack of every split, then the second of every split, … A
# split without a further pack is passed over; a cyclic one begins its next epoch instead. Splits are dealt
# by their next pack in this order: the i-th to rank i % ranks, there to worker i // ranks % workers. So
# step k of R ranks takes the packs k * R … k * R + R - 1, whatever R is.
#: Most splits of a stream.
MOST = 1 << 20
#: Samples that a split plans together at least, where a stream has so many: with fewer, packs get emptier.
LEAST = 256

_LISTED = 40  # numbers of readers that a refusal names

Record = dict[str, Any]  # split, epoch, turn, run, and done where it is


class Reader(NamedTuple):
    """Whose splits: of one rank's worker, or of a whole rank (worker 0 of 1)."""

    ranks: int
    rank: int
    workers: int
    worker: int

    @classmethod
    def here(cls, place: World) -> Reader:
        """The reader that this process is."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return cls(place.size, place.rank, workers, worker)

    @property
    def readers(self) -> int:
        return self.ranks * self.workers

    def __str__(self) -> str:
        worker = f", worker {self.worker} of {self.workers}" if self.workers > 1 else ""
        return f"rank {self.rank} of {self.ranks}{worker}"


@dataclass(frozen=True, slots=True)
class Splits:
    """How a stream is divided.

    Attributes:
        count: splits.
        window: samples that a split plans together.
        buffer: samples that the shuffle buffer of a split holds.
    """

    count: int
    window: int
    buffer: int

    @classmethod
    def of(cls, asked: int | None, readers: int, window: int, buffer: int) -> Splits:
        """Where nobody asked, each reader is one split, of the whole window and buffer. Else these are the
        stream's, and a split has its part, whoever reads it."""
        if asked is None:
            return cls(readers, window, buffer)
        return cls(asked, _part(window, asked), _part(buffer, asked))


def _part(samples: int, splits: int) -> int:
    return max(min(samples, LEAST), samples // splits)


def check_divides(splits: int, ranks: int, workers: int) -> None:
    """Refuse a number of readers that cannot share the splits evenly.

    Raises:
        InputError: names the numbers that can.
    """
    if splits % (ranks * workers) == 0:
        return
    able = divisors(splits)
    listed = ", ".join(map(str, able[:_LISTED])) + (", …" if len(able) > _LISTED else "")
    times = f" × {counted(workers, 'workers')}" if workers > 1 else ""
    raise InputError(
        f"the stream has {counted(splits, 'splits')}, which "
        f"{counted(ranks, 'ranks')}{times} cannot share evenly",
        hint=f"the readers (ranks times workers) have to be one of {listed}",
    )


def deal(records: Sequence[Record], part: int, parts: int) -> list[Record]:
    """Every `parts`-th split by its next pack in the order of the stream, those without one last."""
    order = sorted(records, key=lambda one: (bool(one.get("done")), one["turn"], one["split"]))
    return order[part::parts]


logger = logging.getLogger(__name__)

_BLOCK = 1024


def check_source(source: Any, who: str = "the source") -> None:
    """Refuse what no epoch could be read from again.

    Args:
        who: its name in messages.

    Raises:
        InputError: it is neither indexable nor iterable, or a generator that can be read only once.
    """
    is_text = isinstance(source, str | bytes | Mapping)
    if is_text or not (is_indexed(source) or callable(source) or hasattr(source, "__iter__")):
        told = f"the str {source[:60]!r}" if isinstance(source, str) else f"a {type(source).__name__}"
        raise InputError(
            f"{who} gives no samples: {told} is no source of samples",
            hint="open a file with packtrain.sources.open_source(path); of a mapping pass one of its values"
            if is_text
            else "pass a sequence, an iterable, or a function that makes one",
        )
    if isinstance(source, Iterator) and not is_indexed(source):
        raise InputError(
            f"{who} is a generator that can be read only once: no epoch could begin again",
            hint="pass a function that makes it (lambda: …), or an object with __iter__",
        )


def reader_of(source: Any, *, shuffled: bool, seed: int) -> IndexReader | IterableReader:
    """The reader that fits a source; refused is what `check_source` refuses."""
    check_source(source)
    if is_indexed(source):
        return IndexReader(source, seed if shuffled else None, in_order=getattr(source, "in_order", False))
    return IterableReader(source)


def is_indexed(source: Any) -> bool:
    """Has it a length and an index? A torch IterableDataset has a `__getitem__` that only raises."""
    if isinstance(source, IterableDataset):
        return False
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


class IndexReader:
    """A source with length and index. The sample id is the index.

    Attributes:
        can_seek: a place is found without reading those before it.
        in_order: the order of the source has a meaning (proportions): a buffer shuffles it.
    """

    can_seek = True

    def __init__(self, source: Any, seed: int | None, *, in_order: bool = False) -> None:
        self.source, self.seed, self.in_order = source, None if in_order else seed, in_order
        self._epoch: int | None = None  # that the source was told last

    def read(self, epoch: int, start: int, step: int) -> Iterator[tuple[int, int, Any]]:
        """(place, sample id, sample, or the SampleError it raised) at start, start + step, … of the epoch."""
        self._tell(epoch)
        total = len(self.source)
        while start < total:
            places = range(start, min(total, start + _BLOCK * step), step)
            for place, index in zip(places, self._ids(epoch, np.array(places, dtype=np.int64)), strict=True):
                if self._epoch != epoch:  # another split reads another epoch meanwhile
                    self._tell(epoch)
                yield place, index, self._fetch(index)
            start = places[-1] + step

    def _tell(self, epoch: int) -> None:
        set_epoch(self.source, epoch)
        self._epoch = epoch

    def again(self, epoch: int, places: Collection[int]) -> dict[int, tuple[int, Any]]:
        """place -> (sample id, sample)."""
        self._tell(epoch)
        held = sorted(places)
        if held and held[-1] >= len(self.source):
            raise shorter(held[-1], len(self.source))
        ids = self._ids(epoch, np.array(held, dtype=np.int64)) if held else ()
        return {place: (index, self._fetch(index)) for place, index in zip(held, ids, strict=True)}

    @property
    def total(self) -> int:
        """Samples of the source."""
        return len(self.source)

    def check_total(self, saved: int | None) -> None:
        """Refuse a source that has another length than when the state was saved.

        Without a shuffle, samples may have been added: those before them are where they were.
        """
        if saved is None or saved == self.total or (saved < self.total and self.seed is None):
            return
        raise SourceError(
            f"the source had {counted(saved, 'samples')} when the state was saved and now has {self.total}: "
            f"it was {'cut' if self.total < saved else 'extended, and its shuffled order is another one'}",
            hint="restore the source, or start anew",
        )

    def _fetch(self, index: int) -> Any:
        try:
            return self.source[index]
        except SampleError as error:
            return error
        except PacktrainError:
            raise
        except Exception as error:
            raise SourceError(
                f"sample {index} of a source of {self.total} cannot be read: {described(error)}",
                hint="raise SampleError for a sample that cannot be used; anything else stops the stream",
            ) from error

    def _ids(self, epoch: int, places: Any) -> memoryview:
        """int64: a list's numbers, of all splits of a reader, would fill the cache of a core."""
        if self.seed is None:
            return places.data  # type: ignore[no-any-return]
        return Permutation(len(self.source), self.seed, epoch).map(places).data


class IterableReader:
    """An iterable that begins anew with every pass. The sample id is the place."""

    can_seek, in_order = False, True

    def __init__(self, source: Any) -> None:
        self.source = source
        self._epoch: int | None = None  # that the source was told last

    total = None  # nobody knows

    def check_total(self, saved: int | None) -> None:
        """Nothing to compare."""

    def read(self, epoch: int, start: int, step: int) -> Iterator[tuple[int, int, Any]]:
        return self.read_splits(epoch, {start % step: start}, step)

    def read_splits(self, epoch: int, starts: Mapping[int, int], step: int) -> Iterator[tuple[int, int, Any]]:
        """(place, place, sample) of several splits, in the order of the source.

        Args:
            starts: split -> its first place.
            step: splits of the stream.
        """
        for place, sample in self.taken(epoch, OfSplits(starts, step)):
            yield place, place, sample

    def again(self, epoch: int, places: Collection[int]) -> dict[int, tuple[int, Any]]:
        found: dict[int, tuple[int, Any]] = {}
        for place, sample in self.taken(epoch, Places(places)) if places else ():
            found[place] = (place, sample)
            if len(found) == len(set(places)):
                break
        return found

    def listen(self, epoch: int) -> None:
        """Tell the source which epoch is read, where another one was read meanwhile."""
        if self._epoch != epoch:
            set_epoch(self.source, epoch)
            self._epoch = epoch

    def taken(self, epoch: int, wanted: Wanted) -> Iterator[tuple[int, Any]]:
        """(place, sample) of the places that are wanted, in one pass.

        Raises:
            SourceError: the source ends before a place that was read of it when a state was saved.
        """
        place = -1
        for place, sample in enumerate(self.passed(epoch, wanted)):
            if wanted(place):
                yield place, sample
        self.check_length(wanted, place + 1)

    def check_length(self, wanted: Wanted, samples: int) -> None:
        """Refuse a source of so many samples that ends before what is wanted."""
        if samples < wanted.least:
            raise shorter(wanted.least - 1, samples)

    def passed(self, epoch: int, wanted: Callable[[int], bool]) -> Iterator[Any]:
        """All samples of a pass, in this process."""
        self._epoch = None
        self.listen(epoch)
        for sample in samples_of(self.source, wanted):
            yield sample
            self.listen(epoch)  # another split reads another epoch meanwhile


class SharedRead:
    """One pass over an iterable for several splits of a reader: what one passes by waits for the others.

    Splits take turns, so they ask for about as many samples. One that falls behind further than `limit`
    samples loses its queue and reads the source again by itself: memory has a bound whatever the source.

    Args:
        reader: of the iterable.
        starts: split -> its first place.
        step: splits of the stream.
        limit: samples that wait for one split.
    """

    def __init__(
        self, reader: IterableReader, epoch: int, starts: Mapping[int, int], step: int, limit: int
    ) -> None:
        self.reader, self.epoch, self.step, self.limit = reader, epoch, step, limit
        self._waiting: dict[int, deque[tuple[int, int, Any]]] = {split: deque() for split in starts}
        self._next = dict(starts)
        self._read = reader.read_splits(epoch, dict(starts), step)

    def take(self, split: int, start: int) -> Iterator[tuple[int, int, Any]]:
        """The samples of a split from a place on: its first one, or what was read before comes again."""
        while True:
            queue = self._waiting.get(split)
            if queue is None or self._next[split] != start:  # fallen behind
                yield from self.reader.read(self.epoch, start, self.step)
                return
            if not queue and not self._fill(split):
                return
            if queue:
                item = queue.popleft()
                start = self._next[split] = item[0] + self.step
                yield item

    def _fill(self, split: int) -> bool:
        """Read on until a sample of `split` comes; False at the end."""
        for item in self._read:
            owner = item[0] % self.step
            queue = self._waiting.get(owner)
            if queue is None:
                continue
            queue.append(item)
            if owner == split:
                return True
            if len(queue) > self.limit:
                del self._waiting[owner]
                logger.warning(
                    "split %d is %d samples behind others of this reader: it reads the source again from its "
                    "start, which cannot be indexed",
                    owner,
                    self.limit,
                )
        return False
