"""Edits of plain JSON, and of every marker of a folder in turn."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from limits import SECONDS, damaged, rounds
from markers import Files

from packtrain.errors import PacktrainError

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**31 - 1, 2**53, 2**63, 2**64, 10**400, 1e308, 0.5, float("nan"),
    float("inf"), "", "x", "\ud800", "\0", "int64", "<V0", "O", "U9999999999", "../other", "/", "a" * 5000,
    [], {}, [[]], {"": []}, [1, 2, 3], [None], {"a": 1}, [0] * 3000, DEEP,
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below the root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, one in inner for path in ((*at, key), *places(one, (*at, key)))]


@st.composite
def edited(draw: st.DrawFn, values: list[Any]) -> Any:
    """One of `values` with one or two places changed."""
    value = copy.deepcopy(draw(st.sampled_from(values)))
    for _ in range(draw(st.integers(1, 2))):
        found = places(value)
        if not found or draw(st.integers(0, 40)) == 0:
            return copy.deepcopy(draw(st.sampled_from(ODD)))
        *way, last = draw(st.sampled_from(found))
        holder = value
        for key in way:
            holder = holder[key]
        kind = draw(st.integers(0, 7))
        if kind == 0:
            del holder[last]
        elif kind == 1 and type(holder[last]) is int:
            holder[last] += draw(st.integers(-3, 3))
        elif kind == 2 and isinstance(holder[last], list):
            holder[last] = (holder[last] * 2)[:: draw(st.sampled_from([1, -1]))]
        elif kind == 3 and isinstance(holder, dict):
            holder[draw(st.sampled_from(["x", "", "schema", "version"]))] = copy.deepcopy(holder[last])
        else:
            holder[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
        if holder is value and len(places(value)) > 5000:
            break
    return value


def text(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 200_000


def edited_files(
    held: Files,
    readers: Sequence[Callable[[Path], None]],
    seconds: float = SECONDS,
    *,
    of: Callable[[Path], bool] = lambda path: path.suffix != ".arrow",
) -> int:
    """All readers of a folder, with one of its files edited or damaged; the number of inputs.

    Args:
        of: the files that are touched.
    """
    for read in readers:
        read(held.folder)
        held.restore()
    markers = {path: data for path, data in held.held.items() if of(path)}

    @st.composite
    def case(draw: st.DrawFn) -> tuple[Path, bytes]:
        path = draw(st.sampled_from(sorted(markers)))
        data = markers[path]
        if path.suffix == ".json" and draw(st.integers(0, 4)):
            return path, text(draw(edited([json.loads(data)])))
        return path, draw(damaged([data]))

    def check(found: tuple[Path, bytes]) -> None:
        try:
            for read in readers:
                held.put(*found)
                with contextlib.suppress(PacktrainError):
                    read(held.folder)
                held.restore()
        finally:
            held.restore()

    return rounds(check, case(), seconds)
