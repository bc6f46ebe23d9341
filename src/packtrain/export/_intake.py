"""The producer's input side: complete shards get ids, ids are measured."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, InputError, MissingExtraError, SourceError
from ..extend import Source, Template
from ..measuring.run import measure_range
from ..planning.lengths import Lengths
from ..sources import open_source
from ..sources._account import Account
from ..sources.chat import ChatSource
from ._carried import CARRIED
from ._journal import Journal, RawShard
from ._raw_shards import content_digest, stamp_of

__all__ = ["Intake", "Opener", "reading"]

logger = logging.getLogger(__name__)

#: Shards whose sources stay open.
_OPEN = 256


class Intake:
    """Shards by number, samples by id.

    Args:
        journal: gives ids, durably.
        template: measures and encodes.
        open_shard: path -> Source of what the template takes.
    """

    def __init__(self, journal: Journal, template: Template, open_shard: Callable[[Path], Source]) -> None:
        self.journal = journal
        self.details: dict[int, str] = {}
        self.keys: Counter[str] = Counter()
        self._open_shard = open_shard
        self._template = template
        self._sources: dict[int, Source] = {}
        self._touched: set[int] = set()

    def admit(self, say: Callable[[str], None], *, deep: bool) -> int:
        """Take the shards that became complete; returns how many.

        Args:
            deep: look at those that were taken too: whether they were written again.
        """
        raw = self.journal.raw
        visible = [name for name in raw.visible() if deep or not self.journal.knows(name)]
        names = [name for name in raw.complete(visible) if self.journal.is_new(name)]
        taken = 0
        for name in names:
            say(f"opening {name}")
            path = raw.path(name)
            stamp = stamp_of(path)
            try:
                content = content_digest(path)
            except FileNotFoundError:  # whoever delivers it has taken it away again, or part of it
                logger.warning("%s went away while it was opened: not taken", path)
                continue
            source: Source | None = None
            fault = None
            try:
                source = self._open_shard(path)
            except (ConfigError, MissingExtraError):
                raise  # the fault of the command, not of the shard
            except InputError as error:
                fault = error.message
                logger.warning("%s cannot be read and is left out: %s", path, fault)
            rows = 0 if source is None else len(source)
            shard = self.journal.admit(name, rows, content, stamp, fault)
            taken += 1
            if shard.duplicate_of is not None:
                logger.warning("%s has the bytes of %s, which was read: left out", path, shard.duplicate_of)
            elif source is not None:
                self._keep(shard, source)
        return taken

    def source(self, shard: RawShard) -> Source:
        """A shard's samples.

        Raises:
            SourceError: its file is gone, or was written again.
        """
        self._touched.add(shard.number)
        source = self._sources.pop(shard.number, None)
        if source is None:
            path = self.journal.raw.path(shard.name)
            if not path.exists():
                raise SourceError(
                    f"{path} is gone, and samples of it are not published yet",
                    hint="put it back; remove a raw shard only when its samples are in chunks",
                )
            self.journal.is_new(shard.name)
            source = self._open_shard(path)
        self._keep(shard, source)
        return source

    def check_unchanged(self) -> None:
        """What was read since the last call came from the bytes that were taken.

        Raises:
            SourceError: a shard was written again meanwhile.
        """
        for number in sorted(self._touched):
            shard = self.journal.shards[number]
            if self.journal.raw.path(shard.name).exists():
                self.journal.is_new(shard.name)
        self._touched.clear()

    def _keep(self, shard: RawShard, source: Source) -> None:
        self._sources[shard.number] = source
        while len(self._sources) > _OPEN:
            del self._sources[next(iter(self._sources))]

    def where(self, sample_id: int) -> str:
        """Raw shard and record of a sample: `part-3.jsonl:17`."""
        shard = self.journal.shard_of(sample_id)
        return self.source(shard).where(sample_id - shard.start)

    def measure(self, start: int, stop: int) -> Lengths:
        """Lengths of the ids start … stop - 1.

        `details` then holds a line on each that cannot be used, `keys` the counts of keys.
        """
        parts: list[tuple[RawShard, Any]] = []
        self.details, self.keys = {}, Counter()
        place = start
        while place < stop:
            shard = self.journal.shard_of(place)
            end = min(stop, shard.start + shard.rows)
            part = measure_range(
                (self.source(shard), self._template), (place - shard.start, end - shard.start)
            )
            parts.append((shard, part))
            self.keys.update(part.keys)
            self.details.update({shard.start + row: line for row, line in part.details.items()})
            place = end
        names = sorted({name for _, part in parts for name in part.costs})
        return Lengths(
            _joined([part.tokens for _, part in parts]),
            {
                name: _joined([part.costs.get(name, np.zeros_like(part.tokens)) for _, part in parts])
                for name in names
            },
            _joined([part.status for _, part in parts], np.uint8),
            {
                shard.start + row - start: reason
                for shard, part in parts
                for row, reason in part.reasons.items()
            },
        )

    def record(self, sample_id: int) -> tuple[Source, int]:
        """The source of a sample, and its record there."""
        shard = self.journal.shard_of(sample_id)
        return self.source(shard), sample_id - shard.start

    def place(self, sample_id: int) -> tuple[str, int]:
        """The file or folder of a sample, and its record there; checked like `record`."""
        shard = self.journal.shard_of(sample_id)
        self.source(shard)
        return str(self.journal.raw.path(shard.name)), sample_id - shard.start


@dataclass(frozen=True)
class Opener:
    """path -> the samples in it: encoded rows as they are, all else as chats. Picklable."""

    chat: Mapping[str, Any]
    kind: str | None
    source_options: Mapping[str, Any]

    def __call__(self, path: Path) -> Source:
        source = open_source(path, kind=self.kind, **self.source_options)
        if not getattr(source, "encoded", False):
            return ChatSource(source, **self.chat)
        rows: Any = source
        carried = (*CARRIED, "loss_scale")  # they travel with the sample
        rows.account = Account((*rows.account.ignore, *carried))
        return source

    def config(self) -> dict[str, Any]:
        """What decides the samples of a shard."""
        return reading({**self.chat, "kind": self.kind, "source_options": self.source_options})


def reading(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of reading that decide the samples and are not left at their defaults.

    Where media lie is none of them: they may be mounted elsewhere.
    """
    plain = {"shape": "auto", "media_without_placeholder": "error", "task": "chat"}
    return {
        name: value
        for name, value in sorted(options.items())
        if value and value != plain.get(name) and name != "media_root"
    }


def _joined(parts: list[NDArray[Any]], dtype: Any = np.int64) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
