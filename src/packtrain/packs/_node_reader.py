"""Readers of a node that share one pass over an iterable: a process reads it and feeds them.

An iterable has no index, so each of R readers passes by the samples of the others, and the source is read R
times. A reader begins by itself and measures; where passing by a sample costs more than sending one from
process to process, and took `WORTH_S` already, it goes on with what the node's server (`_node_server`) sends.
Whether and when changes nothing: samples and places are those of reading by itself, to which a reader comes
back, with one warning, where the server cannot be used or is gone.

Readers meet at a socket whose name says the launch, the pass and the source's values, or, of one rank's
loader workers, the stream and the source's bytes. The first one there starts the server. A reader believes it
only if the first samples are those that it has read itself. The server is no worker of a `Pool`: it serves
processes that did not start it, and outlives the one that did.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from multiprocessing import spawn
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from ..errors import InputError, described
from ..files import digest_json, private_folder
from ..workers import check_script
from ..world import environment, node
from ._iterable import FIRST, Places, Wanted, mark
from ._readers import IterableReader, Reader, is_indexed

logger = logging.getLogger(__name__)

WORTH_S = 1.0  # spent on samples of others before a reader asks for the server
_START_S = 30.0  # that a server may take until it answers
_LARGEST = 16 << 20  # bytes of a pickled source: one that holds more has its samples in memory

_started: list[Any] = []  # servers of this process
_told: set[str] = set()


class _Unfed(Exception):
    """The server cannot be used, or not any more."""


def node_reader(stream: Any) -> Any:
    """The reader of a stream, or one that shares its passes where several of this node read an iterable."""
    reader, on, here = stream.reader, node(stream.place), Reader.here(stream.place)
    if not isinstance(reader, IterableReader) or on.size * here.workers == 1 or os.name != "posix":
        return reader
    parts = getattr(reader.source, "sources", None)
    if isinstance(parts, Mapping) and any(map(is_indexed, parts.values())):
        return reader  # of a mixture: what has an index is read by nobody but who wants it
    if on.size == 1:
        return NodeReader(reader.source, stream.name, of_one_rank=True)
    place = [on.launch, on.index, type(reader.source).__qualname__]
    told = [stream.spec.to_dict(), stream.seed, stream.shuffle_buffer, stream.epoch, stream.passes]
    if stream.source_mark is None:  # before it is read: sources may count what they gave
        stream.source_mark = ""
        with contextlib.suppress(Exception):  # told where it matters
            stream.source_mark = mark(reader.source, _Limited()).hex()
    return NodeReader(reader.source, digest_json([*place, *told, stream.source_mark]), of_one_rank=False)


class NodeReader(IterableReader):
    """Args:
    meeting: names the readers that read together.
    of_one_rank: they have the same source, to the byte.
    """

    is_costly = False  # passing by a sample takes longer than sending one

    def __init__(self, source: Any, meeting: str, *, of_one_rank: bool) -> None:
        super().__init__(source)
        self.meeting, self.of_one_rank = meeting, of_one_rank
        self._source: bytes | str | None = None  # pickled before it was read, or why it cannot be
        self._seen: dict[int, list[bytes]] = {}  # epoch -> marks of its first samples
        self._kept: Connection | None = None
        self._passed, self._passed_s = 0, 0.0
        self._is_alone = False  # it reads by itself, whatever that costs

    def taken(self, epoch: int, wanted: Wanted) -> Iterator[tuple[int, Any]]:
        self._source = self._source or _pickled(self.source)
        after: int | None = -1
        while after is not None:
            if self.is_costly and not self._is_alone:
                fed = self._fed(epoch, wanted, after)
                try:
                    for after, sample in fed:
                        yield after, sample
                    return
                except _Unfed as why:
                    self._go_alone(str(why))
            after = yield from self._by_itself(epoch, wanted, after)

    def _by_itself(
        self, epoch: int, wanted: Wanted, after: int
    ) -> Generator[tuple[int, Any], None, int | None]:
        """What this reader wants behind a place; returns where it would rather be fed, None at the end."""
        clock, place = time.perf_counter, -1
        begun = clock()

        def used(at: int) -> bool:  # wanted places behind one, and the first ones of the source
            return at < FIRST or (at > after and wanted(at))

        for place, sample in enumerate(self.passed(epoch, used)):
            if place <= after:
                continue
            if place < FIRST:
                self._see(epoch, place, sample)
            if wanted(place):
                yield place, sample
                begun = clock()
            elif not self._is_alone:
                now = clock()
                self._passed, self._passed_s, begun = self._passed + 1, self._passed_s + now - begun, now
                if self._passed_s > WORTH_S and self._is_worth(sample):
                    return place
        self.check_length(wanted, place + 1)
        return None

    def _see(self, epoch: int, place: int, sample: Any) -> None:
        seen = self._seen.setdefault(epoch, [])
        if place == len(seen):
            with contextlib.suppress(Exception):  # told where it matters
                seen.append(mark(sample))

    def _is_worth(self, sample: Any) -> bool:
        """Does passing by a sample cost more than sending one?"""
        begun = time.perf_counter()
        try:
            pickle.loads(pickle.dumps(sample, pickle.HIGHEST_PROTOCOL))
        except Exception as error:
            self._go_alone(f"a sample cannot be pickled ({described(error)})")
            return False
        self.is_costly = self._passed_s / self._passed > time.perf_counter() - begun
        self._passed, self._passed_s = 0, 0.0
        return self.is_costly

    def _go_alone(self, why: str) -> None:
        self._is_alone = True
        if why not in _told:
            _told.add(why)
            logger.warning("each reader of this node reads the source by itself: %s", why)

    def _fed(self, epoch: int, wanted: Wanted, after: int) -> Iterator[tuple[int, Any]]:
        """What the server sends of the places behind `after`.

        Raises:
            _Unfed: it cannot, or not any more.
        """
        pipe = self._joined(epoch, wanted, after)
        try:
            self.let_go()
            seen = self._seen.get(epoch, ())
            pipe.send("first")
            if any(one != other for one, other in zip(seen, pipe.recv(), strict=False)):
                raise _Unfed("the process that reads it for all gets other samples")
            pipe.send("next")
            while True:
                word, told = pipe.recv()
                if word == "ended":
                    self.check_length(wanted, told)
                    return
                if word == "failed":
                    raise told
                if word != "samples":
                    raise _Unfed(told)
                pipe.send("next")  # comes meanwhile
                for place, body in told:
                    try:
                        sample = pickle.loads(body)
                    except Exception as error:
                        raise _Unfed(f"a sample cannot be unpickled ({described(error)})") from error
                    yield place, sample
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise _Unfed("the process that read it for all is gone") from error
        finally:
            if isinstance(wanted, Places):
                self._kept = pipe  # so that what follows is kept until this reader has joined again
            else:
                pipe.close()

    def let_go(self) -> None:
        """Of the place that is kept for this reader."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _joined(self, epoch: int, wanted: Wanted, after: int) -> Connection:
        if not isinstance(self._source, bytes):
            raise _Unfed(self._source)
        known = self.meeting.encode() + (self._source if self.of_one_rank else b"")
        name = hashlib.blake2b(known, digest_size=12).hexdigest()
        server, until = None, time.monotonic() + _START_S
        try:
            folder = private_folder("readers")
            while (left := until - time.monotonic()) > 0:
                with contextlib.suppress(OSError, EOFError):  # not there yet, or just going
                    pipe = Client(str(folder / name), "AF_UNIX")
                    pipe.send((epoch, wanted, after))
                    if pipe.poll(left):
                        word, told = pipe.recv()
                        if word == "joined":
                            return pipe
                        raise _Unfed(told)
                if server is None:
                    server = _start(folder, name, self._source)
                elif server.poll() is not None:
                    raise _Unfed(f"its process ended at once, with exit code {server.returncode}")
                time.sleep(0.02)
        except (OSError, InputError) as error:
            raise _Unfed(described(error)) from error
        raise _Unfed(f"its process did not answer within {_START_S:.0f} s")


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _LARGEST:
            raise ValueError(f"more than {_LARGEST >> 20} MiB")
        return super().write(data)


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.script: list[str] = []

    def reducer_override(self, value: Any) -> Any:
        named = value if hasattr(value, "__qualname__") else type(value)
        if getattr(named, "__module__", None) in ("__main__", "__mp_main__"):
            self.script.append(named.__qualname__)
        return NotImplemented


