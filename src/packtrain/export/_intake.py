"""The producer's input side: complete shards get ids, ids are measured and encoded."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import is_finite
from ..errors import ConfigError, DriftError, InputError, MissingExtraError, SampleError, SourceError
from ..execute.pool import Pool
from ..extend import Source, Template
from ..measuring.encoding import encoded, fault_of
from ..measuring.run import Part, located, measure_range
from ..planning.lengths import Lengths
from ..sources import open_source
from ..sources._account import Account
from ..sources.chat import ChatSource
from ..store._chunk_reader import read_value, restore
from ..store.chunks import ChunkWriter
from ..store.parts import joined
from ._journal import Journal, RawShard, content_digest, stamp_of

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
    if weight is not None and not (isinstance(weight, int | float) and is_finite(weight) and weight >= 0):
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
    if not isinstance(scale, list) or len(scale) != tokens or not all(map(is_finite, scale)):
        size = f"a list of {len(scale)}" if isinstance(scale, list) else scale
        raise _fault(where, "loss_scale", size, f"expected {tokens} finite numbers, one for each token")
    encoded["loss_scale"] = np.asarray(scale, dtype=np.float32)


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
                source = opened(self._open_shard, path)
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
            source = opened(self._open_shard, path)
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


def opened(open_shard: Callable[[Path], Source], path: Path) -> Source:
    """The samples of a shard; of encoded rows, what travels with a sample counts as read."""
    source: Any = open_shard(path)
    if getattr(source, "encoded", False) and hasattr(source, "account"):
        source.left_out = source.account.ignore
        source.account = Account((*source.left_out, *_CARRIED, "loss_scale"))
    return source  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Opener:
    """path -> the samples in it: encoded rows as they are, all else as chats. Picklable."""

    chat: Mapping[str, Any]
    kind: str | None
    source_options: Mapping[str, Any]

    def __call__(self, path: Path) -> Source:
        source = open_source(path, kind=self.kind, **self.source_options)
        return source if getattr(source, "encoded", False) else ChatSource(source, **self.chat)

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


# --------------------------------------------------------------------------------------------
# The packs of a chunk, encoded in this process or in several; the same bytes for any number of them
# --------------------------------------------------------------------------------------------
# Packs go to the workers in order, as many as the chunk needs and no more, and come back in order (`Pool`). A
# worker opens raw shards itself and sends back numbers; a worker that dies stops the producer, and the next
# run goes on behind the last whole chunk.
#: Raw shards that a worker keeps open.
_OPEN_THERE = 64

#: Packs of a worker that may be on the way.
_AHEAD = 2

Outcome = dict[str, Any] | SampleError


class Encoding:
    """Encodes packs into chunks.

    Args:
        intake: where the samples are.
        setup: the producer's template and `open_shard`; picklable where `workers` is more than 1.
        workers: processes.
        cap: of a pack in tokens.
    """

    def __init__(
        self, intake: Intake, setup: tuple[Template, Callable[[Path], Source]], workers: int, cap: int
    ) -> None:
        self._intake = intake
        self._template = setup[0]
        self._cap = cap
        self._pool = Pool(
            _encode_there, (*setup, {}), 0 if workers == 1 else workers, ahead=_AHEAD, name=_pack_name
        )

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def fill(
        self,
        writer: ChunkWriter,
        pending: list[list[int]],
        full: tuple[int, int],
        failed: dict[int, SampleError],
        tell: Callable[[], None],
    ) -> int:
        """Add packs to a chunk until it is full, or none is left; returns how many were used.

        Samples that fail are put into `failed` and left out of their pack; none takes their place.

        Args:
            full: a chunk with so many packs, or so many bytes, is full.
            tell: called before each pack.

        Raises:
            DriftError: a pack encodes to more than its cap.
            InputError: a worker died.
        """
        used = 0
        while not is_full(writer, full) and used < len(pending):
            packs = pending[used : used + full[0] - writer.packs]
            outcomes = self._outcomes(packs)
            for pack in packs:
                tell()
                self._add(writer, pack, next(outcomes), failed)
                used += 1
                if is_full(writer, full):
                    break
        return used

    def _outcomes(self, packs: list[list[int]]) -> Iterator[list[Outcome]]:
        if not self._pool.workers:
            template = self._template
            yield from ([_encoded(*self._intake.record(one), template) for one in pack] for pack in packs)
            return
        for outcomes in self._pool.map([(one, *self._intake.place(one)) for one in pack] for pack in packs):
            for place, values in enumerate(outcomes):
                if not isinstance(values, SampleError):
                    outcomes[place] = {n: restore(v.array, v.dtype, v.shape) for n, v in values.items()}
            yield outcomes

    def _add(
        self, writer: ChunkWriter, pack: list[int], outcomes: list[Outcome], failed: dict[int, SampleError]
    ) -> None:
        samples, records = [], []
        for sample_id, outcome in zip(pack, outcomes, strict=True):
            if isinstance(outcome, SampleError):
                failed[sample_id] = outcome
                continue
            samples.append({"sample_id": sample_id, **outcome})
            if writer.media == "source":
                source, row = self._intake.record(sample_id)
                records.append(source[row])
        tokens = sum(int(np.shape(sample["input_ids"])[-1]) for sample in samples)
        if len(samples) > 1 and tokens > self._cap:
            raise DriftError(
                f"the pack of samples {pack} encodes to {tokens} tokens, the cap is {self._cap}",
                hint="the template measures other lengths than it encodes; packtrain measure --audit",
            )
        if not samples:
            return
        try:
            writer.add(samples, records or None)
        except InputError as error:
            named = ", ".join(self._intake.where(sample["sample_id"]) for sample in samples[:4])
            more = f" and {len(samples) - 4} more" if len(samples) > 4 else ""
            raise InputError(f"{error.message}; the pack is of {named}{more}", hint=error.hint) from None


def is_full(writer: ChunkWriter, full: tuple[int, int]) -> bool:
    """Has the chunk as many packs, or bytes, as it should?"""
    return writer.packs >= full[0] or writer.bytes >= full[1]


def _encoded(source: Source, row: int, template: Template) -> Outcome:
    """The encoded sample with what it carries, or why it cannot be encoded."""
    try:
        sample = source[row]
        made = encoded(template.encode, sample)
    except Exception as error:
        fault = fault_of(error)  # or it is raised: a restart takes the sample
        if fault is error:
            return fault
        logger.info("%s failed", source.where(row), exc_info=error)
        return SampleError(fault.reason, located(source.where(row), fault.message))
    inner = getattr(source, "source", None)
    record = sample if inner is None else inner[row]
    if isinstance(record, Mapping):
        left_out = getattr(source, "left_out", getattr(getattr(source, "account", None), "ignore", ()))
        record = {name: value for name, value in record.items() if name not in left_out}
        try:
            carry(record, made, source.where(row))
        except SampleError as error:
            return error
    return made


def _pack_name(samples: list[tuple[int, str, int]]) -> str:
    return f"the pack of samples {[sample_id for sample_id, _, _ in samples]}"


def _encode_there(
    context: tuple[Template, Callable[[Path], Source], dict[str, Source]], pack: Any
) -> list[Any]:
    """In a worker: the samples of a pack as plain arrays.

    Args:
        context: the template, `open_shard`, and the shards that are open there.
        pack: id, shard and record of each sample.
    """
    template, open_shard, sources = context
    out: list[Any] = []
    for _, path, row in pack:
        if path not in sources:
            sources[path] = opened(open_shard, Path(path))
            while len(sources) > _OPEN_THERE:
                del sources[next(iter(sources))]
        outcome = _encoded(sources[path], row, template)
        if not isinstance(outcome, SampleError):
            outcome = {name: read_value(value, name) for name, value in outcome.items()}
        out.append(outcome)
    return out
