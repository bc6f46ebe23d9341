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
_WHITE = np.isin(np.arange(256), list(_SPACE))

I64 = NDArray[np.int64]


def _blocks(file: Pinned, size: int = BLOCK) -> Iterator[tuple[int, bytes]]:
    for offset in range(0, file.size, size):
        yield offset, read(file, offset, min(size, file.size - offset))


def scan_lines(file: Pinned) -> Built:
    """Index of a file with one JSON object per line; blank lines are passed over, no line is held."""
    digest = hashlib.sha256()
    start = len(BOM) if read(file, 0, min(3, file.size)) == BOM else 0
    starts: list[I64] = []
    gaps: list[I64] = []
    count = 0
    begun, marked = start, False  # where the unfinished line began; it holds more than white space
    for offset, block in _blocks(file, LINES_BLOCK):
        digest.update(block)
        if not offset and start:
            block = b" " * start + block[start:]
        last = offset + len(block) == file.size
        if last and not block.endswith(b"\n"):
            block += b"\n"  # the last line may lack its end
        codes = np.frombuffer(block, dtype=np.uint8)
        ends = np.flatnonzero(codes == 10)
        firsts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
        blank = _blank(codes, firsts, ends)
        places = firsts + offset
        if len(ends):
            blank[0] &= not marked
            places[0] = begun
        full = np.flatnonzero(~blank)
        starts.append(places[full])
        gaps.append(np.searchsorted(full, np.flatnonzero(blank)) + count)
        count += len(full)
        if len(ends):
            begun, marked = offset + int(ends[-1]) + 1, False
        marked = marked or bool(block[begun - offset if len(ends) else 0 :].strip(_SPACE))
    starts.append(np.array([file.size], dtype=np.int64))
    return Built(np.concatenate(starts), np.concatenate([*gaps, starts[-1][:0]]), digest.hexdigest())


def _blank(codes: NDArray[np.uint8], firsts: I64, ends: I64) -> NDArray[np.bool_]:
    """Which lines hold white space only; only those that begin with white space are looked at."""
    blank = np.zeros(len(firsts), dtype=bool)
    suspects = np.flatnonzero(_WHITE[codes[firsts]])
    if len(suspects):
        spans = np.stack((firsts[suspects], ends[suspects]), axis=1).ravel()
        blank[suspects] = ~np.logical_or.reduceat(~_WHITE[codes], spans)[::2]
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
        slashes = np.flatnonzero(codes == 92)
        odd = self._odd_runs(slashes)
        before = np.searchsorted(slashes, quotes) - 1  # the backslash ahead of a quote, if it is next to it
        escaped = np.zeros(len(quotes), dtype=bool)
        if len(slashes):
            escaped = odd[before] & (slashes[before] == quotes - 1)
        escaped |= (quotes == 0) & self.escaped
        quotes = quotes[~escaped]
        if len(slashes) and slashes[-1] == len(data) - 1:
            self.escaped = bool(odd[-1])
        elif data:
            self.escaped = False
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

    def _odd_runs(self, slashes: I64) -> NDArray[np.bool_]:
        """For each backslash, whether the run that ends with it is odd; the block before counts."""
        first = np.ones(len(slashes), dtype=bool)
        first[1:] = np.diff(slashes) != 1
        place = np.arange(len(slashes))
        length = place - np.maximum.accumulate(np.where(first, place, 0)) + 1
        if len(slashes) and slashes[0] == 0 and self.escaped:
            length[: np.flatnonzero(first)[1] if first.sum() > 1 else None] += 1
        odd: NDArray[np.bool_] = length % 2 == 1
        return odd


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
