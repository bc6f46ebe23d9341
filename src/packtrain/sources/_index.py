"""The persisted byte-offset index of a record file: where each record starts.

One file, `.NAME.packtrain-index`, beside the source; where its folder is read-only (by its mode, by its
file system or by permission) in the cache folder under the digest of the source's absolute path. Layout:

    8 bytes magic · 4 bytes header length · JSON header · int64 starts[n+1] · int64 gaps[g]

Record i is `source[starts[i]:starts[i+1]]`, white space and separators included. `gaps` names the record
before which each blank line stands, so line numbers need no scan. The header carries size, mtime_ns and
SHA-256 of the source and a CRC of the arrays. An index that is torn, of another version, or made for
another size or mtime is built again: a corrupted index never becomes wrong records. Reopening costs a
stat and this check; the source itself is hashed only when it is indexed, or with `verify_content`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files, world
from ..errors import InputError, SourceError
from ._handles import Pinned, read

__all__ = ["Built", "Index", "load", "pin", "store_places"]

log = logging.getLogger(__name__)

MAGIC = b"ptindex\1"
KEEP = 1 << 20  # arrays up to this many bytes stay in memory; larger ones are read 16 bytes at a time

I64 = NDArray[np.int64]


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


def store_places(
    path: str | os.PathLike[str], name: str, cache_dir: str | os.PathLike[str] | None = None
) -> list[Path]:
    """Where what is known about `path` may be stored, in order of preference.

    Args:
        path: the source: a file, or a folder.
        name: file name of what is stored.
        cache_dir: default `world.cache_dir()`.

    Returns:
        The place beside a file (in a folder) first, if it may be written there, then the cache folder.
    """
    source = Path(os.path.abspath(os.fspath(path)))
    folder = source if source.is_dir() else source.parent
    root = Path(cache_dir) if cache_dir is not None else world.cache_dir()
    key = hashlib.sha256(os.fsencode(str(source))).hexdigest()[:32]
    cached = root / "index" / f"{key}{name[name.rindex('.') :]}"
    return [folder / name, cached] if _writable(folder) else [cached]


def load(
    source: Pinned,
    kind: str,
    build: Callable[[Pinned], Built],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
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
    name = os.path.basename(source.path)
    places = store_places(source.path, f".{name}.packtrain-index", cache_dir)
    beside = Path(source.path).with_name(f".{name}.packtrain-index")
    for path in dict.fromkeys([*places, beside]):  # a read-only folder may have come with its index
        index = _read(path, source, kind, keep)
        if index is not None and (not verify or files.sha256_file(source.path) == index.sha256):
            return index
    log.info("indexing %s", source.path)
    built = build(source)
    header = {
        "kind": kind,
        "size": source.size,
        "mtime_ns": source.mtime_ns,
        "sha256": built.sha256,
        "records": len(built.starts) - 1,
        "gaps": len(built.gaps),
    }
    for path in places:
        try:
            _write(path, header, built)
        except (InputError, OSError) as error:
            log.debug("no index at %s: %s", path, error)
            continue
        index = _read(path, source, kind, keep)
        if index is not None:
            return index
    log.warning("the index of %s could not be stored: it will be built again next time", source.path)
    return Index(header["records"], built.sha256, built.starts, built.gaps, None, 0)  # type: ignore[arg-type]


def _write(path: Path, header: dict[str, Any], built: Built) -> None:
    starts = np.ascontiguousarray(built.starts, dtype="<i8")
    gaps = np.ascontiguousarray(built.gaps, dtype="<i8")
    header = {**header, "crc": zlib.crc32(gaps.data, zlib.crc32(starts.data))}
    text = files.canonical_json(header)
    text += b" " * (-(len(MAGIC) + 4 + len(text)) % 8)  # the arrays start on a multiple of 8
    with files.publish(path) as handle:
        handle.write(MAGIC + struct.pack("<L", len(text)) + text)
        handle.write(starts.data)
        handle.write(gaps.data)


def _read(path: Path, source: Pinned, kind: str, limit: int) -> Index | None:
    """The index stored at `path` when it is whole and made for this source, else None."""
    try:
        with open(path, "rb") as handle:
            status = os.fstat(handle.fileno())
            if handle.read(len(MAGIC)) != MAGIC:
                return None
            length = struct.unpack("<L", handle.read(4))[0]
            header = json.loads(handle.read(length)) if length < 1 << 16 else None
            if not isinstance(header, dict):
                return None
            same = (header.get("kind"), header.get("size"), header.get("mtime_ns")) == (
                kind,
                source.size,
                source.mtime_ns,
            )
            count, extra = header.get("records"), header.get("gaps")
            base = len(MAGIC) + 4 + length
            if not same or not isinstance(count, int) or not isinstance(extra, int):
                return None
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
    except (OSError, ValueError, struct.error):
        return None
    starts = np.frombuffer(b"".join(kept), dtype="<i8").astype(np.int64) if keep else None
    pinned = Pinned(str(path), status.st_size, status.st_mtime_ns)
    return Index(count, str(header.get("sha256")), starts, gaps, pinned, base)


def _writable(folder: Path) -> bool:
    """Whether a file may be put in `folder`; a mode that lets nobody write binds root too."""
    with contextlib.suppress(OSError):
        mode = folder.stat().st_mode
        if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            return False
        return os.access(folder, os.W_OK)
    return False


def pin(path: str | os.PathLike[str]) -> Pinned:
    """The file as it is now, by its absolute path."""
    full = os.path.abspath(os.fspath(path))
    try:
        status = os.stat(full)
    except OSError as error:
        raise SourceError(f"{full} cannot be opened: {error.strerror}") from None
    return Pinned(full, status.st_size, status.st_mtime_ns)
