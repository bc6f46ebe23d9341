"""Worker processes that start side by side and light: one server imports once, then forks them.

    DataLoader(data, num_workers=8, multiprocessing_context=worker_context())
    start_early(template)      # the server imports while a model loads

Spawned workers start one after another: each reads what it is sent only after it has imported torch and
transformers. Here a server process of our own imports what workers need, reads heavy objects (tokenizers,
processors, templates) once, and forks: a worker is there within some hundredths of a second, and shares their
memory. It is not the server of `multiprocessing.get_context("forkserver")`, whose settings stay the user's.

What makes a fork safe: the server runs no code of the user's script, holds no CUDA context, and has one
thread when it forks, which is looked at (a lock that another thread holds would stay held in the worker).
Where that fails, or the platform has no fork server, workers are spawned. A worker gets the environment of
the moment it is started in, imports the script only where what it is sent is defined there, and ends with
its parent.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import importlib
import io
import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import process, reduction, spawn, util
from multiprocessing.context import BaseContext, set_spawning_popen
from pathlib import Path
from typing import Any

from .errors import InputError
from .files import make_folder, private_folder, publish, publish_text, remove_tree
from .world import environment, environment_for_children, take_environment

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# Worker processes that start side by side and light: one server imports once, then forks them
# --------------------------------------------------------------------------------------------
#: Names of classes, own or inherited, whose objects are read once by the server: they take long to unpickle.
_HEAVY = {"HFTemplate", "PreTrainedTokenizerBase", "ProcessorMixin"}
#: The server imports nothing else: another package may do anything when it is imported.
_ROOTS = {"packtrain", "torch", "torchvision", "transformers", "tokenizers", "numpy", "PIL"}
_EDGE = re.compile(r"packtrain\.(cli|hosts|pipeline|train|report|testing)\b")  # what no worker needs
_ASKED = "PACKTRAIN_WORKER_SERVER"  # tells the server its folder
#: Threads that their library ends before a fork and starts after it: jemalloc's, which pyarrow brings.
_FORK_SAFE = {"jemalloc_bg_thd"}
_FILES = 240  # a fork server hands over up to 256 descriptors, some of them its own

_is_own = False
_lock = threading.RLock()
_files: tuple[int, Path] | None = None  # process, its folder
_server: Any = None
_warm: dict[str, Any] = {}  # in the server and its workers: heavy objects by digest
_told: set[str] = set()
_now = threading.local()


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """This process is a command of packtrain's own: its garbage collection may be set for what it does."""
    global _is_own
    _is_own = True
    try:
        yield
    finally:
        _is_own = False
        gc.unfreeze()


def freeze(is_worker: bool) -> None:
    """Take what is there out of garbage collection, in processes of our own: workers, and `own_process`.

    Samples of a stream wait by the thousands, and collections for them go through all of torch and the model.
    """
    if _is_own and not is_worker:
        gc.collect()  # what is garbage by now would stay
    if _is_own or is_worker:
        gc.freeze()


def worker_context() -> BaseContext:
    """How worker processes start: forked by the server, else spawned. For `DataLoader` and process pools."""
    return _CONTEXT


def start_early(*objects: Any) -> None:
    """Let the server import and read what workers will need, in the background; safe to call at any time.

    Args:
        objects: what workers will be sent, such as a template. What cannot be sent is left to them.
    """
    try:
        with _lock:
            _server_for(parcel(objects))
    except Exception as error:  # told where a worker is really sent it
        logger.debug("workers are not prepared early: %s", error)


@contextlib.contextmanager
def one_start() -> Iterator[None]:
    """Around the start of several workers that get the same objects: each heavy one is pickled once."""
    _now.digests = {}
    try:
        yield
    finally:
        _now.digests = None


class Parcel:
    """An object for workers of this process, pickled once: what they are sent arrives as `bytes`.

    Attributes:
        body: what `pickle.loads` makes the object of.
        heavy: digests of the heavy parts; their bytes lie in `_folder()`.
        modules: where its classes and functions are defined.
        script: names that are defined in the main module.
    """

    def __init__(self) -> None:
        self.body = b""
        self.heavy: set[str] = set()
        self.modules: set[str] = set()
        self.script: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (self.body,)

    def add(self, other: Parcel) -> None:
        self.heavy |= other.heavy
        self.modules |= other.modules
        self.script += other.script


class _Pickler(reduction.ForkingPickler):
    def __init__(self, file: Any, into: Parcel) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._into = into

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)
        named = value if hasattr(value, "__qualname__") else kind
        module = getattr(named, "__module__", None)
        if module == "__main__":
            self._into.script.append(named.__qualname__)
        elif isinstance(module, str):
            self._into.modules.add(module)
        if isinstance(value, Parcel):
            self._into.add(value)
        if isinstance(value, type) or _HEAVY.isdisjoint(one.__name__ for one in kind.__mro__):
            return NotImplemented
        known = getattr(_now, "digests", None)
        digest = None if known is None else known.get(id(value))
        if digest is None:
            body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            digest = hashlib.blake2b(body, digest_size=16).hexdigest()
            if not (_folder() / digest).exists():
                with publish(_folder() / digest) as out:
                    out.write(body)
            if known is not None:
                known[id(value)] = digest
        self._into.heavy.add(digest)
        return _heavy, (digest, str(_folder() / digest))


