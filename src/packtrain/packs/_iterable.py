"""One pass over an iterable: the places that are wanted of it, its samples, and how it fails. No torch."""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..errors import InputError, PacktrainError, SourceError, counted, described

FIRST = 4  # samples that two readers of the same source compare


def mark(sample: Any, file: io.BytesIO | None = None) -> bytes:
    """Of a sample or source, to compare it by: the same in every process that reads it.

    A pickle is not: torch writes addresses into it, each process orders sets anew, and what a script defines
    is of another module in a process that imports the script.
    """
    file = io.BytesIO() if file is None else file
    _Marking(file, pickle.HIGHEST_PROTOCOL).dump(sample)
    return hashlib.blake2b(file.getvalue(), digest_size=16).digest()


class _Marking(pickle.Pickler):
    """What it writes is compared, and never read."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided:
            told = value.detach().cpu().resolve_conj().resolve_neg()
            told = told.clone(memory_format=torch.contiguous_format).flatten()
            data = told.view(torch.uint8).numpy().tobytes() if told.numel() else b""
            return bytes, ((str(value.dtype), *value.shape), data)
        is_named = hasattr(value, "__qualname__")
        if is_named and getattr(value, "__module__", None) in ("__main__", "__mp_main__"):
            return str, (value.__qualname__,)
        return NotImplemented

    def persistent_id(self, value: Any) -> Any:
        if type(value) in (set, frozenset):
            return type(value).__name__, sorted(map(mark, value))
        return None


class OfSplits:
    """The places of some splits of a stream.

    Args:
        starts: split -> its first place.
        step: splits of the stream.

    Attributes:
        first: the first place of all.
        stop: no place is wanted from here on.
        least: samples that the source has to have.
    """

    stop = 1 << 63

    def __init__(self, starts: Mapping[int, int], step: int) -> None:
        self.starts, self.step = dict(starts), step
        self.first = min(starts.values())
        self.least = max(starts.values()) - step + 1

    def __call__(self, place: int) -> bool:
        start = self.starts.get(place % self.step)
        return start is not None and place >= start


class Places:
    """Places that are named."""

    def __init__(self, places: Collection[int]) -> None:
        self.places = frozenset(places)
        self.first = min(places)
        self.stop = self.least = max(places) + 1

    def __call__(self, place: int) -> bool:
        return place in self.places


Wanted = OfSplits | Places


def samples_of(source: Any, wanted: Callable[[int], bool]) -> Iterator[Any]:
    """The samples of one pass, or anything in their stead where they are not wanted.

    Args:
        source: an iterable, or a function that makes one.
        wanted: place -> whether its sample is used.

    Raises:
        InputError: the function gave no iterable.
        SourceError: the source failed; says after how many samples.
    """
    made = source() if callable(source) else source
    if not hasattr(made, "__iter__"):
        raise InputError(
            f"the source function gave a {type(made).__name__}, expected an iterable of samples",
            hint="return or yield the samples",
        )
    count = 0
    try:
        for sample in made.attempts(wanted) if hasattr(made, "attempts") else made:
            yield sample
            count += 1
    except PacktrainError:
        raise
    except Exception as error:
        raise SourceError(
            f"the source failed after {counted(count, 'samples')}: {described(error)}",
            hint="mend the source; a saved state goes on where it stands",
        ) from error


def shorter(place: int, length: int) -> SourceError:
    """What a source is told that was cut since a state was saved."""
    return SourceError(
        f"the state holds sample {place} of a source that now has {length}",
        hint="the source was cut since the state was saved; restore it, or start anew",
    )
