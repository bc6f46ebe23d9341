"""Open files of sources, bounded per process: at most 16 at a time, whatever the number of sources.

A run over 400 shards with a low limit on open files must work, so descriptors live in one least-recently-
used table per process, keyed by path. Reads are positional (`pread`): no seek pointer is shared, and a
forked child starts with an empty table of its own. A file is pinned by (size, mtime_ns) at the time it
was indexed; a read from a file that no longer matches raises instead of mixing old and new content.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass

from ..errors import SourceError

__all__ = ["LIMIT", "Pinned", "open_count", "read"]

LIMIT = 16


@dataclass(frozen=True, slots=True)
class Pinned:
    """A file as it was when it was indexed."""

    path: str
    size: int
    mtime_ns: int


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
            if (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns) and len(data) == count:
                return data
        _close(file.path)
    raise SourceError(
        f"{file.path} changed after it was opened ({file.size} bytes then, {status.st_size} now)",
        hint="open the source again: its lengths and plan must be made anew",
    )


def _read_open(path: str, offset: int, count: int) -> tuple[bytes, os.stat_result]:
    """(bytes, status of the file after they were read), through the table."""
    descriptor = _descriptor(path)
    try:
        data = os.pread(descriptor, count, offset)
        while len(data) < count:
            more = os.pread(descriptor, count - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data, os.fstat(descriptor)
    except OSError as error:
        _close(path)
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None


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
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
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
