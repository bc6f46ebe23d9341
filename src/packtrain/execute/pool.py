"""Worker processes for one function; what comes of their tasks is taken back in the order they were given.

    with closing(Pool(work, context, workers=4)) as pool:
        for value in pool.map(tasks): ...       # as `work(context, task)` for each task in this process

Workers come from a server that forks them (`workers`), never from this process: a child of it would
inherit the tokenizer's thread pool without its threads and hang, or a CUDA context it cannot use. Each has a
pipe and a thread here that waits for it, so workers are busy whatever this process does meanwhile, and one
that dies (out of memory, a crash in a native library) is noticed at once and the error names the task it was
at. At most a few tasks per worker are on the way, so memory does not grow with their number. An error is
raised at its task's turn: what was given before it is handed out. Values travel as plain bytes, for shared
memory would keep a file open for each tensor that waits. `TOKENIZERS_PARALLELISM` is left as it is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import InputError, described
from ..workers import Parcel, parcel, worker_context

#: Tasks per worker that may be given and not yet handed out.
AHEAD = 4

Work = Callable[[Any, Any], Any]


class Pool:
    """Processes, started one by one with the first tasks.

    Args:
        work: a module-level function; pure, so that it does not matter who runs it.
        context: what all tasks share (source and template); sent to each worker once.
        workers: processes; 0 = this one.
        ahead: tasks per worker that may be given and not yet handed out.
        name: what to call a task in messages.
        alone: the setting that does without workers, for hints.

    Raises:
        InputError: `work` or `context` cannot be sent to a worker, or this process may start none.
    """

    def __init__(
        self,
        work: Work,
        context: Any,
        workers: int,
        *,
        ahead: int = AHEAD,
        name: Callable[[Any], str] = repr,
        alone: str = "workers=1",
    ) -> None:
        self.workers = workers
        self._here, self._ahead = partial(work, context), ahead * workers
        option = alone.partition("=")[0]
        if workers and multiprocessing.current_process().daemon:
            raise InputError(
                f"{option} is {workers} in a worker of a loader, which cannot start processes",
                hint=f"use one of the two: {option}, or workers of the loader",
            )
        payload = packed(work, context, alone, parcel) if workers else Parcel()
        self._worker = partial(_Worker, payload, name, alone)
        self._begin()

    def _begin(self) -> None:
        self._hired: list[_Worker] = []
        self._tasks: SimpleQueue[tuple[Future[Any], Any] | None] = SimpleQueue()
        # Also when nobody closes: as the pool goes, or the interpreter ends.
        self._end = util.Finalize(self, _end, (self._hired, self._tasks), exitpriority=0)

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield what comes of each task, in order. Several may be under way.

        Raises:
            InputError: a worker died, or a task or what came of it cannot be pickled.
            Exception: whatever `work` raised, with its type; the task and the worker's traceback are in its
                notes.
        """
        return self._mapped(tasks) if self.workers else map(self._here, tasks)

    def _mapped(self, tasks: Iterable[Any]) -> Iterator[Any]:
        for _, future in in_order(tasks, self._submit, self._ahead):
            yield future.result()

    def _submit(self, task: Any) -> Future[Any]:
        if not self._end.still_active():  # closed, and used again
            self._begin()
        if len(self._hired) < self.workers:
            self._hired.append(self._worker(self._tasks, self.workers))
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """End the workers, whatever they are at. Also of a pool that goes as the interpreter ends."""
        self._end()


def in_order(
    tasks: Iterable[Any], submit: Callable[[Any], Future[Any]], ahead: int
) -> Iterator[tuple[Any, Future[Any]]]:
    """Each task with what will come of it, in order; `ahead` are given before the first is handed out."""
    given: deque[tuple[Any, Future[Any]]] = deque()
    try:
        for task in tasks:
            given.append((task, submit(task)))
            if len(given) >= ahead:
                yield given.popleft()
        while given:
            yield given.popleft()
    finally:
        for _, future in given:
            future.cancel()


