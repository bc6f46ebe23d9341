"""One JSON array of objects, read by element: the file is never loaded whole.

The elements are found by counting brackets once; a malformed element inside whole brackets is one bad
sample, an array that does not close is a bad source (JSONL is the kinder format).
"""

from __future__ import annotations

import os

from ._records import RecordFile, open_records

__all__ = ["SUFFIXES", "open_source"]

SUFFIXES = (".json",)


def open_source(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    verify_content: bool = False,
) -> RecordFile:
    """Open a JSON array (or a JSONL file that has been named so). See `_records.open_records`."""
    return open_records(path, "json", cache_dir=cache_dir, verify_content=verify_content)
