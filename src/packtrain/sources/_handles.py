"""Open files of sources, bounded per process: at most 16 at a time, whatever the number of sources.

A run over 400 shards with a low limit on open files must work, so descriptors live in one least-recently-
used table per process, keyed by path. Reads are positional (`pread`): no seek pointer is shared, and a
forked child starts with an empty table of its own. A file is pinned by its stamp and content digest at the
time it was indexed; a read from a file that is another one raises instead of mixing old and new content.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import PacktrainError, SourceError, one_line
from ..files import Stamp, read_range, sha256_file
from ..remote.copies import present

LIMIT = 16


@dataclass(frozen=True, slots=True)
class Pinned:
    """A file as it was when it was indexed.

    Attributes:
        sha256: digest of its bytes; "" where nobody asked.
    """

    path: str
    stamp: Stamp
    sha256: str = ""

    @property
    def size(self) -> int:
        return self.stamp.size

    def is_it(self, status: os.stat_result) -> bool:
        """Whether what `status` tells of is this file: a copy with the same size and time is read once.

        Its time of change alone says nothing here: a file that is read may be linked, renamed or chmodded.
        """
        now = Stamp.of(status)
        if now[:2] != self.stamp[:2]:
            return False
        if now.inode == self.stamp.inode or self in _same:
            return True
        if not self.sha256 or sha256_file(self.path) != self.sha256:
            return False
        _same.add(self)
        return True

    def check(self) -> None:
        """The file is still the one that was indexed.

        Raises:
            SourceError: it is gone, or another one.
        """
        try:
            present(self.path)
            status = os.stat(self.path)
        except OSError as error:
            raise SourceError(f"{self.path} is gone since it was opened: {error.strerror}") from None
        if not self.is_it(status):
            raise self.changed(status)

    def changed(self, status: os.stat_result) -> SourceError:
        """The error that says so."""
        return SourceError(
            f"the file changed: {self.path} changed after it was opened "
            f"({self.size} bytes then, {status.st_size} now)",
            hint="open the source again: its lengths and plan must be made anew",
        )


_same: set[Pinned] = set()  # found under another inode with the same content
_table: OrderedDict[str, int] = OrderedDict()
_lock = threading.Lock()
_owner = os.getpid()


def read(file: Pinned, offset: int, count: int) -> bytes:
    """`count` bytes from `offset` of a pinned file.

    Raises:
        SourceError: the file is gone, shorter, or changed since it was indexed.
    """
    with _lock:
        for fresh in (False, True):
            if fresh:  # what is open may be a file that has been replaced since: look again by name
                _close(file.path)
            data, status = _read_open(file.path, offset, count)
            if file.is_it(status) and len(data) == count:
                return data
        _close(file.path)
    raise file.changed(status)


def _read_open(path: str, offset: int, count: int) -> tuple[bytes, os.stat_result]:
    """(bytes, status of the file after they were read), through the table."""
    descriptor = _descriptor(path)
    try:
        return read_range(descriptor, offset, count), os.fstat(descriptor)
    except OSError as error:
        _close(path)
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def by_library(what: str) -> Iterator[None]:
    """Around another library that reads a file: whatever damage leads to is one `SourceError`."""
    try:
        yield
    except PacktrainError:
        raise
    except Exception as error:  # also SystemError, OverflowError and UnicodeDecodeError of damaged bytes
        hint = "it may have been cut short or damaged"
        raise SourceError(f"{what}: {one_line(error, 300)}", hint=hint) from None


def contents(path: str, most: int = -1) -> bytes:
    """The bytes of a small file, or its first `most`.

    Raises:
        SourceError: it cannot be opened.
    """
    try:
        with open(path, "rb") as handle:
            return handle.read(most)
    except OSError as error:
        raise SourceError(f"{path} cannot be opened: {error.strerror}") from None


def open_count() -> int:
    """How many descriptors this process holds for sources."""
    return len(_table) if _owner == os.getpid() else 0


def _descriptor(path: str) -> int:
    global _owner
    if _owner != os.getpid():  # a forked child: these descriptors are the parent's
        _owner = os.getpid()
        for descriptor in _table.values():
            os.close(descriptor)
        _table.clear()
    descriptor = _table.get(path, -1)
    if descriptor >= 0:
        _table.move_to_end(path)
        return descriptor
    while len(_table) >= LIMIT:
        _, oldest = _table.popitem(last=False)
        os.close(oldest)
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        present(path)  # a copy of a remote file that was let go
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise SourceError(f"{path} is gone since it was opened") from None
    except OSError as error:
        raise SourceError(f"{path} cannot be opened: {error.strerror}") from None
    _table[path] = descriptor
    return descriptor


def _close(path: str) -> None:
    descriptor = _table.pop(path, -1)
    if descriptor >= 0:
        os.close(descriptor)


def _after_fork() -> None:
    """A lock held by another thread at the moment of a fork must not stay locked in the child."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
