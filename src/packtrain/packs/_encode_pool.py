"""Encoding in several processes with the order kept: what comes out is what one process would give.

Samples are handed out as they come and taken back in the same order; at most a few for each worker are on the
way, so memory is bounded. A worker's error is raised at its sample's turn, a worker that dies within
seconds, both with the sample's id. Workers are spawned: tokenizers do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..errors import InputError, PacktrainError, SampleError, described
from ..workers import end_with_parent, worker_context

#: Samples of one worker that may be on the way.
_AHEAD = 8

Item = tuple[int, int, Any]  # place, sample id, sample
Encoded = tuple[int, int, Any]  # place, sample id, encoded sample or SampleError

_encode: Callable[[Any], Any] | None = None


class EncodePool:
    """Encodes for every split of a reader.

    Args:
        encode: None = the samples are encoded already.
        workers: processes, started at the first sample; 0 = this one.
    """

    def __init__(self, encode: Callable[[Any], Any] | None, workers: int) -> None:
        self.encode, self.workers = encode, 0 if encode is None else workers
        self._pool: ProcessPoolExecutor | None = None

    def encoded(self, items: Iterator[Item]) -> Iterator[Encoded]:
        """(place, id, encoded sample, or why there is none as a SampleError) for every item, in order.

        None and nothing are `empty`, what is raised and no SampleError is `encode_failed`.

        Raises:
            InputError: `encode` cannot be sent to a worker, or a worker died.
        """
        encode = self.encode
        if self.workers == 0:
            for place, sample_id, sample in items:
                plain = encode is None and type(sample) is dict and sample  # spares a call
                yield place, sample_id, dict(sample) if plain else _one(encode, sample_id, sample)
            return
        pool = self._started()
        waiting: deque[tuple[int, int, Future[Any]]] = deque()
        try:
            for place, sample_id, sample in items:
                waiting.append((place, sample_id, pool.submit(_work, sample_id, sample)))
                if len(waiting) >= _AHEAD * self.workers:
                    yield _taken(*waiting.popleft())
            while waiting:
                yield _taken(*waiting.popleft())
        except BrokenProcessPool as error:
            ids = ", ".join(str(sample_id) for _, sample_id, _ in list(waiting)[:4]) or "the last one"
            raise InputError(
                f"an encode worker died while it had samples around {ids}",
                hint="it was killed (out of memory?) or crashed in native code; use fewer encode_workers",
            ) from error
        finally:
            for _, _, future in waiting:
                future.cancel()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            assert self.encode is not None  # there are no workers else
            _refuse_unusable(self.encode, self.workers)
            self._pool = ProcessPoolExecutor(
                self.workers, mp_context=worker_context(), initializer=_start, initargs=(self.encode,)
            )
        return self._pool

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _taken(place: int, sample_id: int, future: Future[Any]) -> Encoded:
    try:
        return place, sample_id, future.result()
    except BrokenProcessPool as error:
        raise InputError(
            f"an encode worker died at sample {sample_id}",
            hint="it was killed (out of memory?) or crashed in a native library; use fewer encode_workers",
        ) from error
    except PacktrainError:
        raise
    except Exception as error:
        raise InputError(
            f"sample {sample_id} cannot go to an encode worker or back: {described(error)}",
            hint="samples and encoded samples have to be picklable, or use encode_workers=0",
        ) from error


def _refuse_unusable(encode: Callable[[Any], Any], workers: int) -> None:
    if multiprocessing.current_process().daemon:
        raise InputError(
            f"encode_workers is {workers} in a worker of a loader, which cannot start processes",
            hint="use one of the two: encode_workers, or workers of the loader",
        )
    try:
        ForkingPickler.dumps(encode)
    except Exception as error:
        raise InputError(
            f"the template cannot be sent to encode_workers: {described(error)}",
            hint="pass a template or a function of a module (no lambda), or encode_workers=0",
        ) from error


def _start(encode: Callable[[Any], Any]) -> None:
    global _encode
    end_with_parent()
    _encode = encode


def _work(sample_id: int, sample: Any) -> Any:
    return _one(_encode, sample_id, sample)


def _one(encode: Callable[[Any], Any] | None, sample_id: int, sample: Any) -> Any:
    if isinstance(sample, SampleError):  # it could not be read
        return sample
    try:
        made = sample if encode is None else encode(sample)
        return dict(made) if made else SampleError("empty", "it was encoded to nothing")
    except SampleError as error:
        return error
    except PacktrainError:
        raise
    except Exception as error:
        return SampleError(
            "encode_failed",
            f"cannot be encoded: {described(error)}",
            hint="on_error='skip' leaves such samples out and writes them down",
        )
