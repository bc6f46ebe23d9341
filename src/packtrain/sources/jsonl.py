"""JSON Lines: one object per line. Blank lines, CRLF, a BOM and a missing last newline are fine.

A bad line is one bad sample (`malformed_record`, named by its line), never a bad source.
"""

from __future__ import annotations

from functools import partial

from ._derived import PACKED, open_text

SUFFIXES = tuple(name + packed for name in (".jsonl", ".ndjson", ".jsonlines") for packed in ("", *PACKED))

#: Open a JSONL file (or a JSON array that has been named so).
open_source = partial(open_text, kind="jsonl")
