"""Text of compressed files (gzip, bzip2, xz, zstd), block by block."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from typing import Any

from ..errors import MissingExtraError, SourceError

BLOCK = 1 << 20
_TIMES, _FREE = 1000, 1 << 30  # gzip reaches 1,032 times on one byte repeated, text some 20
_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def kind_of(head: bytes) -> str | None:
    """The compression by magic bytes, or None."""
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
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise SourceError(
            f"{path} is cut short or broken {kind}: {error}", hint="copy it again; nothing of it was used"
        ) from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise SourceError(f"{path} is broken zstd: {error}", hint="copy it again") from None


def _open(path: str, kind: str) -> Any:
    if kind == "gzip":
        return gzip.open(path, "rb")
    if kind == "bzip2":
        return bz2.open(path, "rb")
    if kind == "xz":
        return lzma.open(path, "rb")
    try:
        import zstandard
    except ImportError:
        raise MissingExtraError("zstandard", "zstd") from None
    return _Zstd(zstandard, path)


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
