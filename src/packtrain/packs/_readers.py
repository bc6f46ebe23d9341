"""One reader's part of a source: every sample to exactly one reader, and a way back to any place.

With R readers (ranks times loader workers) reader k takes the places k, k + R, k + 2R, … of the stream, also
where there are fewer files than readers. A source that can be indexed is read at these places alone, in an
order that is a seeded permutation of the whole (no buffer needed). Any other iterable is read through by
every reader, which keeps its own places; its order is shuffled through a buffer.

Places are what a state holds: `at(place)` gives the samples of an indexable source again at once; an
iterable is read from its start and the places that are wanted are kept on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from ..errors import InputError, PacktrainError, SampleError, SourceError, described
from ..measuring.eligibility import set_epoch
from ..planning.permutation import Permutation

__all__ = ["IndexReader", "IterableReader", "is_indexed", "reader_of"]

_BLOCK = 1024


def reader_of(source: Any, *, shuffled: bool, seed: int) -> IndexReader | IterableReader:
    """The reader that fits a source.

    Raises:
        InputError: it is neither indexable nor iterable, or a generator that can be read only once.
    """
    if isinstance(source, str | bytes | Mapping):
        what = f"the {type(source).__name__} {str(source)[:60]!r}" if isinstance(source, str) else "a mapping"
        raise InputError(
            f"{'bytes' if isinstance(source, bytes) else what} is no source of samples",
            hint="open a file with packtrain.sources.open_source(path); of a mapping pass one of its values",
        )
    if is_indexed(source):
        return IndexReader(source, seed if shuffled else None)
    if isinstance(source, Iterator):
        raise InputError(
            "the source is a generator that can be read only once: no epoch could begin again",
            hint="pass a function that makes it (lambda: …), or an object with __iter__",
        )
    if callable(source) or hasattr(source, "__iter__"):
        return IterableReader(source)
    raise InputError(
        f"a {type(source).__name__} is no source",
        hint="pass a sequence, an iterable, or a function that makes one",
    )


def is_indexed(source: Any) -> bool:
    """Has it a length and an index? A torch IterableDataset has a `__getitem__` that only raises."""
    if isinstance(source, IterableDataset):
        return False
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


class IndexReader:
    """A source with length and index. The sample id is the index.

    Attributes:
        can_seek: a place is found without reading those before it.
    """

    can_seek = True

    def __init__(self, source: Any, seed: int | None) -> None:
        self.source, self.seed = source, seed

    def read(self, epoch: int, start: int, step: int) -> Iterator[tuple[int, int, Any]]:
        """(place, sample id, sample, or the SampleError it raised) at start, start + step, … of the epoch."""
        set_epoch(self.source, epoch)
        total = len(self.source)
        while start < total:
            places = np.arange(start, min(total, start + _BLOCK * step), step, dtype=np.int64)
            for place, index in zip(places.tolist(), self._ids(epoch, places), strict=True):
                yield place, index, self._fetch(index)
            start = int(places[-1]) + step

    def again(self, epoch: int, places: Collection[int]) -> dict[int, tuple[int, Any]]:
        """place -> (sample id, sample)."""
        set_epoch(self.source, epoch)
        held = sorted(places)
        if held and held[-1] >= len(self.source):
            raise _shorter(held[-1], len(self.source))
        ids = self._ids(epoch, np.array(held, dtype=np.int64)) if held else []
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
            f"the source had {saved} samples when the state was saved and now has {self.total}: "
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

    def _ids(self, epoch: int, places: Any) -> list[int]:
        if self.seed is None:
            return list(places.tolist())
        return list(Permutation(len(self.source), self.seed, epoch).map(places).tolist())


class IterableReader:
    """An iterable that begins anew with every pass. The sample id is the place."""

    can_seek = False

    def __init__(self, source: Any) -> None:
        self.source = source

    total = None  # nobody knows

    def check_total(self, saved: int | None) -> None:
        """Nothing to compare."""

    def read(self, epoch: int, start: int, step: int) -> Iterator[tuple[int, int, Any]]:
        def mine(place: int) -> bool:
            return place >= start and (place - start) % step == 0

        place = -1
        for place, sample in enumerate(self._pass(epoch, mine)):
            if mine(place):
                yield place, place, sample
        if place < start - step:
            raise _shorter(start - step, place + 1)

    def again(self, epoch: int, places: Collection[int]) -> dict[int, tuple[int, Any]]:
        wanted, found = set(places), {}
        if not wanted:
            return {}
        place = -1
        for place, sample in enumerate(self._pass(epoch, wanted.__contains__)):
            if place in wanted:
                found[place] = (place, sample)
                if len(found) == len(wanted):
                    return found
        raise _shorter(max(wanted), place + 1)

    def _pass(self, epoch: int, wanted: Callable[[int], bool]) -> Iterator[Any]:
        set_epoch(self.source, epoch)
        made = self.source() if callable(self.source) else self.source
        if not hasattr(made, "__iter__"):
            raise InputError(
                f"the source function gave a {type(made).__name__}, expected an iterable of samples",
                hint="return or yield the samples",
            )
        return _guarded(made.attempts(wanted) if hasattr(made, "attempts") else made)


def _guarded(made: Any) -> Iterator[Any]:
    """The samples; an error of the source says after how many."""
    count = 0
    try:
        for sample in made:
            yield sample
            count += 1
    except PacktrainError:
        raise
    except Exception as error:
        raise SourceError(
            f"the source failed after {count} samples: {described(error)}",
            hint="mend the source; a saved state goes on where it stands",
        ) from error


def _shorter(place: int, length: int) -> SourceError:
    return SourceError(
        f"the state holds sample {place} of a source that now has {length}",
        hint="the source was cut since the state was saved; restore it, or start anew",
    )
