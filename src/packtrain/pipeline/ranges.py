"""Ranges of ids mapped over an executor and joined to parts of a size worth publishing.

Ranges are cut by id and come back in id order, so parts do not depend on workers. A part holds at most a
128th of the work (4,096 samples where that is more): a stopped measurement repeats less than one percent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import extend
from ..measuring.run import Part, measure_range
from ..store.parts import joined
from .publish import Identity

#: Samples a worker measures at once: small enough for progress and balance, large enough to batch.
UNIT = 256

#: Up to this many samples are measured in this process: a worker takes seconds to start.
SERIAL = 2048

#: Parts a whole measurement is published in, and the fewest samples of a part.
PARTS, LEAST = 128, 4096

Progress = Callable[[int, int], None]


@dataclass
class Measurement:
    """What is measured, and by whom; only the source and the template decide a byte of the result.

    Attributes:
        source, template: as for `measure`.
        executor: option name of an executor.
        options: further keyword arguments of its `map_shards`, such as `address`.
        workers: processes; None = this process for up to `SERIAL` samples, else one per core.
        every: samples per published part; None = by the size of the work.
        progress: called with (samples done, samples in all).
        origin: how to open the source and template again.
        identity: of the source and the template.
    """

    source: extend.Source
    template: extend.Template
    executor: str
    options: Mapping[str, Any]
    workers: int | None
    every: int | None
    progress: Progress | None
    origin: dict[str, Any] | None

    def __post_init__(self) -> None:
        self.identity = Identity.of(self.source, self.template)

    def parts(self, done: int, start: int, stop: int) -> Iterator[Part]:
        """The ids from `done` on of all the work, start … stop - 1, in parts worth publishing."""
        results = self.map(measure_range, cut(done, stop), (self.source, self.template))
        return self.gathered(results, start, stop)

    def map(self, work: Any, ranges: list[tuple[int, int]], context: Any) -> Iterator[Any]:
        """`work(context, range)` of each range, in order."""
        workers = self.workers
        samples = sum(stop - start for start, stop in ranges)
        if workers is None and self.executor == "local" and samples <= SERIAL:
            workers = 1
        results: Iterator[Any] = extend.lookup("execute", self.executor).map_shards(
            work, ranges, workers=workers, context=context, **self.options
        )
        return results

    def size(self, samples: int) -> int:
        """Samples of a part, of so many in all."""
        return self.every or max(LEAST, -(-samples // PARTS))

    def gathered(self, results: Iterable[Part], start: int, stop: int) -> Iterator[Part]:
        """Join the parts of ranges, up to the last id `stop`, to parts worth publishing.

        Args:
            results: in id order, without gaps.
            start: first id of all the work, what was done before included.
            stop: the id after the last.
        """
        size = self.size(stop - start)
        waiting: list[Part] = []
        for part in results:
            waiting.append(part)
            if self.progress is not None:
                self.progress(part.stop - start, stop - start)
            if part.stop - waiting[0].start >= size or part.stop == stop:
                yield joined(waiting)
                waiting = []


def cut(start: int, stop: int, size: int | None = None) -> list[tuple[int, int]]:
    """[start, stop) in ranges of `size` (default `UNIT`)."""
    step = size or UNIT
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]
