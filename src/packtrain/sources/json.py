"""One JSON array of objects, read by element: the file is never loaded whole.

The elements are found by counting brackets once; a malformed element inside whole brackets is one bad
sample, an array that does not close is a bad source (JSONL is the kinder format).
"""

from __future__ import annotations

from functools import partial

from ._derived import PACKED, open_text

SUFFIXES = tuple(f".json{packed}" for packed in ("", *PACKED))

#: Open a JSON array (or a JSONL file that has been named so).
open_source = partial(open_text, kind="json")
