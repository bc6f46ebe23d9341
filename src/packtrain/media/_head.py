"""The first bytes of an open medium and range reads beyond them, wherever the medium is."""

from __future__ import annotations

import io
import os
from types import TracebackType
from typing import Any, NamedTuple

from ..errors import SampleError, counted
from ..remote.ranges import Remote


# --------------------------------------------------------------------------------------------
# What a header parser answers: the stored size, how the picture is turned, whether the end is there
# --------------------------------------------------------------------------------------------
class Parsed(NamedTuple):
    """Header facts before orientation is applied.

    Attributes:
        width: stored width in pixels.
        height: stored height in pixels.
        orientation: EXIF orientation 1..8.
        complete: the structure reaches its end marker. False means *suspicious*, not broken: some
            decoders get by without the marker.
    """

    width: int
    height: int
    orientation: int = 1
    complete: bool = True


class ParsedAudio(NamedTuple):
    """Header facts of a sound file.

    Attributes:
        frames: samples per channel that a decoder gives.
        sample_rate: Hz.
        channels: 1 or more.
        complete: the file holds all the samples its header speaks of.
    """

    frames: int
    sample_rate: int
    channels: int
    complete: bool = True


# --------------------------------------------------------------------------------------------
# head
# --------------------------------------------------------------------------------------------
HEAD_BYTES = 4096  # what `open_head` reads at once and what `identity` hashes
STEPS = 1 << 18  # parts that a parser may look at in one medium; real ones have a few hundred
_TIMES, _FREE = 8, 1 << 24  # bytes that a parser may read in all: so many times the size, and some


class Head:
    """The first bytes of a medium, its size, and range reads beyond them. A context manager.

    Attributes:
        bytes: the first `HEAD_BYTES` bytes (all of them when the medium is in memory).
        size: size of the medium in bytes.
        name: what to call the medium in messages.
    """

    __slots__ = ("_base", "_descriptor", "_remote", "_room", "_steps", "bytes", "name", "size")

    def __init__(
        self,
        data: bytes,
        size: int,
        name: str,
        descriptor: int = -1,
        base: int = 0,
        remote: Remote | None = None,
    ) -> None:
        self.bytes = data
        self.size = size
        self.name = name
        self._descriptor = descriptor
        self._base = base  # where the medium starts in its file
        self._remote = remote
        self._steps, self._room = STEPS, _TIMES * size + _FREE

    def __enter__(self) -> Head:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def at(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset` on: fewer only where the medium ends.

        Raises:
            SampleError: unreadable_media: the budget of steps or bytes for one medium is spent.
        """
        self.spend()
        self._room -= max(0, min(count, self.size - offset))
        if self._room < 0:
            raise self.fail("unreadable_media", f"is read more than {_TIMES} times over to be understood")
        return self.read(offset, count)

    def spend(self, steps: int = 1) -> None:
        """Count parts that a parser looks at.

        Raises:
            SampleError: unreadable_media: there are more than `STEPS`.
        """
        self._steps -= steps
        if self._steps < 0:
            raise self.fail(
                "unreadable_media", f"has more than {counted(STEPS, 'parts')} in its header or at its end"
            )

    def read(self, offset: int, count: int) -> bytes:
        """As `at`, for libraries that decode: outside the budget."""
        stop = offset + count
        if stop <= len(self.bytes) or (self._descriptor < 0 and self._remote is None):
            return self.bytes[offset:stop]
        count = min(count, max(0, self.size - offset))
        if self._remote is not None:
            return self._remote.read(self._base + offset, count)
        try:
            return _read_range(self._descriptor, self._base + offset, count)
        except OSError as error:
            raise self.fail("unreadable_media", f"cannot be read: {error.strerror}") from None

    def fail(self, reason: str, what: str, *, hint: str | None = None) -> SampleError:
        """A `SampleError` about this medium, to be raised by the caller."""
        return SampleError(reason, f"{self.name} {what}", hint=hint)


class _HeadFile(io.RawIOBase):
    """A `Head` as a seekable binary file."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self._head = head
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._place, self._head.size)[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        data = self._head.read(self._place, len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def as_file(head: Head, buffer: int = 1 << 16) -> io.BufferedReader:
    """An open medium as a seekable binary file, for libraries that read one."""
    return io.BufferedReader(_HeadFile(head), buffer)


def _read_range(descriptor: int, offset: int, count: int) -> bytes:
    """`count` bytes from `offset`; loops because one read may return less than asked."""
    data = os.pread(descriptor, count, offset)
    if len(data) == count:
        return data
    parts = [data]
    got = len(data)
    while got < count and parts[-1]:
        parts.append(os.pread(descriptor, count - got, offset + got))
        got += len(parts[-1])
    return b"".join(parts)
