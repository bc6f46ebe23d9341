"""One pass over a record file: where its records start, and the SHA-256 of its bytes.

Lines: a record is a line that holds more than white space. Arrays: the elements of one top-level JSON
array, found by counting brackets outside of strings, vectorised in blocks of 1 MiB, so a file of any size
is indexed in constant memory (8 bytes per record). Neither parses a record: a malformed one is the
business of whoever reads it and never keeps the others from being found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..errors import SourceError
from ._handles import Pinned, read
from ._index import Built

__all__ = ["BOM", "scan_array", "scan_lines", "scan_object"]

BOM = b"\xef\xbb\xbf"
BLOCK = 1 << 20
LINES_BLOCK = 1 << 24
_SPACE = b" \t\r\n"

I64 = NDArray[np.int64]


def _blocks(file: Pinned, size: int = BLOCK) -> Iterator[tuple[int, bytes]]:
    for offset in range(0, file.size, size):
        yield offset, read(file, offset, min(size, file.size - offset))


def scan_lines(file: Pinned) -> Built:
    """Index of a file with one JSON object per line; blank lines are passed over."""
    digest = hashlib.sha256()
    starts: list[I64] = []
    gaps: list[I64] = []
    count = 0
    start = len(BOM) if read(file, 0, min(3, file.size)) == BOM else 0
    rest = b""  # the unfinished line of the block before
    origin = start
    for offset, block in _blocks(file, LINES_BLOCK):
        digest.update(block)
        data = rest + (block if offset else block[start:])
        if offset + len(block) == file.size and not data.endswith(b"\n"):
            data += b"\n"  # the last line may lack its end
        ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10)
        firsts = np.concatenate(([0], ends + 1))[: len(ends)]
        blank = _blank(data, firsts, ends)
        full = np.flatnonzero(~blank)
        starts.append(firsts[full] + origin)
        gaps.append(np.searchsorted(full, np.flatnonzero(blank)) + count)
        count += len(full)
        cut = int(ends[-1]) + 1 if len(ends) else 0
        rest = data[cut:]
        origin += cut
    starts.append(np.array([file.size], dtype=np.int64))
    return Built(np.concatenate(starts), np.concatenate([*gaps, starts[-1][:0]]), digest.hexdigest())


def _blank(data: bytes, firsts: I64, ends: I64) -> NDArray[np.bool_]:
    """Which lines hold white space only; only those that begin with white space are looked at."""
    codes = np.frombuffer(data, dtype=np.uint8)[firsts]
    blank = np.zeros(len(firsts), dtype=bool)
    suspects = np.flatnonzero((codes == 10) | (codes == 13) | (codes == 32) | (codes == 9))
    for line in suspects.tolist():
        blank[line] = not data[firsts[line] : ends[line]].strip(_SPACE)
    return blank


def scan_object(file: Pinned) -> Built:
    """Index of a file that is one record."""
    digest = hashlib.sha256()
    for _, block in _blocks(file, LINES_BLOCK):
        digest.update(block)
    start = len(BOM) if read(file, 0, min(3, file.size)) == BOM else 0
    return Built(np.array([start, file.size], dtype=np.int64), np.zeros(0, np.int64), digest.hexdigest())


# --------------------------------------------------------------------------------------------
class _Brackets:
    """State of the bracket count between blocks."""

    __slots__ = ("depth", "escaped", "inside")

    def __init__(self) -> None:
        self.depth = 0
        self.inside = 0  # 1 within a string
        self.escaped = False  # the block ended in an odd run of backslashes

    def commas(self, data: bytes) -> tuple[I64, int]:
        """(positions of `,` at depth 1, position of the bracket that closes the array or -1)."""
        codes = np.frombuffer(data, dtype=np.uint8)
        quotes = np.flatnonzero(codes == 34)
        if len(quotes):
            before = codes[quotes - 1] == 92  # for a quote at 0 this looks at the block's end
            before[quotes == 0] = self.escaped
            keep = np.ones(len(quotes), dtype=bool)
            for at in np.flatnonzero(before).tolist():
                keep[at] = self._backslashes(data, int(quotes[at])) % 2 == 0
            quotes = quotes[keep]
        self.escaped = self._backslashes(data, len(data)) % 2 == 1
        marks = np.flatnonzero((codes == 44) | ((codes | 32) == 123) | ((codes | 32) == 125))
        within = (np.searchsorted(quotes, marks) + self.inside) & 1
        self.inside = (self.inside + len(quotes)) & 1
        marks = marks[within == 0]
        kinds = codes[marks]
        delta = np.where(kinds == 44, 0, np.where((kinds | 32) == 123, 1, -1))
        depth = self.depth + np.cumsum(delta)
        closing = np.flatnonzero(depth <= 0)
        end = int(marks[closing[0]]) if len(closing) else -1
        commas = marks[(kinds == 44) & (depth == 1)]
        if end >= 0:
            commas = commas[commas < end]
        if len(depth):
            self.depth = int(depth[-1])
        return commas, end

    def _backslashes(self, data: bytes, stop: int) -> int:
        """Length of the run of backslashes that ends before `stop`, the block before included."""
        start = stop
        while start and data[start - 1] == 92:
            start -= 1
        return stop - start + (1 if start == 0 and self.escaped else 0)


def scan_array(file: Pinned) -> Built:
    """Index of one top-level JSON array.

    Raises:
        SourceError: the array is not closed, or something follows it.
    """
    digest = hashlib.sha256()
    opening = next(offset + block.index(b"[") for offset, block in _blocks(file) if b"[" in block)
    state = _Brackets()
    commas: list[I64] = []
    end = -1
    for offset, block in _blocks(file):
        digest.update(block)
        skip = max(0, opening - offset) if end < 0 else 0
        if end >= 0:
            if block.strip(_SPACE):
                raise _trailing(file)
            continue
        found, close = state.commas(block[skip:])
        commas.append(found + offset + skip)
        if close >= 0:
            end = offset + skip + close
            if block[skip + close + 1 :].strip(_SPACE):
                raise _trailing(file)
    if end < 0:
        raise SourceError(
            f"{file.path} is not a whole JSON array: it ends "
            + ("inside a string" if state.inside else f"with {state.depth} brackets open"),
            hint="the file was cut short, or a record in it breaks the JSON; JSONL survives a bad record",
        )
    cuts = np.concatenate(commas) if commas else np.zeros(0, dtype=np.int64)
    starts = np.concatenate(([opening], cuts, [end])) + 1
    starts[-1] = end
    if len(cuts) == 0 and not _body(file, opening + 1, end):
        starts = starts[-1:]
    return Built(starts.astype(np.int64), np.zeros(0, dtype=np.int64), digest.hexdigest())


def _body(file: Pinned, start: int, stop: int) -> bool:
    """Whether anything but white space stands between two offsets."""
    return any(read(file, at, min(BLOCK, stop - at)).strip(_SPACE) for at in range(start, stop, BLOCK))


def _trailing(file: Pinned) -> SourceError:
    return SourceError(
        f"{file.path} has more text after its JSON array",
        hint="one array per file, or JSONL with one object per line",
    )
