"""JSON in which no object gives a key twice: which of the two was meant, nobody can say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..errors import SampleError

MOST_RECORD = 1 << 28  # bytes of one record


class Twice(ValueError):
    """An object gives a key twice."""


def loads(text: str | bytes) -> Any:
    """`json.loads`.

    Raises:
        Twice: an object gives a key twice.
        ValueError: the text is no JSON, larger than a record may be, or nested too deeply.
    """
    if len(text) > MOST_RECORD:
        raise ValueError(f"{len(text):,} bytes, a record has at most {MOST_RECORD:,}")
    text = text if isinstance(text, str) else text.decode("utf-8")
    try:
        held, end = _SCAN(text, 0)
    except StopIteration:  # space ahead of it, or no JSON: the decoder says which
        end = -1
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return held if end == len(text) else _DECODER.decode(text)


def record_of(data: bytes, what: str) -> dict[str, Any]:
    """A record of JSON, as UTF-8.

    Raises:
        SampleError: malformed_record; `what` says of what.
    """
    try:
        record = loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise SampleError("malformed_record", f"{what} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise SampleError("malformed_record", f"{what} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise SampleError("malformed_record", f"{what} is {type(record).__name__}, not an object")
    return record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) != len(pairs):
        raise Twice(f"the key {twice(name for name, _ in pairs)!r} twice")
    return held


def twice(names: Iterable[str]) -> str | None:
    """The first name that comes again."""
    return next((name for name, times in Counter(names).items() if times > 1), None)


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
_SCAN: Any = vars(_DECODER)["scan_once"]
