"""Ordered map over shards in this process or in worker processes.

Workers come from a server that forks them (`workers`), never from this process: a child of it would
inherit the tokenizer's thread pool without its threads and hang, or a CUDA context it cannot use. Each
worker has a pipe of its own, so a worker that dies (out of memory, a crash in a native library) is noticed
at once and the error names the shard it was working on. Results come in shard order whatever finishes
first; at most a few shards per worker are in flight, so memory does not grow with the number of shards.
`TOKENIZERS_PARALLELISM` is left as it is.

Trade-off: the server of workers starts in some seconds, so one worker means this very process, without any
start-up.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ..checks import whole
from ..errors import InputError, described
from ..workers import Parcel, parcel, worker_context

#: Shards per worker that may be finished and not yet handed out.
AHEAD = 4

Work = Callable[[Any, Any], Any]


def available_cpus() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_shards(
    work: Work, shards: Iterable[Any], *, workers: int | None = None, context: Any = None
) -> Iterator[Any]:
    """Yield `work(context, shard)` for each shard, in order.

    Args:
        work: a module-level function; pure, so that it does not matter who runs it.
        shards: small picklable values, for example (start, stop) ranges of ids.
        workers: processes; 1 = this process, None = one per CPU.
        context: what all shards share (source and template); sent to each worker once.

    Raises:
        InputError: `work` or `context` cannot be sent to a worker, a worker died, or `workers` < 1.
        Exception: whatever `work` raised, with its type; the shard and the worker's traceback are
            in its notes.
    """
    todo = list(shards)
    count = whole("workers", available_cpus() if workers is None else workers, 1)
    if count == 1 or len(todo) <= 1:
        return _serial(work, todo, context)
    return _parallel(packed(work, context, parcel), todo, min(count, len(todo)))


def _serial(work: Work, shards: Sequence[Any], context: Any) -> Iterator[Any]:
    for shard in shards:
        yield work(context, shard)


def packed(work: Work, context: Any, make: Callable[[Any], Any] = pickle.dumps) -> Any:
    """Pickle once, in the parent, where a failure can be explained."""
    try:
        return make((work, context))
    except Exception as error:
        parts = context if isinstance(context, tuple) else (context,)
        named = ", ".join(type(part).__name__ for part in (work, *parts) if not _pickles(part))
        raise InputError(
            f"{named or 'the work'} cannot be sent to a worker process: {described(error)}",
            hint="set workers=1, or define it at module level without open files, locks, lambdas or a model",
        ) from error


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True


class _Worker:
    """One spawned process and our end of its pipe."""

    def __init__(self, payload: Parcel) -> None:
        context: Any = worker_context()
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, payload), daemon=True)
        self.process.start()
        theirs.close()
        self.shard: int | None = None

    def send(self, number: int, shard: Any) -> None:
        self.shard = number
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # death is noticed in wait()
            self.pipe.send((number, shard))

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        self.process.close()


def in_order(
    count: int,
    slots: int,
    ahead: int,
    submit: Callable[[int], None],
    finished: Callable[[], Iterable[tuple[int, Any]]],
) -> Iterator[Any]:
    """The results of shards 0 … count - 1, in order, whoever finishes first.

    Args:
        slots: shards that are worked on at a time.
        ahead: shards that may be submitted and not yet handed out.
        submit: gives a shard to a worker.
        finished: waits for the next results: numbers of shards, each with its result.
    """
    done: dict[int, Any] = {}
    given = handed = 0
    while handed < count:
        while given - handed - len(done) < slots and given < min(count, handed + ahead):
            submit(given)
            given += 1
        while handed in done:
            yield done.pop(handed)
            handed += 1
        if given - handed > len(done):
            done.update(finished())


def _parallel(payload: Parcel, shards: Sequence[Any], count: int) -> Iterator[Any]:
    workers: list[_Worker] = []

    def submit(number: int) -> None:
        next(worker for worker in workers if worker.shard is None).send(number, shards[number])

    def finished() -> list[tuple[int, Any]]:
        busy = [worker for worker in workers if worker.shard is not None]
        return [_receive(worker, shards) for worker in _ready(busy)]

    try:
        for _ in range(count):
            workers.append(_Worker(payload))
        yield from in_order(len(shards), count, AHEAD * count, submit, finished)
    finally:
        for worker in workers:
            worker.stop()


def _ready(busy: list[_Worker]) -> list[_Worker]:
    """Workers with an answer, or dead; waits for the first."""
    owners: dict[Any, _Worker] = {worker.pipe: worker for worker in busy}
    owners.update({worker.process.sentinel: worker for worker in busy})
    found = {id(owners[item]): owners[item] for item in wait(list(owners))}
    return list(found.values())


def _receive(worker: _Worker, shards: Sequence[Any]) -> tuple[int, Any]:
    shard = shards[worker.shard if worker.shard is not None else 0]
    try:
        if not worker.pipe.poll():
            raise EOFError
        number, ok, value, trace = worker.pipe.recv()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        raise _death(worker, shard) from None
    worker.shard = None
    return number, _result(ok, value, trace, shard)


def answer_of(answer: bytes, shard: Any) -> Any:
    """What a worker's answer holds: a value, or the exception that is raised here."""
    _, ok, value, trace = pickle.loads(answer)
    return _result(ok, value, trace, shard)


def _result(ok: bool, value: Any, trace: str, shard: Any) -> Any:
    if ok:
        return value
    if not isinstance(value, BaseException):  # it could not be sent; only its text came
        raise InputError(f"shard {shard!r} failed in a worker: {value}", hint=f"the worker said: {trace}")
    value.add_note(f"in a worker process, shard {shard!r}:\n{trace}")
    raise value


def _death(worker: _Worker, shard: Any) -> InputError:
    worker.process.join(5)
    code = worker.process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            how = f"killed by {signal.Signals(-code).name}"
    hint = "run it with workers=1 to see the cause"
    if code == -getattr(signal, "SIGKILL", 9):
        hint = "most likely out of memory: use fewer workers"
    return InputError(f"a worker died on {shard_name(shard)} ({how})", hint=hint)


def shard_name(shard: Any) -> str:
    """What to call a shard in messages."""
    if isinstance(shard, tuple) and len(shard) == 2 and all(isinstance(edge, int) for edge in shard):
        return f"ids {shard[0]} to {shard[1] - 1}"
    return f"shard {shard!r}"


def _serve(pipe: Connection, payload: bytes) -> None:
    """Worker process: shards until the pipe closes; `payload` holds the work."""
    with contextlib.suppress(ValueError, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops us
    loaded: tuple[Work, Any] | None = None
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            number, shard = pipe.recv()
            try:
                if loaded is None:
                    loaded = pickle.loads(payload)
                    payload = b""
                answer = pickle.dumps((number, True, loaded[0](loaded[1], shard), ""))
            except Exception as error:
                answer = failure_of(number, error)
            pipe.send_bytes(answer)


def failure_of(number: int, error: Exception) -> bytes:
    """An exception as bytes; only its text where it cannot be rebuilt on the other side."""
    trace = traceback.format_exc()
    try:
        answer = pickle.dumps((number, False, error, trace))
        pickle.loads(answer)
    except Exception:
        return pickle.dumps((number, False, f"{type(error).__name__}: {error}", trace))
    return answer
