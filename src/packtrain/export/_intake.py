"""The producer's input side: complete shards get ids, ids are measured."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, InputError, MissingExtraError, SampleError, SourceError
from ..extend import Source, Template
from ..measuring.run import Part, measure_range
from ..planning.lengths import Lengths
from ..sources import open_source
from ..sources._account import Account
from ..sources.chat import ChatSource
from ..store.parts import joined
from ._journal import Journal, RawShard
from ._raw_shards import content_digest, stamp_of

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# What a raw record says of its sample beside its content, and what of that nobody can train with
# --------------------------------------------------------------------------------------------
#     weight            a finite number >= 0
#     channel, source   a text or a finite number
#     loss_scale        a list of finite numbers, one for each token
#
# A record that says anything else there is faulty, alone: it goes to the ledger as `malformed_record`.
# Carried on, one NaN would turn the weights of its whole step to NaN.
#: Values of a raw record that travel with its sample, where the template does not make them itself.
_CARRIED = ("weight", "channel", "source")


def carry(record: Mapping[str, Any], encoded: dict[str, Any], where: str) -> None:
    """Put what `record` carries into `encoded`.

    Args:
        where: of the record, for messages.

    Raises:
        SampleError: `malformed_record`: a value that cannot be carried.
    """
    weight = record.get("weight")
    if weight is not None and not (_is_finite(weight) and weight >= 0):
        raise _fault(where, "weight", weight, "expected a number >= 0")
    for name in _CARRIED:
        value = record.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            raise _fault(where, name, value, "expected a text or a finite number")
        if isinstance(value, str | int | float):
            encoded.setdefault(name, value)
    scale = record.get("loss_scale")
    if scale is None or "loss_scale" in encoded:
        return
    tokens = len(encoded["input_ids"])
    if not isinstance(scale, list) or len(scale) != tokens or not all(map(_is_finite, scale)):
        size = f"a list of {len(scale)}" if isinstance(scale, list) else scale
        raise _fault(where, "loss_scale", size, f"expected {tokens} finite numbers, one for each token")
    encoded["loss_scale"] = np.asarray(scale, dtype=np.float32)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _fault(where: str, name: str, value: Any, expected: str) -> SampleError:
    return SampleError("malformed_record", f"{where}: {name} is {value!r:.80}, {expected}")


# --------------------------------------------------------------------------------------------
# The producer's input side: complete shards get ids, ids are measured
# --------------------------------------------------------------------------------------------
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
        parts: list[Part] = []
        place = start
        while place < stop:
            shard = self.journal.shard_of(place)
            end = min(stop, shard.start + shard.rows)
            part = measure_range(
                (self.source(shard), self._template), (place - shard.start, end - shard.start)
            )
            told = [(shard.start + row, reason, line) for row, reason, line in part.told]
            parts.append(replace(part, start=place, stop=end, told=told))
            place = end
        whole = joined(parts, start)
        self.details, self.keys = whole.details, Counter(whole.keys)
        reasons = {i - start: reason for i, reason in whole.reasons.items()}
        return Lengths(whole.tokens, whole.costs, whole.status, reasons)

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
        carried = (*_CARRIED, "loss_scale")  # they travel with the sample
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
