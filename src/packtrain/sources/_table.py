"""Content digests of a source's files, kept so that reopening hashes only what has changed.

A table `name -> [size, mtime_ns, ctime_ns, inode, SHA-256]` is stored in the cache folder. A torn or foreign
table is ignored. A file whose stamp is as noted is not read again unless `verify`. One with other content
under the same name is told, and so is one that is gone.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InputError, SourceError, counted
from ._handles import Pinned
from ._index import cached, pinned

log = logging.getLogger(__name__)

_LOOKED_AT = 1024  # files that were read before and are not asked for now: are they still there?


def digest_files(
    paths: Sequence[str],
    root: str,
    table: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    verify: bool = False,
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
    cache_dir: str | os.PathLike[str] | None = None,
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
    others = islice(known, _LOOKED_AT)
    gone = [name for name in others if not os.path.lexists(os.path.join(root, name))]
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
