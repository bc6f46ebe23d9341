"""Edited markers and states: whatever stands in them, what reads them ends in an error of packtrain, soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from edits import edited, edited_files
from limits import SECONDS, rounds
from markers import FOLDERS, GOLDEN, Files, cursor, golden, orders, split_streams, streams


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_edited_folders(name: str, tmp_path: Path) -> None:
    """Every marker of a folder in turn, with a value changed or bytes damaged."""
    held = Files(GOLDEN / "folders" / name, tmp_path / name)
    assert edited_files(held, FOLDERS[name], 2 * SECONDS) >= 40


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


@pytest.mark.parametrize("name", ["stream", "budget", "weighted"])
def test_edited_states_of_split_streams(name: str) -> None:
    """The states of all readers of an elastic stream, one of them edited, on other ranks."""
    saved, read = split_streams(name)
    assert rounds(read, edited(saved)) >= 40
