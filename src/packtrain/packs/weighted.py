"""WeightedSources: several sources as one stream, in proportion to their weights.

    mixed = WeightedSources({"chat": chat, "ocr": ocr}, weights={"chat": 3, "ocr": 1}, stopping="first")
    TokenBudgetDataset(mixed, template, …)

At every place the source that is furthest behind its share comes next (ties: the first named), so any stretch
of the stream has the asked proportions to within one sample of each source, and nothing is drawn at random.
Inside a source the order stays; shuffle with the stream's `shuffle_buffer`.

    first   the stream ends when a source has no next sample: nothing repeats, larger sources are not read out
    all     a source that has ended begins again, until every source was read once
    never   as `all`, without an end

Samples that come again in a pass are the same records under new places: ids of the stream stay unique.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import Any

from ..errors import InputError, SampleError
from ..measuring.eligibility import set_epoch
from ._readers import is_indexed

__all__ = ["STOPPING", "WeightedSources"]

STOPPING = ("first", "all", "never")


class WeightedSources:
    """An iterable over samples of several sources; begins anew with every pass.

    Args:
        sources: name -> iterable that can be read again (no generator), or a function that makes one.
        weights: name -> share (> 0); None: equal shares.
        stopping: `first`, `all` or `never`.

    Attributes:
        taken: name -> samples given out in the last pass.
    """

    def __init__(
        self, sources: Mapping[str, Any], weights: Mapping[str, float] | None = None, stopping: str = "first"
    ) -> None:
        if not isinstance(sources, Mapping) or not (weights is None or isinstance(weights, Mapping)):
            raise InputError(
                "sources and weights are given by name", hint='WeightedSources({"chat": chat, "ocr": ocr}, …)'
            )
        if not sources:
            raise InputError("no source is named")
        if stopping not in STOPPING:
            raise InputError(f"stopping is {stopping!r}", hint="use 'first', 'all' or 'never'")
        weights = dict.fromkeys(sources, 1) if weights is None else weights
        if set(weights) != set(sources):
            given, named = (", ".join(sorted(map(str, names))) for names in (weights, sources))
            raise InputError(
                f"weights are for {given}, sources are {named}",
                hint="name each source once in both",
            )
        for name, source in sources.items():
            weight: Any = weights[name]
            if (
                isinstance(weight, bool)
                or not isinstance(weight, Real)
                or not 0 < float(weight) < float("inf")
            ):
                raise InputError(f"the weight of {name} is {weight!r}, expected a number above 0")
            if isinstance(source, str | bytes | Mapping) or not _is_source(source):
                raise InputError(
                    f"source {name} is a {type(source).__name__}, which gives no samples",
                    hint="pass a sequence, an iterable, or a function that makes one",
                )
            if isinstance(source, Iterator):
                raise InputError(
                    f"source {name} is a generator that can be read only once",
                    hint="pass a function that makes it (lambda: …)",
                )
        self.sources = dict(sources)
        self.weights = {name: _share(weights[name]) for name in sources}
        self.stopping = stopping
        self.taken: dict[str, int] = {}

    def set_epoch(self, epoch: int) -> None:
        for source in self.sources.values():
            set_epoch(source, epoch)

    def __iter__(self) -> Iterator[Any]:
        for sample in self.attempts():
            if isinstance(sample, SampleError):
                raise sample
            yield sample

    def attempts(self, wanted: Callable[[int], bool] | None = None) -> Iterator[Any]:
        """As iterating, with the SampleError in the place of a sample that cannot be read by index.

        Args:
            wanted: places that are read; for others None is given, and a source with an index is not asked.
        """
        names = list(self.sources)
        total = sum(self.weights.values())
        shares = [self.weights[name] / total for name in names]
        self.taken = dict.fromkeys(names, 0)
        streams = [self._begin(name) for name in names]
        ahead: list[Any] = [_next(stream) for stream in streams]
        ended = [item is _END for item in ahead]
        if any(ended) and self.stopping != "first":
            empty = ", ".join(name for name, done in zip(names, ended, strict=True) if done)
            raise InputError(f"source {empty} has no samples", hint="leave it out, or use stopping='first'")
        place = 0
        while self.stopping == "never" or not all(ended):
            behind = [
                share * (place + 1) - self.taken[name] for share, name in zip(shares, names, strict=True)
            ]
            k = behind.index(max(behind))
            if ahead[k] is _END:
                if self.stopping == "first":
                    return
                streams[k] = self._begin(names[k])
                ahead[k] = _next(streams[k])
                if ahead[k] is _END:
                    raise InputError(
                        f"source {names[k]} gave samples once and none when it began again",
                        hint="its function has to make a new iterator each time",
                    )
            yield ahead[k]() if wanted is None or wanted(place) else None
            place += 1
            self.taken[names[k]] += 1
            ahead[k] = _next(streams[k])
            ended[k] = ended[k] or ahead[k] is _END

    def _begin(self, name: str) -> Iterator[Any]:
        source = self.sources[name]
        made = source() if callable(source) else source
        if not _is_source(made):
            raise InputError(
                f"the function of source {name} gave a {type(made).__name__}, expected samples",
                hint="return or yield the samples",
            )
        return _rows(made)


def _is_source(source: Any) -> bool:
    return callable(source) or hasattr(source, "__iter__") or is_indexed(source)


def _rows(source: Any) -> Iterator[Callable[[], Any]]:
    """How to get each sample: an indexed source is read only where it is wanted."""
    if is_indexed(source):
        yield from (partial(_read, source, i) for i in range(len(source)))
    else:
        yield from (partial(_same, sample) for sample in source)


def _read(source: Any, index: int) -> Any:
    try:
        return source[index]
    except SampleError as error:
        return error


def _same(sample: Any) -> Any:
    return sample


def _share(weight: Any) -> Fraction:
    """The weight as a fraction, of small numbers where that is exact to a millionth."""
    exact = Fraction(str(weight)) if isinstance(weight, float) else Fraction(float(weight))
    near = exact.limit_denominator(10**6)
    return near if abs(near - exact) * 10**6 <= exact else exact


class _End:
    """The end of a source."""


_END = _End()


def _next(stream: Iterator[Any]) -> Any:
    return next(stream, _END)
