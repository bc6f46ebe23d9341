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

Over sources that all have an index the mixture has one too (not under `never`): a place is found at once.
Which source comes repeats after as many places as the weights add up to, in whole numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property, partial
from math import lcm
from typing import Any

from ..checks import number, one_of
from ..errors import InputError, SampleError
from ..measuring.eligibility import set_epoch, where_in
from ..sources.mixture import Part
from ._readers import check_source, is_indexed

_LONGEST = 1 << 18  # places times sources of a period that is worked out


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
        by_name = isinstance(sources, Mapping) and (weights is None or isinstance(weights, Mapping))
        if not by_name or not sources:
            told = "sources and weights are given by name" if not by_name else "no source is named"
            raise InputError(told, hint='WeightedSources({"chat": chat, "ocr": ocr}, …)')
        one_of("stopping", stopping, ("first", "all", "never"))
        weights = dict.fromkeys(sources, 1) if weights is None else weights
        if set(weights) != set(sources):
            given, named = (", ".join(sorted(map(str, names))) for names in (weights, sources))
            raise InputError(
                f"weights are for {given}, sources are {named}",
                hint="name each source once in both",
            )
        for name, source in sources.items():
            number(f"the weight of {name}", weights[name], 0, without=(0,))
            check_source(source, f"source {name}")
        self.sources = dict(sources)
        self.weights = {name: _share(weights[name]) for name in sources}
        self.stopping = stopping
        self.taken: dict[str, int] = {}
        if type(self) is WeightedSources and self._is_indexed():
            self.__class__ = IndexedSources

    def _is_indexed(self) -> bool:
        if self.stopping == "never":
            return False
        held = self.sources.values()
        if not all(is_indexed(source) and not callable(source) for source in held):
            return False
        return self._period() * len(held) <= _LONGEST and all(map(len, held))

    def _period(self) -> int:
        """Places after which every source has exactly its share."""
        total = sum(self.weights.values())
        return lcm(*((weight / total).denominator for weight in self.weights.values()))

    def mixture(self) -> dict[str, Any]:
        """What decides which source comes where, as plain JSON."""
        weights = [[name, str(weight)] for name, weight in self.weights.items()]
        return {"weights": weights, "stopping": self.stopping}

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
        for place, read in enumerate(self.reads()):
            yield read() if wanted is None or wanted(place) else None

    def reads(self) -> Iterator[Callable[[], Any]]:
        """How to get each sample of a pass, or the SampleError in its place."""
        names = list(self.sources)
        total = sum(self.weights.values())
        shares = [self.weights[name] / total for name in names]
        taken = self.taken = dict.fromkeys(names, 0)  # a pass counts for itself: several may run at once
        streams = [self._begin(name) for name in names]
        ahead: list[Any] = [_next(stream) for stream in streams]
        ended = [item is _END for item in ahead]
        if any(ended) and self.stopping != "first":
            empty = ", ".join(name for name, done in zip(names, ended, strict=True) if done)
            raise InputError(f"source {empty} has no samples", hint="leave it out, or use stopping='first'")
        place = 0
        while self.stopping == "never" or not all(ended):
            behind = [share * (place + 1) - taken[name] for share, name in zip(shares, names, strict=True)]
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
            yield ahead[k]
            place += 1
            taken[names[k]] += 1
            ahead[k] = _next(streams[k])
            ended[k] = ended[k] or ahead[k] is _END

    def _begin(self, name: str) -> Iterator[Any]:
        source = self.sources[name]
        made = source() if callable(source) else source
        if not (callable(made) or hasattr(made, "__iter__") or is_indexed(made)):
            raise InputError(
                f"the function of source {name} gave a {type(made).__name__}, expected samples",
                hint="return or yield the samples",
            )
        return _rows(made)


class IndexedSources(WeightedSources):
    """The mixture of sources that all have a length and an index; what `WeightedSources` makes of them.

    Attributes:
        in_order: its order has a meaning.
    """

    in_order = True

    @cached_property
    def _turns(self) -> tuple[list[int], list[int], list[list[int]]]:
        """By place of a period the source, and how often it came before; by source its places."""
        period, total = self._period(), sum(self.weights.values())
        shares = [int(weight / total * period) for weight in self.weights.values()]
        places: list[list[int]] = [[] for _ in shares]
        owner, before = [], []
        for place in range(1, period + 1):
            behind = [share * place - period * len(own) for share, own in zip(shares, places, strict=True)]
            k = behind.index(max(behind))
            owner.append(k)
            before.append(len(places[k]))
            places[k].append(place - 1)
        return owner, before, places

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its sources by name, as a `Mixture` has them, and how many places each fills."""
        owner, _, places = self._turns
        rounds, rest = divmod(len(self), len(owner))
        return tuple(
            Part(name, source, rounds * len(own) + bisect_left(own, rest))
            for (name, source), own in zip(self.sources.items(), places, strict=True)
        )

    def place(self, index: int) -> tuple[int, int, int]:
        """(source, index in it, how often that sample came before) of a place."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        owner, before, places = self._turns
        rounds, turn = divmod(index, len(owner))
        k = owner[turn]
        again, row = divmod(rounds * len(places[k]) + before[turn], len(list(self.sources.values())[k]))
        return k, row, again

    def _place(self, k: int, number: int) -> int:
        """Where sample `number` of source k comes."""
        own = self._turns[2][k]
        rounds, rest = divmod(number, len(own))
        return rounds * len(self._turns[0]) + own[rest]

    def __len__(self) -> int:
        sizes = [len(source) for source in self.sources.values()]
        if self.stopping == "first":
            return min(self._place(k, size) for k, size in enumerate(sizes))
        return max(self._place(k, size - 1) for k, size in enumerate(sizes)) + 1

    def __getitem__(self, place: int) -> Any:
        k, row, _ = self.place(place)
        return list(self.sources.values())[k][row]

    def where(self, place: int) -> str:
        """Where the sample of a place stands, as its source says; "": it does not say."""
        k, row, _ = self.place(place)
        return where_in(list(self.sources.values())[k], row)


def _rows(source: Any) -> Iterator[Callable[[], Any]]:
    """How to get each sample: an indexed source, also one of a mixture, is read only where it is wanted."""
    if is_indexed(source):
        yield from (partial(_read, source, i) for i in range(len(source)))
    elif isinstance(source, WeightedSources):
        yield from source.reads()
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


_END = object()  # the end of a source


def _next(stream: Iterator[Any]) -> Any:
    return next(stream, _END)
