"""JSON Lines: one object per line. Blank lines, CRLF, a BOM and a missing last newline are fine.

A bad line is one bad sample (`malformed_record`, named by its line), never a bad source.
"""

from __future__ import annotations

import os

from ._derived import open_text
from ._index import KEEP
from ._records import RecordFile

PACKED = (".gz", ".zst", ".bz2", ".xz")
SUFFIXES = tuple(name + packed for name in (".jsonl", ".ndjson", ".jsonlines") for packed in ("", *PACKED))


def open_source(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    verify_content: bool = False,
    keep: int = KEEP,
) -> RecordFile:
    """Open a JSONL file (or a JSON array that has been named so). A compressed one is
    unpacked into the cache folder first (`_derived`). See `_records.open_records`."""
    return open_text(
        path, "jsonl", open_source, cache_dir=cache_dir, verify_content=verify_content, keep=keep
    )
