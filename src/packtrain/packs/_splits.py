"""The splits of a stream: who owns which, and the order of all packs.

A stream is `count` splits. Split s holds the places s, s + count, s + 2 * count, … of an epoch, has a
shuffle, a packer and a cursor of its own, and is read by one reader at a time (readers: ranks times the
workers of a torch DataLoader). Its packs do not depend on the reader, so the number of readers may change at
any state.

The order of packs is by (turn, split): the first pack of every split, then the second of every split, … A
split without a further pack is passed over; a cyclic one begins its next epoch instead. Splits are dealt
by their next pack in this order: the i-th to rank i % ranks, there to worker i // ranks % workers. So step k
of R ranks takes the packs k * R … k * R + R - 1, whatever R is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from ..checks import divisors
from ..errors import InputError, counted
from ..world import World

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
