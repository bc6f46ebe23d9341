"""One JSON array of objects, read by element: the file is never loaded whole.

The elements are found by counting brackets once; a malformed element inside whole brackets is one bad
sample, an array that does not close is a bad source (JSONL is the kinder format).
"""

from __future__ import annotations

import os

from ._derived import open_text
from ._index import KEEP
from ._records import RecordFile

PACKED = (".gz", ".zst", ".bz2", ".xz")
SUFFIXES = tuple(name + packed for name in (".json",) for packed in ("", *PACKED))


def open_source(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    verify_content: bool = False,
    keep: int = KEEP,
) -> RecordFile:
    """Open a JSON array (or a JSONL file that has been named so). A compressed one is
    unpacked into the cache folder first (`_derived`). See `_records.open_records`."""
    return open_text(path, "json", open_source, cache_dir=cache_dir, verify_content=verify_content, keep=keep)
