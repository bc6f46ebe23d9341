"""The packs of a chunk, encoded in this process or in several; the same bytes for any number of them.

Packs go to the workers in order, as many as the chunk needs and no more, and come back in order. A worker
opens raw shards itself and sends back numbers; a worker that dies stops the producer at once, and the next
run goes on behind the last whole chunk.
"""

from __future__ import annotations

import errno
import logging
import pickle
import sys
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DriftError, InputError, PacktrainError, SampleError
from ..extend import Source, Template
from ..store._chunk_fields import Value, read_value, restore
from ..store.chunks import ChunkWriter
from ..workers import Parcel, end_with_parent, parcel, worker_context
from ._intake import Intake, carry

logger = logging.getLogger(__name__)

#: Errors of the machine, not of the sample: no memory, files, space or disk.
_MACHINE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)

#: Raw shards that a worker keeps open.
_OPEN = 64

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
        self._setup = setup
        self._workers = workers
        self._cap = cap
        self._pool: ProcessPoolExecutor | None = None

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
        waiting: deque[tuple[list[int], Future[list[Outcome]] | None]] = deque()
        packs = full[0]
        while not is_full(writer, full) and used < len(pending):
            tell()
            wanted = min(len(pending) - used, packs - writer.packs, 2 * self._workers)
            while len(waiting) < wanted:
                pack = pending[used + len(waiting)]
                waiting.append((pack, self._submit(pack)))
            pack, future = waiting.popleft()
            used += 1
            self._add(writer, pack, self._here(pack) if future is None else self._result(future), failed)
        return used

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    # ------------------------------------------------------------------------------------ workers
    def _submit(self, pack: list[int]) -> Future[list[Outcome]] | None:
        if self._workers == 1:
            return None
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=worker_context(),
                initializer=_start,
                initargs=(_pickled(self._setup),),
            )
        tasks = []
        for sample_id in pack:
            path, row = self._intake.place(sample_id)
            tasks.append((sample_id, path, row))
        try:
            return self._pool.submit(_encode_there, tasks)
        except BrokenProcessPool:  # it died between two packs
            raise _worker_died() from None

    def _result(self, future: Future[list[Outcome]]) -> list[Outcome]:
        try:
            outcomes = future.result()
        except BrokenProcessPool:
            raise _worker_died() from None
        return [one if isinstance(one, SampleError) else _restored(one) for one in outcomes]

    def _here(self, pack: list[int]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for sample_id in pack:
            source, row = self._intake.record(sample_id)
            outcomes.append(_encoded(source, row, self._setup[0]))
        return outcomes

    def _add(
        self,
        writer: ChunkWriter,
        pack: list[int],
        outcomes: list[Outcome],
        failed: dict[int, SampleError],
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


def _worker_died() -> InputError:
    return InputError(
        "a worker process of the producer died while it encoded",
        hint="see its output (perhaps memory ran out: use fewer workers); the same command goes on",
    )


def is_full(writer: ChunkWriter, full: tuple[int, int]) -> bool:
    """Has the chunk as many packs, or bytes, as it should?"""
    return writer.packs >= full[0] or writer.bytes >= full[1]


def _encoded(source: Source, row: int, template: Template) -> Outcome:
    """The encoded sample with what it carries, or why it cannot be encoded."""
    try:
        sample = source[row]
        encoded = dict(template.encode(sample))
    except SampleError as error:
        return error
    except (PacktrainError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _MACHINE:
            raise  # the sample is as good as before: a restart takes it
        logger.info("%s failed", source.where(row), exc_info=error)
        return SampleError("failed", f"{source.where(row)}: {type(error).__name__}: {error}")
    inner = getattr(source, "source", None)
    record = sample if inner is None else inner[row]
    if isinstance(record, Mapping):
        try:
            carry(record, encoded, source.where(row))
        except SampleError as error:
            return error
    return encoded


def _restored(values: Mapping[str, Value]) -> dict[str, Any]:
    return {name: restore(value.array, value.dtype, value.shape) for name, value in values.items()}


def _pickled(setup: tuple[Any, Any]) -> Parcel:
    try:
        return parcel(setup)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise InputError(
            f"the template or open_shard cannot go to a worker process: {error}",
            hint="use workers=1, or functions of a module",
        ) from None


# What a worker process holds.
_held: dict[str, Any] = {}


def _start(setup: Any) -> None:
    end_with_parent()
    _held["template"], _held["open"] = pickle.loads(setup)
    _held["sources"] = {}
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _encode_there(tasks: list[tuple[int, str, int]]) -> list[Any]:
    """In a worker: the samples of a pack as plain arrays (tensors would travel as open files)."""
    out: list[Any] = []
    for _, path, row in tasks:
        sources = _held["sources"]
        if path not in sources:
            sources[path] = _held["open"](Path(path))
            while len(sources) > _OPEN:
                del sources[next(iter(sources))]
        outcome = _encoded(sources[path], row, _held["template"])
        if not isinstance(outcome, SampleError):
            outcome = {name: read_value(value, name) for name, value in outcome.items()}
        out.append(outcome)
    return out
