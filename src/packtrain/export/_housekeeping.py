"""What a producer does with chunks that were published: index them, count what readers lag behind, remove."""

from __future__ import annotations

import logging
from pathlib import Path

from .. import files
from ..store._folders import sealed
from ..store.growing import COMPLETED, INDEX, READERS, Order, chunk_name, completed, number_of, readers
from ..waiting.poll import fresh_names

__all__ = ["Housekeeping"]

logger = logging.getLogger(__name__)

#: Chunks between two rewrites of `index.json`.
INDEX_EVERY = 64

#: The newest chunks stay: a restart goes on behind them.
KEPT = 2


class Housekeeping:
    """Chunks of one stream.

    Attributes:
        packs: packs of every chunk that was published, removed ones too.
    """

    def __init__(self, output: Path, stream: str, packs: list[int]) -> None:
        self.output = output
        self.stream = stream
        self.packs = packs
        self._read: dict[Path, _Read] = {}
        self._told: set[Path] = set()

    def add(self, packs: int) -> None:
        """One more chunk was published."""
        self.packs.append(packs)
        if len(self.packs) % INDEX_EVERY == 0:
            self.publish_index()

    def publish_index(self) -> None:
        """Rewrite `index.json`."""
        files.publish_json(self.output / INDEX, sealed({"stream": self.stream, "packs": self.packs}))

    def used_up(self) -> set[int]:
        """Chunks that lie wholly before what every reader has acknowledged; none where nobody reads."""
        used: list[set[int]] = []
        for marks, cursor in readers(self.output, self.stream).items():
            if cursor is None:
                self._tell_of(marks)
                return set()
            world = int(cursor["order_world"])
            if marks not in self._read or self._read[marks].order.world != world:
                self._read[marks] = _Read(world)
            used.append(self._read[marks].until(int(cursor["slots"]), self.packs))
        return set.intersection(*used) if used else set()

    def ahead(self) -> int:
        """Chunks that are published and not used up."""
        return len(self.packs) - len(self.used_up())

    def _tell_of(self, marks: Path) -> None:
        """One line, once, for a registered run whose marks nobody can see: it holds back the clean-up."""
        if marks not in self._told and not marks.exists():
            self._told.add(marks)
            logger.warning(
                "%s: no chunk counts as used: the marks of a run that registered, %s, are not to be seen; "
                "if it will not go on, remove the file that names them in %s",
                self.output,
                marks,
                self.output / READERS,
            )

    def clean(self, keep: int) -> list[int]:
        """Remove chunks that are used up and marked, but the newest `keep` of these; returns their numbers.

        The mark goes last, so that a removal that was stopped is finished by the next one.
        """
        marks = readers(self.output, self.stream)
        here = {number_of(f"{name.partition('.')[0]}.json") for name in fresh_names(self.output)}
        marked = set.intersection(*map(completed, marks)) & here if marks else set()
        allowed = {number for number in marked & self.used_up() if number < len(self.packs) - KEPT}
        newest = sorted(marked)[len(marked) - keep :] if keep else []
        gone = sorted(allowed - set(newest))
        if gone:
            self.publish_index()
        for number in gone:
            path = self.output / chunk_name(number)
            files.remove(path)
            files.remove(path.with_suffix(".json"))
            files.remove(path.with_name(f"{path.name}{COMPLETED}"))
        if gone:
            logger.info("%s: removed %d acknowledged chunks", self.output, len(gone))
        return gone


class _Read:
    """Chunks that one reader has used up, in its order."""

    def __init__(self, world: int) -> None:
        self.order = Order(world)
        self._used: set[int] = set()
        self._next = list(range(world))

    def until(self, slots: int, packs: list[int]) -> set[int]:
        """Those that lie wholly before `slots`; only ever more."""
        order = self.order
        for count in packs[order.chunks :]:
            order.append(count)
        for rank, chunk in enumerate(self._next):  # of each rank the first chunk that is not used up
            while chunk < order.chunks and order.end_of(chunk) <= slots:
                self._used.add(chunk)
                chunk += order.world
            self._next[rank] = chunk
        return self._used
