"""Damaged files that packtrain made for itself: the cache folder of sources, parts of a measurement."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from limits import damaged, rounds
from markers import Files

from packtrain import files
from packtrain.errors import PacktrainError
from packtrain.extend import Measured
from packtrain.pipeline.measure import measure
from packtrain.sources import open_source, shards

ROWS = [{"text": "w " * (n % 5 + 1), "n": n} for n in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number, row in enumerate(ROWS):
            data = json.dumps(row).encode()
            info = tarfile.TarInfo(f"{number:03d}.json")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


SOURCES = {
    "a.jsonl": LINES,
    "a.json": json.dumps(ROWS).encode(),
    "a.jsonl.gz": gzip.compress(LINES),
    "a.tar": _tar(),
}


@st.composite
def _case(draw: st.DrawFn, held: dict[Path, bytes]) -> tuple[Path, bytes]:
    path = draw(st.sampled_from(sorted(held)))
    return path, draw(damaged([held[path]]))


@pytest.mark.parametrize("name", [*SOURCES, "many", "memory://fuzz/a.jsonl"])
def test_a_damaged_cache_never_becomes_other_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "made"))
    path: Any = tmp_path / name
    if "://" in name:
        path = name
        pytest.importorskip("fsspec").filesystem("memory").pipe("/fuzz/a.jsonl", LINES)
    elif name == "many":  # one table knows them
        monkeypatch.setattr(shards, "MANY", 1)
        path.mkdir()
        for number in range(0, 40, 10):
            lines = LINES.splitlines(keepends=True)[number : number + 10]
            (path / f"{number}.jsonl").write_bytes(b"".join(lines))
    else:
        path.write_bytes(SOURCES[name])
    source = open_source(path)
    fingerprint, records = source.fingerprint, list(source)
    held = Files(tmp_path / "made", tmp_path / "cache")
    monkeypatch.setenv("PACKTRAIN_CACHE", str(held.folder))
    assert open_source(path).fingerprint == fingerprint
    held = Files(held.folder, tmp_path / "again")
    monkeypatch.setenv("PACKTRAIN_CACHE", str(held.folder))

    def check(found: tuple[Path, bytes]) -> None:
        held.put(*found)
        try:
            with contextlib.suppress(PacktrainError):
                again = open_source(path)
                assert again.fingerprint != fingerprint or list(again) == records
        finally:
            held.restore()

    assert rounds(check, _case(held.held)) >= 40


class _Rows:
    fingerprint = "rows"

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return ROWS[index]

    def where(self, index: int) -> str:
        return f"row {index}"


class _Words:
    def encode(self, sample: Any) -> dict[str, Any]:
        return {"input_ids": np.ones(len(sample["text"].split()), dtype=np.int64)}

    def measure(self, sample: Any) -> Measured:
        return Measured(len(sample["text"].split()))

    def config(self) -> dict[str, Any]:
        return {"kind": "words"}


def test_damaged_parts_of_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with the lengths that an undisturbed one has, or says what is damaged."""
    out = tmp_path / "l"
    left = 9  # stopped once, as by Ctrl-C: the claim is given back

    def stop(kind: str, place: Path) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "observer", stop)
    with pytest.raises(KeyboardInterrupt):
        measure(_Rows(), _Words(), out, persist_every=8, workers=1)
    monkeypatch.setattr(files, "observer", None)
    held = Files(out, tmp_path / "stopped")
    assert held.held and not (out / "lengths.json").is_file()
    whole = measure(_Rows(), _Words(), tmp_path / "whole", workers=1).tokens.tolist()

    def check(found: tuple[Path, bytes]) -> None:
        held.put(*found)
        try:
            with contextlib.suppress(PacktrainError):
                assert len(measure(_Rows(), _Words(), held.folder, persist_every=8, workers=1)) == len(whole)
        finally:
            shutil.rmtree(held.folder)
            held.restore()

    assert rounds(check, _case(held.held)) >= 40
