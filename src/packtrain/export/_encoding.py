"""The packs of a chunk, encoded in this process or in several; the same bytes for any number of them.

Packs go to the workers in order, as many as the chunk needs and no more, and come back in order (`Pool`). A
worker opens raw shards itself and sends back numbers; a worker that dies stops the producer, and the next run
goes on behind the last whole chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DriftError, InputError, SampleError
from ..execute.pool import Pool
from ..extend import Source, Template
from ..measuring.encoding import encoded, fault_of
from ..measuring.run import located
from ..store._chunk_fields import Value, read_value, restore
from ..store.chunks import ChunkWriter
from ._intake import Intake, carry

logger = logging.getLogger(__name__)

#: Raw shards that a worker keeps open.
_OPEN = 64

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
            yield from map(self._here, packs)
            return
        for outcomes in self._pool.map([(one, *self._intake.place(one)) for one in pack] for pack in packs):
            yield [one if isinstance(one, SampleError) else _restored(one) for one in outcomes]

    def _here(self, pack: list[int]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for sample_id in pack:
            source, row = self._intake.record(sample_id)
            outcomes.append(_encoded(source, row, self._template))
        return outcomes

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
        try:
            carry(record, made, source.where(row))
        except SampleError as error:
            return error
    return made


def _restored(values: Mapping[str, Value]) -> dict[str, Any]:
    return {name: restore(value.array, value.dtype, value.shape) for name, value in values.items()}


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
            sources[path] = open_shard(Path(path))
            while len(sources) > _OPEN:
                del sources[next(iter(sources))]
        outcome = _encoded(sources[path], row, template)
        if not isinstance(outcome, SampleError):
            outcome = {name: read_value(value, name) for name, value in outcome.items()}
        out.append(outcome)
    return out
