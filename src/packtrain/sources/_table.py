"""Content digests of a source's files, kept so that reopening hashes only what has changed.

A table `name -> [size, mtime_ns, SHA-256]` is stored in the folder of the files, or in the cache folder
where that is read-only. A torn or foreign table is ignored. A file whose size and time are as noted is not
read again unless `verify`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InputError, SourceError
from ._index import store_places

__all__ = ["Digested", "digest_files", "load_table", "merkle", "save_table"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Digested:
    """One file as it was when it was hashed."""

    path: str
    size: int
    mtime_ns: int
    sha256: str

    def check(self) -> None:
        """The file is still the one that was hashed.

        Raises:
            SourceError: it is gone or has changed.
        """
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise SourceError(f"{self.path} is gone since it was opened: {error.strerror}") from None
        if (status.st_size, status.st_mtime_ns) != (self.size, self.mtime_ns):
            raise SourceError(
                f"{self.path} changed after it was opened ({self.size} bytes then, {status.st_size} now)",
                hint="open the source again: its lengths and plan must be made anew",
            )


def digest_files(
    paths: Sequence[str],
    root: str,
    table: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    verify: bool = False,
) -> list[Digested]:
    """The files with their content digests.

    Args:
        paths: absolute.
        root: folder that names in the table are relative to; the table is stored there.
        table: file name of the table, `.packtrain-…`.
        cache_dir: cache folder for a root that is read-only.
        verify: hash every file again.

    Raises:
        SourceError: a file is missing, or changes while it is read.
    """
    places = store_places(root, table, cache_dir)
    known = {} if verify else load_table(places)
    out: list[Digested] = []
    fresh = 0
    for path in paths:
        name = os.path.relpath(path, root)
        before = _stat(path)
        noted = known.get(name)
        if noted is not None and noted[:2] == list(before):
            out.append(Digested(path, *before, str(noted[2])))
            continue
        fresh += 1
        log.info("hashing %s", path)
        try:
            digest = files.sha256_file(path)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error.strerror}") from None
        if _stat(path) != before:
            raise SourceError(f"{path} changed while it was read", hint="open it again")
        out.append(Digested(path, *before, digest))
    if fresh or len(known) != len(out):
        save_table(places, {os.path.relpath(f.path, root): [f.size, f.mtime_ns, f.sha256] for f in out})
    return out


def merkle(kind: str, digests: Sequence[str]) -> str:
    """One digest over the digests of ordered parts (a Merkle root of one level)."""
    root = hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()
    return files.digest_json({"kind": kind, "parts": len(digests), "root": root})


def load_table(places: Sequence[Path]) -> dict[str, list[Any]]:
    """The stored table; empty when there is none that is whole."""
    for path in places:
        try:
            stored = json.loads(path.read_bytes())
            if stored["digest"] == files.digest_json(stored["files"]):
                return dict(stored["files"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def save_table(places: Sequence[Path], table: dict[str, list[Any]]) -> None:
    """Store a table at the first place that takes it."""
    for path in places:
        try:
            files.publish_json(path, {"digest": files.digest_json(table), "files": table})
            return
        except (InputError, OSError) as error:
            log.debug("no table at %s: %s", path, error)
    log.warning("the table of %s could not be stored: files are hashed again next time", places[0].parent)


def _stat(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(f"{path} cannot be opened: {error.strerror}") from None
    return status.st_size, status.st_mtime_ns
