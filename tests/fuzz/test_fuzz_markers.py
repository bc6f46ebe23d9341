"""Edited markers and states: whatever stands in them, what reads them ends in an error of packtrain, soon."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from limits import SECONDS, damaged, rounds
from markers import FOLDERS, GOLDEN, Files, cursor, golden, orders, streams

from packtrain.errors import PacktrainError

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**31 - 1, 2**53, 2**63, 2**64, 10**400, 1e308, 0.5, float("nan"),
    float("inf"), "", "x", "\ud800", "\0", "int64", "<V0", "O", "U9999999999", "../other", "/", "a" * 5000,
    [], {}, [[]], {"": []}, [1, 2, 3], [None], {"a": 1}, [0] * 3000, DEEP,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


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


MARKERS = sorted(
    path.relative_to(GOLDEN / "folders").as_posix()
    for path in (GOLDEN / "folders").rglob("*")
    if path.is_file() and (path.suffix in (".json", ".jsonl", ".npy") or path.suffix not in (".arrow",))
)


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_edited_folders(name: str, tmp_path: Path) -> None:
    """Every marker of a folder in turn, with a value changed or bytes damaged."""
    held = Files(GOLDEN / "folders" / name, tmp_path / name)
    for read in FOLDERS[name]:
        read(held.folder)
        held.restore()
    markers = {path: data for path, data in held.held.items() if path.suffix != ".arrow"}

    @st.composite
    def case(draw: st.DrawFn) -> tuple[Path, bytes]:
        path = draw(st.sampled_from(sorted(markers)))
        data = markers[path]
        if path.suffix == ".json" and draw(st.integers(0, 4)):
            return path, text(draw(edited([json.loads(data)])))
        return path, draw(damaged([data]))

    def check(found: tuple[Path, bytes]) -> None:
        try:
            for read in FOLDERS[name]:
                held.put(*found)
                with contextlib.suppress(PacktrainError):
                    read(held.folder)
                held.restore()
        finally:
            held.restore()

    assert rounds(check, case(), 2 * SECONDS) >= 40


def test_edited_positions() -> None:
    saved, read = orders()
    assert rounds(read, edited(saved)) >= 40


@pytest.mark.parametrize("name", sorted(golden.stream_kinds()))
def test_edited_streams(name: str) -> None:
    saved, read = streams(name)
    assert rounds(read, edited(saved)) >= 40


def test_edited_cursors(tmp_path: Path) -> None:
    held = Files(GOLDEN / "folders" / "growing", tmp_path / "growing")
    saved, read = cursor(held.folder)
    assert rounds(read, edited(saved)) >= 40
