"""What is known of the files of a source, kept in the cache folder: where records start, and digests.

Where each record of a file starts is found in one pass, and noted in one file in the cache folder, under the
digest of the source's absolute path. Nothing is written beside the source; a `.NAME.packtrain-index` that
came with it is read. Layout:

    8 bytes magic · 4 bytes header length · JSON header · int64 starts[n+1] · int64 gaps[g]

Record i is `source[starts[i]:starts[i+1]]`, white space and separators included. `gaps` names the record
before which each blank line stands, so line numbers need no scan. The header carries the stamp (size, times,
inode) and SHA-256 of the source, digests of its head and tail, and a CRC of the arrays. An index that is
torn, of another version, or made for another size or mtime is built again: a corrupted index never becomes
wrong records. Reopening costs a stat and this check. Where only the time of change or the inode differ, the
source is hashed once more: a copy keeps its index, other content behind the same size and time is told.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files, world
from ..errors import InputError, SourceError, counted
from ..files import StrPath
from ._handles import Pinned, read

# --------------------------------------------------------------------------------------------
# One pass over a record file: where its records start, and the SHA-256 of its bytes
# --------------------------------------------------------------------------------------------
# Lines: a record is a line that holds more than white space. Arrays: the elements of one top-level JSON
# array, found by counting brackets outside of strings, vectorised in blocks of 1 MiB, so a file of any size
# is indexed in constant memory (8 bytes per record). Neither parses a record: a malformed one is the
# business of whoever reads it and never keeps the others from being found.
BOM = b"\xef\xbb\xbf"
BLOCK = 1 << 20
LINES_BLOCK = 1 << 24
MOST_BLANK = 1 << 24  # blank lines beyond the number of records: each takes 8 bytes
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
    count = blanks = 0
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
        blanks += len(gaps[-1])
        if blanks > MOST_BLANK + count:
            raise SourceError(
                f"{file.path} has {blanks:,} blank lines and {count:,} records up to there",
                hint="remove the blank lines",
            )
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
        depth = self.depth + np.cumsum(np.where(kinds == 44, 0, np.where((kinds | 32) == 123, 1, -1)))
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
        behind = block
        if end < 0:
            skip = max(0, opening - offset)
            found, close = state.commas(block[skip:])
            commas.append(found + offset + skip)
            end = offset + skip + close if close >= 0 else -1
            behind = block[skip + close + 1 :] if close >= 0 else b""
        if behind.strip(_SPACE):
            raise SourceError(
                f"{file.path} has more text after its JSON array",
                hint="one array per file, or JSONL with one object per line",
            )
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


# --------------------------------------------------------------------------------------------
# Where each record of a file starts: found in one pass, kept as a byte-offset index in the cache folder
# --------------------------------------------------------------------------------------------
log = logging.getLogger(__name__)

MAGIC = b"ptindex\2"
ENDS = 1 << 16  # bytes of a source whose digests tell a longer file from another one
KEEP = 1 << 20  # arrays up to this many bytes stay in memory; larger ones are read 16 bytes at a time


@dataclass(frozen=True)
class Built:
    """What a builder finds in one pass over a source."""

    starts: I64  # int64[n+1], ascending; the last is where the last record's region ends
    gaps: I64  # int64[g], ascending: a blank line stands before this record
    sha256: str


@dataclass(frozen=True)
class Index:
    """Where the records of one file are.

    Attributes:
        count: number of records.
        sha256: digest of the source's bytes.
        starts: int64[n+1] in memory, or None when they are read from `file`.
        gaps: int64[g].
        file: the index file, pinned, or None when it could not be written anywhere.
        base: byte offset of `starts` in `file`.
    """

    count: int
    sha256: str
    starts: I64 | None
    gaps: I64
    file: Pinned | None
    base: int

    def span(self, index: int) -> tuple[int, int]:
        """(start, stop) in bytes of record `index`."""
        if self.starts is not None:
            return int(self.starts[index]), int(self.starts[index + 1])
        assert self.file is not None  # `load` gives one or the other
        start, stop = struct.unpack("<2q", read(self.file, self.base + 8 * index, 16))
        return start, stop

    def line(self, index: int) -> int:
        """Line number (from 1) of record `index` in a file of one record per line."""
        return index + 1 + int(np.searchsorted(self.gaps, index, side="right"))


def cached(path: StrPath, name: str, cache_dir: StrPath | None = None) -> Path:
    """Where what is known about a file or folder is stored: in the cache folder, never beside it.

    Args:
        path: the source.
        name: what is stored; from its last dot on, it ends the file's name.
        cache_dir: default `world.cache_dir()`.
    """
    root = Path(cache_dir or world.cache_dir())
    key = hashlib.sha256(os.fsencode(os.path.abspath(os.fspath(path)))).hexdigest()[:32]
    return root / "index" / f"{key}{name[name.rindex('.') :]}"


def load(
    source: Pinned,
    kind: str,
    build: Callable[[Pinned], Built],
    *,
    cache_dir: StrPath | None = None,
    verify: bool = False,
    keep: int = KEEP,
) -> Index:
    """The index of `source`, read where it is stored or built and stored.

    Args:
        source: the file as it is now.
        kind: name of the layout; part of the header.
        build: makes the arrays and the digest from the file.
        cache_dir: cache folder; default `world.cache_dir()`.
        verify: hash the source and compare, instead of trusting (size, mtime).
        keep: bytes of starts that may stay in memory.
    """
    place = cached(source.path, ".packtrain-index", cache_dir)
    beside = Path(source.path).with_name(f".{os.path.basename(source.path)}.packtrain-index")
    other: dict[str, Any] | None = None
    for path in (place, beside):
        found = _read(path, keep)
        if found is None or found[1]["kind"] != kind:
            continue
        index, header = found
        if header["stamp"] == list(source.stamp) and not verify:
            return index
        if header["stamp"][:2] == list(source.stamp[:2]) and files.sha256_file(source.path) == index.sha256:
            if path == place and header["stamp"] == list(source.stamp):
                return index
            whole = _read(path, sys.maxsize)
            if whole is not None and whole[0].starts is not None:  # the same content: noted as it is now
                built = Built(whole[0].starts, whole[0].gaps, index.sha256)
                return _store(place, source, {**header, "stamp": list(source.stamp)}, built, keep)
        other = other or header
    if other is not None:
        _tell(source, other)
    log.info("indexing %s", source.path)
    built = build(source)
    header = {"kind": kind, "stamp": list(source.stamp), "sha256": built.sha256}
    header |= {"records": len(built.starts) - 1, "gaps": len(built.gaps)}
    header["ends"] = _ends(source, source.size)
    return _store(place, source, header, built, keep)


def _store(place: Path, source: Pinned, header: dict[str, Any], built: Built, keep: int) -> Index:
    """The index, from where it was put or from memory."""
    try:
        _write(place, header, built)
        if (found := _read(place, keep)) is not None:
            return found[0]
    except (InputError, OSError) as error:
        log.debug("no index at %s: %s", place, error)
    log.warning("the index of %s could not be stored: it will be built again next time", source.path)
    return Index(header["records"], built.sha256, built.starts, built.gaps, None, 0)


def _ends(source: Pinned, size: int) -> list[str]:
    """Digests of the first and the last bytes of the first `size` of a source."""
    count = min(ENDS, size)
    return [hashlib.sha256(read(source, at, count)).hexdigest()[:16] for at in (0, size - count)]


def _tell(source: Pinned, header: dict[str, Any]) -> None:
    """Say whether a file has grown or changed since it was indexed."""
    size = header["stamp"][0]
    if size < source.size and _ends(source, size) == header.get("ends"):
        log.info("%s has grown from %d to %d bytes", source.path, size, source.size)
    else:
        log.warning("the file changed: %s holds other content than when it was indexed", source.path)


def _write(path: Path, header: dict[str, Any], built: Built) -> None:
    starts = np.ascontiguousarray(built.starts, dtype="<i8")
    gaps = np.ascontiguousarray(built.gaps, dtype="<i8")
    text = files.canonical_json({**header, "crc": zlib.crc32(gaps.data, zlib.crc32(starts.data))})
    text += b" " * (-(len(MAGIC) + 4 + len(text)) % 8)  # the arrays start on a multiple of 8
    with files.publish(path) as handle:
        handle.write(MAGIC + struct.pack("<L", len(text)) + text)
        handle.write(starts.data)
        handle.write(gaps.data)


def _read(path: Path, limit: int) -> tuple[Index, dict[str, Any]] | None:
    """(the index stored at `path`, its header) when it is whole, else None."""
    try:
        with open(path, "rb") as handle:
            status = os.fstat(handle.fileno())
            if handle.read(len(MAGIC)) != MAGIC:
                return None
            length = struct.unpack("<L", handle.read(4))[0]
            header = files.parse_json(handle.read(length)) if length < 1 << 16 else None
            if not isinstance(header, dict) or not _is_header(header):
                return None
            count, extra = header["records"], header["gaps"]
            base = len(MAGIC) + 4 + length
            if status.st_size != base + 8 * (count + 1 + extra):
                return None
            keep = 8 * (count + 1) <= limit
            crc = 0
            kept: list[bytes] = []
            remaining = 8 * (count + 1)
            while remaining:
                block = handle.read(min(remaining, files.BLOCK))
                remaining -= len(block)
                crc = zlib.crc32(block, crc)
                if keep:
                    kept.append(block)
            gaps = np.frombuffer(handle.read(8 * extra), dtype="<i8").astype(np.int64)
            if zlib.crc32(gaps.astype("<i8").data, crc) != header.get("crc"):
                log.warning("%s is damaged and is built again", path)
                return None
    except (OSError, ValueError, struct.error, RecursionError):
        return None
    starts = np.frombuffer(b"".join(kept), dtype="<i8").astype(np.int64) if keep else None
    pinned = Pinned(str(path), files.Stamp.of(status))
    return Index(count, header["sha256"], starts, gaps, pinned, base), header


def _is_header(header: dict[str, Any]) -> bool:
    stamp, counts = header.get("stamp"), (header.get("records"), header.get("gaps"))
    return (
        isinstance(stamp, list)
        and len(stamp) == 4
        and all(type(value) is int and value >= 0 for value in (*stamp[:1], *counts))
        and isinstance(header.get("sha256"), str)
        and isinstance(header.get("kind"), str)
    )


def pin(path: StrPath) -> Pinned:
    """The file as it is now, by its absolute path."""
    return pinned(os.path.abspath(os.fspath(path)))


def pinned(full: str) -> Pinned:
    """`pin` for a path that is absolute."""
    try:
        return Pinned(full, files.Stamp.of(os.stat(full)))
    except OSError as error:
        raise SourceError(f"{full} cannot be opened: {error.strerror}") from None


# --------------------------------------------------------------------------------------------
# Content digests of a source's files, kept so that reopening hashes only what has changed
# --------------------------------------------------------------------------------------------
# A table `name -> [size, mtime_ns, ctime_ns, inode, SHA-256]` is stored in the cache folder. A torn or
# foreign table is ignored. A file whose stamp is as noted is not read again unless `verify`. One with other
# content under the same name is told, and so is one that is gone.
_LOOKED_AT = 1024  # files that were read before and are not asked for now: are they still there?


def digest_files(
    paths: Sequence[str], root: str, table: str, *, cache_dir: StrPath | None = None, verify: bool = False
) -> list[Pinned]:
    """The files with their content digests, see `rows_of`."""
    rows = rows_of(
        paths, root, table, lambda path: (files.sha256_file(path),), cache_dir=cache_dir, verify=verify
    )
    return [file for file, _ in rows]


def rows_of(
    paths: Sequence[str],
    root: str,
    table: str,
    read: Callable[[str], tuple[Any, ...]],
    *,
    cache_dir: StrPath | None = None,
    verify: bool = False,
) -> list[tuple[Pinned, tuple[Any, ...]]]:
    """The files, pinned with their digests, and what was read of each.

    Args:
        paths: absolute.
        root: folder that names in the table are relative to.
        table: file name of the table, `.packtrain-…`.
        read: path -> (SHA-256, and what else is to be known); always as much.
        cache_dir: where the table is stored.
        verify: hash every file again.

    Raises:
        SourceError: a file is missing, or changes while it is read.
    """
    place = cached(root, table, cache_dir)
    known = _load(place)
    out: dict[str, tuple[Pinned, tuple[Any, ...]]] = {}
    stale, start = False, os.path.join(root, "")
    for path in paths:
        name = path[len(start) :] if path.startswith(start) else os.path.relpath(path, root)
        before = pinned(path)
        noted = known.pop(name, None)
        if not verify and noted is not None and noted[:4] == list(before.stamp):
            out[name] = Pinned(before.path, before.stamp, str(noted[4])), tuple(noted[4:])
            continue
        stale = True
        log.info("hashing %s", path)
        try:
            row = read(path)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from None
        if pinned(path) != before:
            raise SourceError(f"{path} changed while it was read", hint="open it again")
        out[name] = Pinned(before.path, before.stamp, row[0]), row
        if noted is not None and noted[4] != row[0]:
            log.warning("the file changed: %s holds other content than when it was read before", path)
    gone = [name for name in islice(known, _LOOKED_AT) if not os.path.lexists(os.path.join(root, name))]
    if gone:
        told = ", ".join(gone[:3])
        log.warning("%s of %s gone since it was read before: %s", counted(len(gone), "files"), root, told)
    if stale or gone or verify:
        kept = {name: row for name, row in known.items() if name not in gone}
        _save(place, {**kept, **{name: [*one.stamp, *row] for name, (one, row) in out.items()}})
    return list(out.values())


def merkle(kind: str, digests: Sequence[str]) -> str:
    """One digest over the digests of ordered parts (a Merkle root of one level)."""
    root = hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()
    return files.digest_json({"kind": kind, "parts": len(digests), "root": root})


def _load(place: Path) -> dict[str, list[Any]]:
    """The stored table; empty when there is none that is whole."""
    try:
        stored = files.parse_json(place.read_bytes())
        if stored["digest"] == files.digest_json(stored["files"]):
            return {str(name): row for name, row in stored["files"].items() if len(row) > 4}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    return {}


def _save(place: Path, table: dict[str, list[Any]]) -> None:
    try:
        text = files.canonical_json(table).decode()  # of a hundred thousand files
        digest = hashlib.sha256(text.encode()).hexdigest()
        files.publish_text(place, f'{{"digest":"{digest}","files":{text}}}\n')
    except (InputError, OSError) as error:
        log.warning("%s could not be stored: files are hashed again next time (%s)", place, error)
