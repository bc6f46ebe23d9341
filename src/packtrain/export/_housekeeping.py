"""What a producer does with chunks that were published: index them, count what readers lag behind, remove."""

from __future__ import annotations

import logging
from pathlib import Path

from .. import files
from ..store._folders import sealed
from ..store.growing import COMPLETED, INDEX, Order, acknowledged, chunk_name, number_of
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
        self._order: Order | None = None
        self._used: set[int] = set()
        self._next: list[int] = []

    def add(self, packs: int) -> None:
        """One more chunk was published."""
        self.packs.append(packs)
        if len(self.packs) % INDEX_EVERY == 0:
            self.publish_index()

    def publish_index(self) -> None:
        """Rewrite `index.json`."""
        files.publish_json(self.output / INDEX, sealed({"stream": self.stream, "packs": self.packs}))

    def used_up(self) -> set[int]:
        """Chunks that lie wholly before what all readers have acknowledged."""
        cursor = acknowledged(self.output, self.stream)
        if cursor is None:
            return set()
        world, slots = int(cursor["order_world"]), int(cursor["slots"])
        if self._order is None or self._order.world != world:
            self._order, self._used, self._next = Order(world), set(), list(range(world))
        order = self._order
        for packs in self.packs[order.chunks :]:
            order.append(packs)
        for rank, chunk in enumerate(self._next):  # of each rank the first chunk that is not used up
            while chunk < order.chunks and order.end_of(chunk) <= slots:
                self._used.add(chunk)
                chunk += world
            self._next[rank] = chunk
        return self._used

    def ahead(self) -> int:
        """Chunks that are published and not used up."""
        return len(self.packs) - len(self.used_up())

    def clean(self, keep: int) -> list[int]:
        """Remove chunks that are used up and marked, but the newest `keep` of these; returns their numbers.

        The mark goes last, so that a removal that was stopped is finished by the next one.
        """
        marked = {
            number
            for name in fresh_names(self.output)
            if name.endswith(COMPLETED)
            and (number := number_of(name.replace(f".arrow{COMPLETED}", ".json"))) is not None
        }
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
