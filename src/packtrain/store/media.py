"""The media table of a lengths folder: which files the lengths were read from.

`media.jsonl` has one row [name, size, header digest] a medium, ascending by name; its digest is part of
the folder's fingerprint. `media_stat.npy` holds their stamps (`files.Stamp`) as they were on this machine: it
is outside every digest and only saves hashing them again.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..errors import FormatError, SampleError
from ..media.location import file_of, identity, is_url, ref_of
from .parts import MediaRow

__all__ = ["changed_media", "read_media", "save_media"]

TABLE = "media.jsonl"
STATS = "media_stat.npy"
_ABSENT = files.Stamp(-1, 0, 0, 0)
_ROWS = 1 << 16  # noted rows in memory at once


def save_media(folder: Path, rows: Iterable[MediaRow], root: str | None) -> str:
    """Write both files; returns the SHA-256 (hex) of the table.

    Args:
        rows: ascending, each once.
        root: folder or URL that relative names start from.
    """
    digest = hashlib.sha256()
    stats = array("q")  # 32 bytes a medium
    with files.publish(folder / TABLE) as handle:
        for row in rows:
            line = (json.dumps(row) + "\n").encode("ascii")
            handle.write(line)
            digest.update(line)
            stats.extend(_stat(row[0], root))
    files.publish_array(folder / STATS, np.asarray(stats, dtype=np.int64).reshape(-1, 4))
    return digest.hexdigest()


def read_media(folder: Path) -> Iterator[MediaRow]:
    """The rows of the table."""
    with open(folder / TABLE, encoding="ascii", errors="replace") as handle:
        for line in handle:
            try:
                name, size, header = json.loads(line)
            except (ValueError, TypeError):
                raise FormatError(
                    f"{folder / TABLE} is torn", hint="measure again with overwrite=True"
                ) from None
            yield str(name), int(size), str(header)


def changed_media(
    folder: Path, root: str | None, *, verify_content: bool = False, noted_only: bool = False
) -> list[str]:
    """Names of media that are no longer what was measured.

    A file whose stamp is as noted is taken as unchanged unless `verify_content`; any other, and
    what lies behind a URL, is identified anew by size and header digest (so a copied or touched file is
    not a change). `noted_only` passes over media without noted size and time: those behind URLs.
    """
    changed: list[str] = []
    noted = _noted(folder)
    plain = "" if root is None or is_url(root) else os.path.join(os.path.abspath(root), "")
    for name, size, header in read_media(folder):
        held = next(noted, _ABSENT)
        same = held[0] >= 0 and held == _stat(name, root, plain)[: len(held)]
        if (same and not verify_content) or (noted_only and held[0] < 0):
            continue
        if _identify(name, root) != (size, header):
            changed.append(name)
    return changed


def _noted(folder: Path) -> Iterator[tuple[int, ...]]:
    """The stamp of each row, as far as it was noted: earlier versions have size and time alone."""
    try:
        stats: NDArray[np.int64] = np.load(folder / STATS, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return
    if stats.ndim == 2 and stats.shape[1] in (2, 4):
        for start in range(0, len(stats), _ROWS):
            for row in stats[start : start + _ROWS].tolist():
                yield tuple(row)


def _stat(name: str, root: str | None, plain: str = "") -> files.Stamp:
    """The stamp of the file, or of the tar that holds it; size -1 when there is none, or a URL.

    Args:
        plain: the root as a prefix: what a plain relative name needs, and most are.
    """
    try:
        if plain and ":" not in name and "!" not in name and not os.path.isabs(name):
            status = os.stat(plain + name)
        else:
            status = os.stat(file_of(ref_of(name, root)))
    except (OSError, ValueError):
        return _ABSENT
    return files.Stamp.of(status)


def _identify(name: str, root: str | None) -> tuple[int, str]:
    try:
        _, size, header = identity(ref_of(name, root), root)
    except SampleError:
        return -1, ""
    return size, header