def _pickled(source: Any) -> bytes | str:
    """The source and how it is imported, or why it cannot go to another process."""
    file = _Limited()
    pickler = _Pickler(file)
    try:
        pickler.dump(source)
        if pickler.script:
            check_script(pickler.script)
    except Exception as error:
        return f"it cannot be sent to the process that would read it for all ({described(error)})"
    prepared = spawn.get_preparation_data("reader")
    kept = {"sys_path", "sys_argv", "orig_dir", "dir"}
    if pickler.script:
        kept |= {"init_main_from_name", "init_main_from_path"}
    prepared = {name: value for name, value in prepared.items() if name in kept}
    return pickle.dumps((prepared, file.getvalue()))


def _sweep(folder: Path) -> None:
    """Remove sockets of servers that were killed; the lock is held, so none is about to listen."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            try:
                Client(str(path), "AF_UNIX").close()
            except ConnectionRefusedError:
                path.unlink()


def _start(folder: Path, name: str, source: bytes) -> subprocess.Popen[bytes] | None:
    """Start the server; None: another reader did, or some server is being started."""
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError, ConnectionError):
                Client(str(folder / name), "AF_UNIX").close()
                return None  # since this reader looked
            _sweep(folder)
        except BlockingIOError:
            return None
        command = [spawn.get_executable(), "-c", "from packtrain.packs._node_server import serve; serve()"]
        variables = {**environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        own: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": 2, "env": variables}
        # in a session of its own: Ctrl-C is for its readers, and it ends when they have
        server = subprocess.Popen(command, pass_fds=[lock], start_new_session=True, **own)
    finally:
        os.close(lock)  # the server has it until it answers; else the next reader would wait for one
    _started.append(server)
    assert server.stdin is not None  # it is a pipe
    with contextlib.suppress(OSError), server.stdin as pipe:  # it may be dead
        pipe.write(pickle.dumps((str(folder / name), lock, source)))
    return server
