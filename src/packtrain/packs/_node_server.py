"""The process of a node that reads an iterable once and feeds its readers. No torch.

A pass is a `Log`: the samples of an epoch as bytes, by place, from the last one that a reader still needs to
some way ahead of the first reader. Every reader has a cursor of its own and is sent its own places, so none
waits for another: one that comes later finds its place as long as it is kept, and one that stops holds up
nobody. What all readers have passed is dropped. The newest samples are in memory (`KEPT` bytes), what slower
readers need beyond is in files without a name, up to `MOST` bytes; then the slowest is let go, which reads by
itself from there on.

The process ends some seconds after its last reader has.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.connection import Connection, Listener
from typing import Any

from ..errors import PacktrainError, described
from ..measuring.eligibility import set_epoch
from ._iterable import FIRST, Wanted, mark, samples_of

#: Bytes of a segment, of segments in memory, of those in files, and that are read before a reader asks.
SEGMENT, KEPT, MOST, AHEAD = 16 << 20, 64 << 20, 8 << 30, 32 << 20
BLOCK = 256 << 10  # bytes that a reader is sent at once
LINGER_S = 5.0  # of a pass, and of the process, without a reader
PATIENCE_S = 10.0  # with a reader that stands still while another needs its space
_SCANNED = 4096  # places that are looked at in one go
_TOLD_S = 0.005  # readers that wait are told of new samples so often

Answer = tuple[str, Any]  # samples, ended, failed, unfit, behind: what, and what it says


class _Segment:
    """Samples of neighbouring places, in memory or in a file."""

    def __init__(self, first: int) -> None:
        self.first, self.size = first, 0
        self.held: list[bytes] = []
        self.next: _Segment | None = None
        self._ends = array("q", [0])
        self._file: Any = None

    def add(self, body: bytes) -> None:
        self.held.append(body)
        self.size += len(body)
        self._ends.append(self.size)

    def __getitem__(self, place: int) -> bytes:
        k = place - self.first
        if self._file is None:
            return self.held[k]
        return os.pread(self._file.fileno(), self._ends[k + 1] - self._ends[k], self._ends[k])

    @property
    def stop(self) -> int:
        return self.first + len(self._ends) - 1

    @property
    def is_away(self) -> bool:
        return self._file is not None

    def put_away(self) -> None:
        """Into a file, which goes with this process however that ends."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._file.writelines(self.held)
        self._file.flush()
        self.held = []

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Cursor:
    """Where a reader stands in a log."""

    def __init__(self, wanted: Wanted, place: int) -> None:
        self.wanted, self.place = wanted, place
        self.segment: _Segment | None = None  # of the place; None: look for it
        self.is_waiting = False  # at the head


