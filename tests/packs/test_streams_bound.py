"""A stream's state belongs to the data that it was saved over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packtrain.data import StreamingPackedDataset, TokenBudgetDataset
from packtrain.errors import ForeignArtefactError, PacktrainError
from packtrain.sources import open_source


def _encode(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [row["n"]] * 8, "labels": [row["n"]] * 8}


def _write(path: Path, numbers: list[int]) -> Path:
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))
    return path


def _open(kind: str, path: Path, shuffle: int) -> Any:
    source = open_source(path)
    if kind == "stream":
        return StreamingPackedDataset(
            source, _encode, pack_length=16, window=4, shuffle_buffer=shuffle, seed=3
        )
    return TokenBudgetDataset(
        source, _encode, micro_batch_size=2, max_seq_len=8, shuffle_buffer=shuffle, seed=3
    )


def _numbers(packs: Any) -> list[int]:
    return [int(sample["input_ids"][0]) for pack in packs for sample in pack]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("shuffle", [0, 8])
@pytest.mark.parametrize("stop", [0, 3, 20])
@pytest.mark.parametrize("kind", ["stream", "token_budget"])
def test_a_state_knows_its_data(kind: str, stop: int, shuffle: int, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", list(range(100, 140)))
    stream = _open(kind, path, shuffle)
    packs = iter(stream)
    head = _numbers(pack for _, pack in zip(range(stop), packs, strict=False))
    if stop == 20:
        assert next(packs, None) is None  # the end of a pass
    state = json.loads(json.dumps(stream.state_dict()))
    assert state["data"]["records"] == 40

    def rest() -> list[int]:
        again = _open(kind, path, shuffle)
        again.load_state_dict(state)
        return _numbers(again)

    whole = rest()
    assert stop == 20 or sorted(head + whole) == list(range(100, 140))
    _write(path, list(range(100, 140)))  # the same bytes again
    assert rest() == whole
    for other in ([*range(100, 139), 999], list(range(139, 99, -1))):
        _write(path, other)
        with pytest.raises(ForeignArtefactError, match="the file changed"):
            rest()
    _write(path, list(range(100, 150)))
    if not shuffle:
        assert sorted(rest() if stop == 20 else head + rest()) == list(range(100, 150))
    elif stop == 3:
        with pytest.raises(PacktrainError, match="extended"):
            rest()
    del state["data"]  # of an earlier version
    _write(path, list(range(200, 240)))
    assert stop == 20 or len(rest()) == len(whole)
