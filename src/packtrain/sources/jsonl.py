"""JSON Lines: one object per line. Blank lines, CRLF, a BOM and a missing last newline are fine.

A bad line is one bad sample (`malformed_record`, named by its line), never a bad source.
"""

from __future__ import annotations

import os

from ._records import RecordFile, open_records

__all__ = ["SUFFIXES", "open_source"]

SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")


def open_source(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    verify_content: bool = False,
) -> RecordFile:
    """Open a JSONL file (or a JSON array that has been named so). See `_records.open_records`."""
    return open_records(path, "jsonl", cache_dir=cache_dir, verify_content=verify_content)
