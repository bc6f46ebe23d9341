"""Ranges of ids mapped over an executor and joined to parts of a size worth publishing.

Ranges are cut by id and come back in id order, so parts do not depend on workers. A part holds at most a
128th of the work (4,096 samples where that is more): a stopped measurement repeats less than one percent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import extend
from ..measuring.run import Part
from ..store import parts

#: Samples a worker measures at once: small enough for progress and balance, large enough to batch.
UNIT = 256

#: Up to this many samples are measured in this process: a worker takes seconds to start.
SERIAL = 2048

#: Parts a whole measurement is published in, and the fewest samples of a part.
PARTS, LEAST = 128, 4096

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class How:
    """Who measures; nothing here changes a byte of the result.

    Attributes:
        executor: option name of an executor.
        options: further keyword arguments of its `map_shards`, such as `address`.
        workers: processes; None = this process for up to `SERIAL` samples, else one per core.
        every: samples per published part; None = by the size of the work.
        progress: called with (samples done, samples in all).
    """

    executor: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    every: int | None = None
    progress: Progress | None = None

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


def cut(start: int, stop: int, size: int | None = None) -> list[tuple[int, int]]:
    """[start, stop) in ranges of `size` (default `UNIT`)."""
    step = size or UNIT
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]


def gathered(results: Iterable[Part], start: int, stop: int, how: How) -> Iterator[Part]:
    """Join the parts of ranges, up to the last id `stop`, to parts worth publishing.

    Args:
        results: in id order, without gaps.
        start: first id of all the work, what was done before included.
        stop: the id after the last.
    """
    size = how.size(stop - start)
    waiting: list[Part] = []
    for part in results:
        waiting.append(part)
        if how.progress is not None:
            how.progress(part.stop - start, stop - start)
        if part.stop - waiting[0].start >= size or part.stop == stop:
            yield parts.joined(waiting)
            waiting = []
