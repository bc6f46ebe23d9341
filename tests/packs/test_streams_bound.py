"""A stream's state belongs to the data that it was saved over."""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from packtrain.data import StreamingPackedDataset, TokenBudgetDataset, WeightedSources
from packtrain.errors import ForeignArtefactError, PacktrainError
from packtrain.sources import open_source

pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


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


def _mixture(folder: Path, shuffle: int = 0, **how: Any) -> Any:
    held = {name: open_source(folder / f"{name}.jsonl") for name in ("a", "b")}
    mixed = WeightedSources(held, how.pop("weights", {"a": 1, "b": 2}), **how)
    return StreamingPackedDataset(mixed, _encode, pack_length=16, window=4, shuffle_buffer=shuffle, seed=3)


@pytest.mark.parametrize("shuffle", [0, 8])
@pytest.mark.parametrize("stopping", ["first", "all", "never"])
def test_a_state_of_a_mixture_knows_the_data_of_its_parts(
    stopping: str, shuffle: int, tmp_path: Path
) -> None:
    a, b = _write(tmp_path / "a.jsonl", [*range(100, 120)]), _write(tmp_path / "b.jsonl", [*range(200, 260)])

    def mixed(**how: Any) -> Any:
        return _mixture(tmp_path, shuffle, **{"stopping": stopping, **how})

    stream = mixed()
    packs = iter(stream)
    head = _numbers(next(packs) for _ in range(3))
    state = json.loads(json.dumps(stream.state_dict()))

    def rest(**how: Any) -> list[int]:
        again = mixed(**how)
        again.load_state_dict(state)
        return _numbers(itertools.islice(again, 20))

    whole = rest()
    assert whole == _numbers(itertools.islice(packs, 20))
    stamp = b.stat()
    _write(b, [*range(200, 259), 999])  # of the same size and time
    os.utime(b, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(ForeignArtefactError, match=r"the file changed: .* 60 records of"):
        rest()
    for longer in (a, b):
        _write(a, [*range(100, 120)]), _write(b, [*range(200, 260)])
        with longer.open("a") as file:
            file.write('{"n": 300}\n')
        if stopping == "first":
            assert set(head + rest()) <= {*range(100, 120), *range(200, 260), 300}
            continue
        with pytest.raises(ForeignArtefactError, match="it comes again at other places"):
            rest()
    _write(b, [*range(200, 260)])
    with pytest.raises(ForeignArtefactError, match=r"of weights a 1, b 2, this one a 1, b 3"):
        rest(weights={"a": 1, "b": 3})
    other = "all" if stopping == "first" else "first"
    with pytest.raises(ForeignArtefactError, match=f"of stopping '{stopping}', this one '{other}'"):
        rest(stopping=other)
    del state["data"]  # of an earlier version
    assert rest() == whole


def test_a_mixture_of_mixtures_and_of_samples_in_memory(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", [*range(100, 120)])
    rows = [{"n": n} for n in range(20)]

    def stream(rows: list[Any]) -> Any:
        inner = WeightedSources({1: open_source(tmp_path / "a.jsonl"), 2: rows}, stopping="all")
        mixed = WeightedSources({"inner": inner, "function": lambda: iter(rows[:20])}, stopping="all")
        return StreamingPackedDataset(mixed, _encode, pack_length=16, window=4)

    state = json.loads(json.dumps(stream(rows).state_dict()))
    assert state["data"]["sources"]["inner"]["sources"]["2"] == {"records": 20}
    stream(rows).load_state_dict(state)
    with pytest.raises(ForeignArtefactError, match="source inner had 40 samples"):
        stream([*rows, *rows]).load_state_dict(state)
    _write(tmp_path / "a.jsonl", [*range(100, 119), 999])
    with pytest.raises(ForeignArtefactError, match="the file changed"):
        stream(rows).load_state_dict(state)
    for edited in (
        {"weights": None, "stopping": None},
        {"fingerprint": "ab"},
        {**state["data"], "sources": 3},
    ):
        if edited.get("sources") != 3:
            with pytest.raises(ForeignArtefactError):
                stream(rows).load_state_dict({**state, "data": edited})
        else:
            stream(rows).load_state_dict({**state, "data": edited})


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_files_that_came_behind_the_others_are_read_on(kind: str, tmp_path: Path) -> None:
    def write(name: str, numbers: Iterable[int]) -> None:
        path = tmp_path / "set" / f"{name}.{kind}"
        path.parent.mkdir(exist_ok=True)
        if kind == "jsonl":
            _write(path, [*numbers])
        elif kind == "parquet":
            pq.write_table(pa.table({"n": [*numbers]}), path)
        else:
            with tarfile.open(path, "w") as file:
                for n in numbers:
                    row = tarfile.TarInfo(f"{n}.json")
                    data = json.dumps({"messages": [], "n": n}).encode()
                    row.size = len(data)
                    file.addfile(row, io.BytesIO(data))

    def opened(shuffle: int = 0) -> Any:
        return _open("stream", tmp_path / "set", shuffle)

    write("p1", range(100, 120)), write("p2", range(120, 140))
    stream = opened()
    packs = iter(stream)
    head = _numbers(next(packs) for _ in range(3))
    state = json.loads(json.dumps(stream.state_dict()))
    shuffled = json.loads(json.dumps(opened(8).state_dict()))
    write("p3", range(140, 150))
    again = opened()
    again.load_state_dict(state)
    assert sorted(head + _numbers(again)) == [*range(100, 150)]
    (tmp_path / "set" / f"p3.{kind}").rename(tmp_path / "set" / f"p0.{kind}")
    with pytest.raises(ForeignArtefactError, match="the file changed"):
        opened().load_state_dict(state)
    (tmp_path / "set" / f"p0.{kind}").unlink()
    opened(8).load_state_dict(shuffled)
    write("p2", range(120, 139))
    with pytest.raises(ForeignArtefactError, match=r"over 40 records .* 39 (records|samples)"):
        opened().load_state_dict(state)