# --------------------------------------------------------------------------------------------
# A worker, as its process is seen from here
# --------------------------------------------------------------------------------------------
class _Worker:
    """A process, and the thread that hands it one task after another."""

    def __init__(
        self, payload: Parcel, name: Callable[[Any], str], alone: str, tasks: SimpleQueue[Any], crowd: int
    ) -> None:
        context: Any = worker_context()
        self._name, self._alone = name, alone
        self._death: InputError | None = None
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, payload))
        self.process.start()
        theirs.close()
        self.thread = threading.Thread(target=self._tend, args=(tasks, crowd), daemon=True)
        self.thread.start()

    def _tend(self, tasks: SimpleQueue[tuple[Future[Any], Any] | None], crowd: int) -> None:
        """Hand out tasks until there is a None; a second one ahead while more than `crowd` wait."""
        given: deque[tuple[Future[Any], Any]] = deque()
        while True:
            if not given or (len(given) == 1 and tasks.qsize() > crowd):
                with contextlib.suppress(Empty):  # another worker was faster
                    item = tasks.get(block=not given)
                    if item is None:
                        break
                    if item[0].set_running_or_notify_cancel() and self._send(*item):
                        given.append(item)
                    continue
            future, task = given.popleft()
            try:
                future.set_result(self._value(self._name(task)))
            except Exception as error:
                future.set_exception(error)
        self._pipe.close()

    def _send(self, future: Future[Any], task: Any) -> bool:
        try:
            sent = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            why = f"{self._name(task)} cannot be sent to a worker process: {described(error)}"
            future.set_exception(InputError(why, hint=f"it has to be picklable; or set {self._alone}"))
            return False
        with contextlib.suppress(OSError):  # it died, which is told where its answer is waited for
            self._pipe.send_bytes(sent)
        return True

    def _value(self, name: str) -> Any:
        made = b""
        with contextlib.suppress(EOFError, OSError):
            wait([self._pipe, self.process.sentinel])
            made = self._pipe.recv_bytes() if self._pipe.poll() else b""
        if made:
            return value_of(made, name)
        if self._death is None:
            self._death = self._died(name)
        raise self._death

    def _died(self, name: str) -> InputError:
        self.process.join(5)
        code = self.process.exitcode
        how, hint = f"exit code {code}", f"run it with {self._alone} to see the cause"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(-code).name}"
        if code == -getattr(signal, "SIGKILL", 9):
            hint = f"most likely out of memory: use fewer {self._alone.partition('=')[0]}"
        return InputError(f"a worker died on {name} ({how})", hint=hint)


def _end(hired: list[_Worker], tasks: SimpleQueue[Any]) -> None:
    for worker in hired:
        tasks.put(None)
        worker.process.terminate()
    for worker in hired:
        worker.process.join(5)
        worker.process.kill()
        worker.process.join()
        if worker.thread is not threading.current_thread():  # garbage may be collected anywhere
            worker.thread.join()


# --------------------------------------------------------------------------------------------
# What is sent there, and back
# --------------------------------------------------------------------------------------------
def packed(
    work: Work, context: Any, alone: str = "workers=1", make: Callable[[Any], Any] = pickle.dumps
) -> Any:
    """Pickle once, in the parent, where a failure can be explained."""
    try:
        return make((work, context))
    except Exception as error:
        parts = context if isinstance(context, tuple) else (context,)
        named = ", ".join(type(part).__name__ for part in (work, *parts) if not _pickles(part))
        raise InputError(
            f"{named or 'the work'} cannot be sent to a worker process: {described(error)}",
            hint=f"set {alone}, or define it at module level without open files, locks, lambdas or a model",
        ) from error


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True


def _serve(pipe: Connection, payload: bytes) -> None:
    """Worker process: tasks until the pipe closes; `payload` holds the work."""
    tasks: SimpleQueue[bytes | None] = SimpleQueue()
    loaded: tuple[Work, Any] | None = None

    def read() -> None:
        """Beside the work: who sends a second task while an answer is on its way must not wait for ever."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(pipe.recv_bytes())
        tasks.put(None)

    def done(task: bytes) -> Any:
        nonlocal loaded, payload
        if loaded is None:
            loaded, payload = pickle.loads(payload), b""
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(1)  # as loaders do: processes are what runs side by side
        return loaded[0](loaded[1], pickle.loads(task))

    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(OSError, KeyboardInterrupt):
        for one in iter(tasks.get, None):
            pipe.send_bytes(answer(done, one))


def answer(work: Callable[..., Any], *given: Any) -> bytes:
    """What comes of a call, or why nothing does, for `value_of` in another process."""
    try:
        value = work(*given)
    except Exception as error:
        return _failure(error)
    try:
        return pickle.dumps((value, None, ""), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return _failure(f"what came of it cannot be pickled: {described(error)}")


def _failure(error: Exception | str) -> bytes:
    """An exception as bytes; only its text where it cannot be rebuilt on the other side."""
    trace = traceback.format_exc()
    try:
        made = pickle.dumps((None, error, trace))
        pickle.loads(made)
    except Exception:
        return pickle.dumps((None, f"{type(error).__name__}: {error}", trace))
    return made


def value_of(answer: bytes, name: str) -> Any:
    """What the `answer` to a task holds: a value, or the exception that is raised here."""
    value, error, trace = pickle.loads(answer)
    if error is None:
        return value
    if isinstance(error, str):  # it could not be sent; only its text came
        raise InputError(f"{name} failed in a worker: {error}", hint=f"the worker said: {trace}")
    error.add_note(f"in a worker process, {name}:\n{trace}")
    raise error