class Log:
    """Args:
    source: a copy of its own.
    epoch: which is read.

    Attributes:
        outcome: of the pass, once it is over.
    """

    def __init__(self, source: Any, epoch: int) -> None:
        self.source, self.epoch = source, epoch
        self.cursors: set[Cursor] = set()
        self.first: list[bytes] = []
        self.outcome: Answer | None = None
        self.is_open = True
        self.in_memory = self.in_files = 0
        self._most = min(MOST, shutil.disk_usage(tempfile.gettempdir()).free // 2)
        self._segments: deque[_Segment] = deque([_Segment(0)])
        self._change = threading.Condition()
        self._told, self._is_full = 0.0, False
        self._still: tuple[Cursor, int, float] | None = None  # the slowest, where it stands, since when

    # ------------------------------------------------------------------------------------- its readers
    def join(self, wanted: Wanted, after: int) -> Cursor | None:
        """A cursor behind place `after`; None: what it needs is not kept any more."""
        place = max(wanted.first, after + 1)
        with self._change:
            if not self.is_open or place < self._segments[0].first:
                return None
            cursor = Cursor(wanted, place)
            self.cursors.add(cursor)
            self._change.notify_all()
            return cursor

    def leave(self, cursor: Cursor) -> None:
        with self._change:
            self.cursors.discard(cursor)
            self._change.notify_all()

    def beginning(self, is_gone: Callable[[], bool] = lambda: False) -> list[bytes]:
        """The marks of the first samples; waits for them as long as the reader does."""
        with self._change:
            while len(self.first) < FIRST and self.outcome is None:
                self._change.wait(0.1)
                if is_gone():
                    raise EOFError
            return list(self.first)

    def block(self, cursor: Cursor, is_gone: Callable[[], bool] = lambda: False) -> Answer:
        """The next samples of a reader, as (place, bytes); waits for them as long as the reader does.

        Raises:
            EOFError: the reader is gone.
        """
        found: list[tuple[int, bytes]] = []
        size = 0
        while True:
            with self._change:
                if cursor not in self.cursors:
                    return "behind", "this one fell too far behind the others"
                head, begun = self._segments[-1].stop, cursor.place
                size = self._scan(cursor, head, found, size)
                if self._is_full and cursor.place > begun:
                    self._change.notify_all()
                is_over = cursor.place >= cursor.wanted.stop
                if size >= BLOCK or (found and (cursor.place >= head or is_over)):
                    return "samples", found
                if is_over:
                    return "ended", cursor.place
                if cursor.place >= head:
                    if self.outcome is not None:
                        return self.outcome
                    cursor.is_waiting = True
                    self._change.wait(0.1)
                    cursor.is_waiting = False
                    if is_gone():
                        raise EOFError

    def _scan(self, cursor: Cursor, head: int, found: list[tuple[int, bytes]], size: int) -> int:
        """Move a cursor over some samples; those that are wanted go to `found`, of so many bytes by now."""
        segment = cursor.segment
        if segment is None and cursor.place < head:
            segment = next(one for one in self._segments if cursor.place < one.stop)
        while segment is not None and cursor.place >= segment.stop and segment.next is not None:
            segment = segment.next
        cursor.segment = segment
        if segment is None:
            return size
        stop = min(segment.stop, cursor.place + _SCANNED, cursor.wanted.stop)
        while cursor.place < stop and size < BLOCK:
            if cursor.wanted(cursor.place):
                found.append((cursor.place, segment[cursor.place]))
                size += len(found[-1][1])
            cursor.place += 1
        return size

    # --------------------------------------------------------------------------- the thread that reads
    def read(self) -> None:
        """Read the source as far as its readers need; returns once they are gone."""
        samples: Any = None
        try:
            set_epoch(self.source, self.epoch)
            samples = samples_of(self.source, lambda place: True)
            for sample in samples:
                try:
                    body = pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
                except Exception as error:
                    self._end("unfit", f"a sample cannot be pickled: {described(error)}")
                    break
                if not self._add(body, sample):
                    return
            else:
                self._end("ended", self._segments[-1].stop)
        except PacktrainError as error:
            self._end("failed", error)
        except BaseException as error:  # readers must not be left waiting
            self._end("unfit", described(error))
        finally:
            if samples is not None:
                with contextlib.suppress(Exception):
                    samples.close()
        with self._change:
            self._wait(lambda: False)

    def _end(self, word: str, told: Any) -> None:
        with self._change:
            self.outcome = word, told
            self._change.notify_all()

    def _add(self, body: bytes, sample: Any) -> bool:
        """Keep a sample once there is room; False: nobody needs it."""
        with self._change:
            newest = self._segments[-1]
            if newest.size >= SEGMENT or not self.cursors:
                if not self._wait(self._has_room):
                    return False
                if newest.size >= SEGMENT:
                    newest.next = _Segment(newest.stop)
                    newest = newest.next
                    self._segments.append(newest)
            newest.add(body)
            if len(self.first) < FIRST:
                self.first.append(mark(sample))
            self.in_memory += len(body)
            now = time.monotonic()
            if now - self._told > _TOLD_S and any(one.is_waiting for one in self.cursors):
                self._told = now
                self._change.notify_all()
            return True

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Until it is ready; False: there was no reader for a while, and there will be none."""
        alone = time.monotonic()
        while True:
            if self.cursors:
                alone = time.monotonic()
                if ready():
                    self._is_full = False
                    return True
                if not self._is_full:  # there is something for everybody who is behind
                    self._is_full = True
                    self._change.notify_all()
            elif time.monotonic() - alone > LINGER_S:
                self.is_open = False
                for segment in self._segments:
                    segment.close()
                return False
            self._change.wait(0.5)

    def _has_room(self) -> bool:
        """May another segment be read? Drops what all have passed, and puts away what is not new."""
        if len(self.first) < FIRST:
            return True  # no reader moves before it has compared them
        slowest = min(self.cursors, key=lambda cursor: cursor.place)
        while (
            len(self._segments) > 1
            and self.in_memory + self.in_files >= KEPT
            and self._segments[0].stop <= slowest.place
        ):
            gone = self._segments.popleft()
            gone.close()
            if gone.is_away:
                self.in_files -= gone.size
            else:
                self.in_memory -= gone.size
        front = max(cursor.place for cursor in self.cursors)
        if sum(one.size for one in self._segments if one.first >= front) >= AHEAD:
            return False
        if self.in_memory >= KEPT:
            oldest = next(one for one in self._segments if not one.is_away)
            if self.in_files + oldest.size > self._most:
                if front >= self._segments[-1].stop:  # it waits for what comes next
                    self._let_go(slowest)
                return False
            oldest.put_away()
            self.in_memory -= oldest.size
            self.in_files += oldest.size
        return True

    def _let_go(self, slowest: Cursor) -> None:
        """Of the slowest reader, once it stood still for long enough."""
        now = time.monotonic()
        if self._still is None or self._still[:2] != (slowest, slowest.place):
            self._still = slowest, slowest.place, now
        elif now - self._still[2] > PATIENCE_S:
            self.cursors.discard(slowest)


class _Server:
    """Args:
    body: the pickled source.
    fault: why it cannot be used.
    """

    def __init__(self, body: bytes) -> None:
        self.body, self.fault = body, ""
        self.logs: list[Log] = []
        self.readers = 0
        self.used = time.monotonic()
        self._lock = threading.Lock()
        self.is_ready = threading.Event()

    def feed(self, pipe: Connection) -> None:
        """A reader: (epoch, what it wants, behind which place), then a block for every word it sends."""
        with self._lock:
            self.readers += 1
        try:
            with contextlib.suppress(EOFError, OSError), pipe:
                self._feed(pipe, *pipe.recv())
        finally:
            with self._lock:
                self.readers -= 1
                self.used = time.monotonic()

    def _feed(self, pipe: Connection, epoch: int, wanted: Wanted, after: int) -> None:
        try:
            log, cursor = self._join(epoch, wanted, after)
        except Exception as error:
            pipe.send(("unfit", described(error)))
            return
        try:
            pipe.send(("joined", os.getpid()))
            while word := pipe.recv():
                # it says nothing until it has its answer: what can be read before is its end
                is_next = word == "next"
                pipe.send(log.block(cursor, pipe.poll) if is_next else log.beginning(pipe.poll))
        finally:
            log.leave(cursor)

    def _join(self, epoch: int, wanted: Wanted, after: int) -> tuple[Log, Cursor]:
        self.is_ready.wait()
        if self.fault:
            raise RuntimeError(self.fault)
        with self._lock:
            self.logs = [log for log in self.logs if log.is_open]
            for log in self.logs:
                cursor = log.join(wanted, after) if log.epoch == epoch else None
                if cursor is not None:
                    return log, cursor
            log = Log(pickle.loads(self.body), epoch)
            cursor = log.join(wanted, after)
            assert cursor is not None  # it keeps everything yet
            self.logs.append(log)
        threading.Thread(target=log.read, daemon=True).start()
        return log, cursor

    def accept(self, listener: Listener) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                threading.Thread(target=self.feed, args=(listener.accept(),), daemon=True).start()


def serve() -> None:
    """What the process does.

    Standard input says the socket's path, the lock that is held until it is there, and (what a process has to
    be told to import the source, the pickled source).
    """
    import fcntl

    path, lock, source = pickle.load(sys.stdin.buffer)
    prepared, body = pickle.loads(source)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = _Server(body)
    threading.Thread(target=server.accept, args=(Listener(path, "AF_UNIX", 64),), daemon=True).start()
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
    try:
        spawn.prepare(prepared)
        pickle.loads(body)
    except BaseException as error:  # told to its readers
        server.fault = described(error)
    server.used = time.monotonic()
    server.is_ready.set()
    while server.readers or time.monotonic() - server.used < LINGER_S:
        time.sleep(0.2)
    os.unlink(path)
    os._exit(0)
