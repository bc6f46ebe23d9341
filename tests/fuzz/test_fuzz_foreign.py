"""Foreign bytes, damaged in every way: errors of packtrain or the truth, in bounded time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from edits import edited, text
from foreign import READERS, VALUES
from limits import bounded, damaged, rounds


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", sorted(READERS))
def test_damaged_bytes(name: str, tmp_path: Path) -> None:
    reader = READERS[name]()
    for seed in reader.seeds:
        reader.read(seed, tmp_path)  # imports and tables that are made once
        with bounded():
            reader.read(seed, tmp_path)
    assert rounds(lambda data: reader.read(data, tmp_path), damaged(reader.seeds)) >= 40


@pytest.mark.parametrize("name", sorted(VALUES))
def test_edited_values(name: str, tmp_path: Path) -> None:
    """Whole JSON and YAML with a value of another kind somewhere, which damaged bytes seldom make."""
    reader = READERS[name]()
    reader.read(reader.seeds[0], tmp_path)
    assert rounds(lambda value: reader.read(text(value), tmp_path), edited(VALUES[name]())) >= 40