def parcel(value: Any) -> Parcel:
    """Pickle `value` for workers; its heavy parts are read by the server.

    Raises:
        Exception: whatever pickling it raises.
    """
    into, file = Parcel(), io.BytesIO()
    _Pickler(file, into).dump(value)
    into.body = file.getvalue()
    return into


def _heavy(digest: str, path: str) -> Any:
    """In a worker: the object that the server read; a spawned worker reads it itself."""
    if digest not in _warm:
        _warm[digest] = pickle.loads(Path(path).read_bytes())
    return _warm[digest]


def _folder() -> Path:
    """The files of this process for its workers; they go with it."""
    global _files
    if _files is None or _files[0] != os.getpid():
        path = private_folder(f"workers-{os.getpid()}-{time.time_ns()}")
        _files = os.getpid(), path
        util.Finalize(None, remove_tree, (path,), exitpriority=-100)
    return _files[1]


# ---------------------------------------------------------------------------------------- the server
def _read_in_server() -> None:
    """In the server, before it forks: import and read what was asked for; say which threads run then."""
    asked = environment().get(_ASKED)
    if asked is None:
        return
    folder = Path(asked)
    task = json.loads((folder / "asked.json").read_text())
    for name in task["modules"]:
        with contextlib.suppress(Exception):  # the worker that needs it says why
            importlib.import_module(name)
    for digest, path in task["heavy"].items():
        with contextlib.suppress(Exception):
            _heavy(digest, path)
    publish_text(folder / "threads", ", ".join(_other_threads()))


def _other_threads() -> list[str]:
    """Names of the threads besides the main one that could hold a lock when this process forks."""
    tasks = Path("/proc/self/task")
    try:
        others = [one for one in tasks.iterdir() if one.name != str(os.getpid())]
        names = [(one / "comm").read_text().strip() for one in others]
    except OSError:  # no Linux: those that Python knows
        names = [one.name for one in threading.enumerate() if one is not threading.main_thread()]
    return sorted(name for name in names if name not in _FORK_SAFE)


class _Unusable(Exception):
    """Workers cannot be forked from this server."""


class _Call:
    """Unpickled it is what a function gives."""

    def __init__(self, function: Any, *given: Any) -> None:
        self._call = function, given

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _Light:
    """A process object for a worker that is spawned: it reads heavy parts from their files.

    What is sent fits into a pipe then, so that the next worker is started while this one imports.
    """

    def __init__(self, worker: Any) -> None:
        self._worker, self._name = worker, worker._name

    def __reduce__(self) -> tuple[Any, ...]:
        return _started, (environment(), parcel(self._worker).body)


def _started(variables: dict[str, str], body: bytes) -> Any:
    take_environment(variables)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # else each fork of the server would draw the same; `random` sees to it itself
    return pickle.loads(body)


class _Nobody:
    """In place of a process object: ends at once."""

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        return 0


def _close(*descriptors: int) -> None:
    for one in descriptors:
        os.close(one)


def _end_with_parent() -> None:
    """In a worker: it ends when its parent is gone, however that one went, and leaves Ctrl-C to it.

    One that waits for work, or is at a long task, would stay in memory with the processor it holds.
    """
    with contextlib.suppress(ValueError, OSError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="packtrain-parent", daemon=True).start()


def check_script(names: list[str]) -> None:
    """Refuse what a worker could not find: it would import the script again, from its first line.

    Raises:
        InputError: the script has no main guard, or is no file.
    """
    main = sys.modules["__main__"]
    what, file = ", ".join(dict.fromkeys(names)), getattr(main, "__file__", None)
    if file is None:
        raise InputError(
            f"{what} is defined in this session, where a worker process cannot import it",
            hint="move it to a module (a .py file), or use no workers",
        )
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):  # no script in Python's words: the worker finds out
        return
    tests = [part for node in tree.body if isinstance(node, ast.If) for part in ast.walk(node.test)]
    if not any(isinstance(part, ast.Name) and part.id == "__name__" for part in tests):
        raise InputError(
            f"workers need {what} from {file}, and would run that script again to import it",
            hint='put what it does under `if __name__ == "__main__":`, or move it to a module',
        )


try:
    from multiprocessing import forkserver, popen_forkserver, popen_spawn_posix
except ImportError:  # no POSIX: workers are spawned
    forkserver = None  # type: ignore[assignment]
    _CONTEXT: BaseContext = multiprocessing.get_context("spawn")
