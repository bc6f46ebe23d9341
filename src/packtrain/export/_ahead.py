"""The members of a part, read by a thread ahead of the one that writes them.

Reading, summing and building records overlap with writing. Members are handed over many at once, for a
hand-over costs more than a small member; what is read and not yet written is bounded in bytes, whatever the
size of a medium.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from ._job import Job

__all__ = ["Lane", "Member", "members_ahead"]

#: Pack, name behind its key, bytes; the last member of a pack is its record, `json`.
Member = tuple[int, str, bytes]

_BATCH = 1 << 20  # bytes handed over at once
_AHEAD = 1 << 23  # bytes read and not yet written

T = TypeVar("T")


class Lane(Generic[T]):
    """A queue from one thread to another, bounded in bytes; one item always has room."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._items: deque[tuple[T, int]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: T, size: int) -> bool:
        """Wait for room; False when the lane was closed: nobody wants the item."""
        with self._changed:
            while not self._closed and self._items and self._held + size > self._limit:
                self._changed.wait()
            if self._closed:
                return False
            self._items.append((item, size))
            self._held += size
            self._changed.notify_all()
            return True

    def get(self) -> T:
        """Wait for the next item."""
        with self._changed:
            while not self._items:
                self._changed.wait()
            item, size = self._items.popleft()
            self._held -= size
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Let go of what is in it; every `put` from now on is refused."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


@contextmanager
def members_ahead(job: Job, part: int, **spelling: Any) -> Iterator[Iterator[Member]]:
    """The members of all packs of a part, in order.

    Raises:
        Exception: what reading a pack raised, where its members would have come.
    """
    lane: Lane[list[Member] | BaseException | None] = Lane(_AHEAD)
    thread = threading.Thread(
        target=_read, args=(lane, job, part, spelling), name="packtrain-read", daemon=True
    )
    thread.start()
    try:
        yield _handed(lane)
    finally:
        lane.close()
        thread.join()


def _handed(lane: Lane[list[Member] | BaseException | None]) -> Iterator[Member]:
    while (batch := lane.get()) is not None:
        if isinstance(batch, BaseException):
            raise batch
        yield from batch


def _read(
    lane: Lane[list[Member] | BaseException | None], job: Job, part: int, spelling: dict[str, Any]
) -> None:
    batch: list[Member] = []
    held = 0
    try:
        for number in job.packs_of(part):
            for name, data in job.members(job.read(number), **spelling):
                batch.append((number, name, data))
                held += len(data)
                if held >= _BATCH:
                    if not lane.put(batch, held):
                        return
                    batch, held = [], 0
        lane.put(batch, held)
        lane.put(None, 0)
    except BaseException as error:  # raised again by the thread that writes
        lane.put(error, 0)
