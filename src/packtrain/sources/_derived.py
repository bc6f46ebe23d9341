"""JSONL files made once, in the cache folder, from a source of another layout or a compressed one.

A compressed JSONL has no byte ranges, and one COCO file is a single object: both become a JSONL of records in
`CACHE/derived/`, named by the content it was made from and the options that shape it, and read as any is.
It takes the disk space of the unpacked text (deleting it costs nothing but making it again) and needs the
whole original only once. Made files are published whole, so two processes may make one at the same time.

A `Derived` source travels to other processes by the path of the *original*: a worker on another machine
makes its own copy, and refuses if it is not the same content.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import files, world
from ..errors import SourceError, optional
from ..files import StrPath
from . import _index
from ._handles import Pinned
from ._index import digest_files
from ._records import RecordFile, open_records

# --------------------------------------------------------------------------------------------
# Text of compressed files (gzip, bzip2, xz, zstd), block by block
# --------------------------------------------------------------------------------------------
PACKED = (".gz", ".zst", ".bz2", ".xz")  # suffixes
BLOCK = 1 << 20
_TIMES, _FREE = 1000, 1 << 30  # gzip reaches 1,032 times on one byte repeated, text some 20
_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError)


def kind_of(head: bytes) -> str | None:
    """The compression by magic bytes, or None. Files of pzstd begin with a frame to skip."""
    if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:
        return "zstd"
    return next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), None)


def unpack(path: str, kind: str) -> Iterator[bytes]:
    """The content of a compressed file.

    Raises:
        SourceError: cut short, broken, or it unpacks to a size that no text has; nothing of it is used then.
        MissingExtraError: zstandard is not installed.
    """
    try:
        most, size = max(_FREE, _TIMES * os.path.getsize(path)), 0
        with _open(path, kind) as handle:
            while block := handle.read(BLOCK):
                size += len(block)
                if size > most:
                    raise SourceError(
                        f"{path} unpacks to more than {_TIMES:,} times its size: it is no text",
                        hint="unpack it yourself if it is to be trusted",
                    )
                yield block
    except Exception as error:
        if not isinstance(error, _BROKEN) and type(error).__name__ != "ZstdError":
            raise
        raise SourceError(
            f"{path} is cut short or broken {kind}: {error}", hint="copy it again; nothing of it was used"
        ) from None


def _open(path: str, kind: str) -> Any:
    if kind == "zstd":
        return _Zstd(optional("zstandard", "zstandard", "zstd"), path)
    module: Any = {"gzip": gzip, "bzip2": bz2, "xz": lzma}[kind]
    return module.open(path, "rb")


_PIECE = 2048  # compressed bytes at once: of zeros these are 64 MiB


class _Zstd:
    """A zstd file of one or more frames; one that ends inside a frame is an error, not an end."""

    def __init__(self, zstandard: Any, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._zstandard = zstandard
        self._object = zstandard.ZstdDecompressor().decompressobj()
        self._rest = memoryview(b"")
        self._inside = False

    def __enter__(self) -> _Zstd:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, count: int) -> bytes:
        parts: list[bytes] = []
        got = 0
        while got < count:
            if not self._rest:
                self._rest = memoryview(self._file.read(count))
            data, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
            if not data:
                if self._inside:
                    raise EOFError("it ends inside a frame")
                break
            if not self._inside:
                self._object = self._zstandard.ZstdDecompressor().decompressobj()
                self._inside = True
            out: bytes = self._object.decompress(data)
            if self._object.eof:
                left = len(self._object.unused_data)
                if left:
                    self._rest = memoryview(b"".join((data[-left:], self._rest)))
                self._inside = False
            parts.append(out)
            got += len(out)
        return b"".join(parts)


# --------------------------------------------------------------------------------------------
# JSONL files made once, in the cache folder, from a source of another layout or a compressed one
# --------------------------------------------------------------------------------------------
class Derived(RecordFile):
    """Records of a made file, spoken of by the name and place of the original."""

    def __init__(
        self, made: RecordFile, origin: Pinned, reopen: tuple[Callable[..., Any], dict[str, Any]]
    ) -> None:
        super().__init__(made._file, made._kind, made._index, made._cache_dir)
        self._reopen = reopen
        self.path = origin.path
        self.folder, self._name = os.path.split(origin.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._reopen[0], self.path, self._reopen[1], self.fingerprint)


def _reopen(open_source: Callable[..., Any], path: str, options: Mapping[str, Any], fingerprint: str) -> Any:
    source = open_source(path, **options)
    if source.fingerprint != fingerprint:
        raise SourceError(
            f"{path} changed after it was opened",
            hint="open the source again: its lengths and plan must be made anew",
        )
    return source


def digest_one(path: str, *, cache_dir: StrPath | None = None, verify: bool = False) -> Pinned:
    """One file with its digest."""
    full = _index.pin(path).path  # says what is missing
    table = ".packtrain-packed"
    return digest_files([full], os.path.dirname(full), table, cache_dir=cache_dir, verify=verify)[0]


def derive(
    origin: Pinned,
    options: Mapping[str, Any],
    make: Callable[[], Iterable[bytes]],
    cache_dir: StrPath | None,
    kind: str = "jsonl",
    keep: int = _index.KEEP,
) -> RecordFile:
    """The made file of an original, made now where it is not there.

    Args:
        origin: the original and its digest.
        options: plain JSON; what shapes the made file beside the content.
        make: gives the bytes of the made file, block by block.
        cache_dir: cache folder.
        kind: layout of the made file, "jsonl" or "json" (its content may say otherwise).
        keep: bytes of its index that may stay in memory.
    """
    key = files.digest_json({"sha256": origin.sha256, "options": dict(options)})
    place = Path(cache_dir or world.cache_dir()) / "derived" / f"{key}.jsonl"
    if not place.is_file():
        with files.publish(place) as handle:
            for block in make():
                handle.write(block)
    return open_records(place, kind, cache_dir=cache_dir, keep=keep)


def open_text(
    path: StrPath,
    *,
    kind: str,
    cache_dir: StrPath | None = None,
    verify_content: bool = False,
    keep: int = _index.KEEP,
) -> RecordFile:
    """A file of JSON records; a compressed one is unpacked into the cache folder first.

    Args:
        path: the file.
        kind: "jsonl" or "json": what its name promises.
        cache_dir: cache folder.
        verify_content: hash the file again instead of trusting its size and time.
        keep: bytes of its index that may stay in memory.

    Raises:
        SourceError: missing, empty, broken, not a list of records.
    """
    text = os.fspath(path)
    packed = None
    if os.path.isfile(text):
        with open(text, "rb") as handle:
            packed = kind_of(handle.read(8))
    if packed is None:
        return open_records(path, kind, cache_dir=cache_dir, verify_content=verify_content, keep=keep)
    origin = digest_one(text, cache_dir=cache_dir, verify=verify_content)
    made = derive(origin, {"unpack": packed}, lambda: unpack(origin.path, packed), cache_dir, kind, keep)
    return Derived(made, origin, (open_text, {"kind": kind, "cache_dir": cache_dir}))