else:

    class _Server(forkserver.ForkServer):
        """The process that forks; `heavy` are the digests of the objects it read."""

        _forkserver_pid: int | None
        _forkserver_alive_fd: int | None

        def __init__(self, heavy: set[str], modules: set[str]) -> None:
            super().__init__()
            self.owner, self.heavy = os.getpid(), heavy
            self._checked = False
            self.folder = _folder() / f"server-{time.monotonic_ns()}"
            make_folder(self.folder)
            task = {"modules": sorted(modules), "heavy": {one: str(_folder() / one) for one in sorted(heavy)}}
            publish_text(self.folder / "asked.json", json.dumps(task))
            self.set_forkserver_preload([__name__])
            path = os.pathsep.join(one for one in sys.path if one)
            # OpenBLAS starts threads as numpy is imported, and CUDA as some package looks for a card.
            threads = {"OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            own = {_ASKED: str(self.folder), "PYTHONPATH": path, **threads}
            with environment_for_children(own):
                self.ensure_running()

        @property
        def is_alive(self) -> bool:
            if self._forkserver_pid is None or self.owner != os.getpid():
                return False
            with contextlib.suppress(ChildProcessError):
                return os.waitpid(self._forkserver_pid, os.WNOHANG)[0] == 0
            return False

        def fork(self, head: bytes, body: bytes, files: list[int]) -> tuple[int, int, int]:
            """(sentinel, pid, descriptor whose end a worker sees when its parent is gone).

            Raises:
                _Unusable: the server is gone.
            """
            if not self.is_alive:
                raise _Unusable("it ended")
            sentinel, pipe = self.connect_to_new_process(files)
            kept = os.dup(pipe)
            try:
                try:
                    rest = memoryview(head + body)
                    while rest:
                        rest = rest[os.write(pipe, rest) :]
                finally:
                    os.close(pipe)
                return sentinel, forkserver.read_signed(sentinel), kept
            except (EOFError, BrokenPipeError) as error:
                _close(sentinel, kept)
                raise _Unusable("it ended") from error

        def check(self) -> None:
            """Wait until it may fork.

            Raises:
                _Unusable: it died, or another thread runs in it.
            """
            if self._checked:
                return
            sentinel, _, kept = self.fork(pickle.dumps({}), pickle.dumps(_Nobody()), [])
            _close(sentinel, kept)
            try:
                threads = (self.folder / "threads").read_text()
            except OSError:
                raise _Unusable("it could not import packtrain") from None
            if threads:
                raise _Unusable(f"other threads run in it ({threads})")
            self._checked = True

        def let_go(self) -> None:
            """It ends when its last worker has."""
            if self.owner == os.getpid() and self._forkserver_alive_fd is not None:
                os.close(self._forkserver_alive_fd)
                self._forkserver_alive_fd = None

    class _Popen(popen_forkserver.Popen):
        _fds: list[int]

        def _launch(self, worker: Any) -> None:
            set_spawning_popen(self)
            try:
                job = parcel(worker)
                if job.script:
                    check_script(job.script)
                prepared = spawn.get_preparation_data(worker._name)
                if not job.script:
                    prepared.pop("init_main_from_name", None)
                    prepared.pop("init_main_from_path", None)
                head = pickle.dumps(prepared)
            finally:
                set_spawning_popen(None)
            if len(self._fds) > _FILES:
                raise _Unusable(f"{len(self._fds)} files go to a worker")
            server = _server_for(job)
            server.check()
            begin = pickle.dumps(_Call(_started, environment(), job.body))
            self.sentinel, self.pid, kept = server.fork(head, begin, self._fds)
            self.finalizer = util.Finalize(self, _close, (kept, self.sentinel))

    class _Worker(process.BaseProcess):
        _start_method = "forkserver"

        @staticmethod
        def _Popen(worker: Any) -> Any:
            with _lock:
                try:
                    return _Popen(worker)
                except _Unusable as why:
                    if str(why) not in _told:
                        _told.add(str(why))
                        logger.warning("workers are spawned one by one, not forked by a server: %s", why)
            light: Any = _Light(worker)
            return popen_spawn_posix.Popen(light)

        def run(self) -> None:
            _end_with_parent()
            super().run()

    class _Context(BaseContext):
        _name = "forkserver"
        Process = _Worker

    _CONTEXT = _Context()


def _server_for(job: Parcel) -> Any:
    """The server that read the heavy parts of `job`: the one there is, or another."""
    global _server
    needed = job.heavy
    if _server is not None and _server.is_alive and needed <= _server.heavy:
        return _server
    if _server is not None:
        _server.let_go()
    loaded = {name for name in sys.modules if name.startswith("packtrain.") and not _EDGE.match(name)}
    modules = {name for name in job.modules | loaded if name.partition(".")[0] in _ROOTS}
    _server = _Server(needed, modules)
    return _server


_read_in_server()
