"""JSONL files that are made once from a source of another layout, in the cache folder.

A compressed JSONL has no byte ranges, and one COCO file is a single object: both become a JSONL of records in
`CACHE/derived/`, named by the content it was made from and the options that shape it, and read as any is.
It takes the disk space of the unpacked text (deleting it costs nothing but making it again) and needs the
whole original only once. Made files are published whole, so two processes may make one at the same time.

A `Derived` source travels to other processes by the path of the *original*: a worker on another machine
makes its own copy, and refuses if it is not the same content.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import files, world
from ..errors import SourceError
from . import _index
from ._handles import Pinned
from ._packed import kind_of, unpack
from ._records import RecordFile, open_records
from ._table import digest_files


class Derived(RecordFile):
    """Records of a made file, spoken of by the name and place of the original."""

    def __init__(
        self, made: RecordFile, origin: Pinned, reopen: tuple[Callable[..., Any], dict[str, Any]]
    ) -> None:
        super().__init__(made._file, made._kind, made._index, made._cache_dir)
        self._origin = origin
        self._reopen = reopen
        self._name = os.path.basename(origin.path)

    @property
    def path(self) -> str:
        """Absolute path of the original."""
        return self._origin.path

    @property
    def folder(self) -> str:
        return os.path.dirname(self._origin.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._reopen[0], self._origin.path, self._reopen[1], self.fingerprint)


def _reopen(open_source: Callable[..., Any], path: str, options: Mapping[str, Any], fingerprint: str) -> Any:
    source = open_source(path, **options)
    if source.fingerprint != fingerprint:
        raise SourceError(
            f"{path} changed after it was opened",
            hint="open the source again: its lengths and plan must be made anew",
        )
    return source


def digest_one(path: str, *, cache_dir: str | os.PathLike[str] | None = None, verify: bool = False) -> Pinned:
    """One file with its digest."""
    full = _index.pin(path).path  # says what is missing
    table = ".packtrain-packed"
    return digest_files([full], os.path.dirname(full), table, cache_dir=cache_dir, verify=verify)[0]


def store_place(key: str, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where the made file with this key lies."""
    root = Path(cache_dir) if cache_dir is not None else world.cache_dir()
    return root / "derived" / f"{key}.jsonl"


def derive(
    origin: Pinned,
    options: Mapping[str, Any],
    make: Callable[[], Iterable[bytes]],
    cache_dir: str | os.PathLike[str] | None,
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
    place = store_place(key, cache_dir)
    if not place.is_file():
        with files.publish(place) as handle:
            for block in make():
                handle.write(block)
    return open_records(place, kind, cache_dir=cache_dir, keep=keep)


def open_text(
    path: str | os.PathLike[str],
    kind: str,
    open_source: Callable[..., Any],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    verify_content: bool = False,
    keep: int = _index.KEEP,
) -> RecordFile:
    """A file of JSON records, compressed or not.

    Args:
        path: the file.
        kind: "jsonl" or "json": what its name promises.
        open_source: the plug-in's function, by which another process opens the original again.
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
    return Derived(made, origin, (open_source, {"cache_dir": cache_dir}))
