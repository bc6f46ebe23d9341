"""The lengths folder: round trip, fingerprints, torn files, crash law."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.errors import ChecksumError, ForeignArtefactError, FormatError
from packtrain.store import lengths as store
from packtrain.testing import crash_points, snapshot

MADE = pt.Lengths(
    [3, 0, 5, 9], costs={"images": [1, 0, 2, 0]}, status=[0, 0, 2, 0], reasons={2: "missing_media"}
)


def test_round_trip(tmp_path: Path) -> None:
    MADE.save(tmp_path, fingerprint="abc", template={"name": "x"}, origin={"path": "train.jsonl"})
    loaded, marker = store.read(tmp_path)
    assert loaded == MADE and loaded.reasons == MADE.reasons and loaded.status.tolist() == [0, 1, 2, 0]
    assert marker["fingerprint"] == "abc" and marker["template"] == {"name": "x"} and marker["n"] == 4
    assert isinstance(loaded.tokens, np.memmap) and isinstance(loaded.status, np.memmap)
    assert pt.plan(loaded, 9) == pt.plan(MADE, 9) and store.verify(tmp_path) == MADE
    assert pt.Lengths.load(tmp_path) == MADE
    pt.Lengths([]).save(tmp_path / "none")
    assert len(pt.Lengths.load(tmp_path / "none")) == 0


def test_other_lengths_are_refused(tmp_path: Path) -> None:
    MADE.save(tmp_path, fingerprint="abc")
    before = snapshot(tmp_path)
    MADE.save(tmp_path, fingerprint="abc")
    assert snapshot(tmp_path) == before
    with pytest.raises(ForeignArtefactError, match="fingerprint differ"):
        MADE.save(tmp_path, fingerprint="other")
    with pytest.raises(ForeignArtefactError, match="n, digest differ"):
        pt.Lengths([1]).save(tmp_path, fingerprint="abc")
    pt.Lengths([1]).save(tmp_path, overwrite=True)
    assert pt.Lengths.load(tmp_path).tokens.tolist() == [1]


def test_torn_files_are_named(tmp_path: Path) -> None:
    MADE.save(tmp_path)
    good = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("tokens.npy", "images.npy", "status.npy", "reasons.jsonl"):
        for data in (None, good[name][:-1]):
            for held, content in good.items():
                (tmp_path / held).write_bytes(content)
            if data is None:
                (tmp_path / name).unlink()
            elif name == "reasons.jsonl":
                (tmp_path / name).write_bytes(b"[2, ")
            else:
                (tmp_path / name).write_bytes(data)
            with pytest.raises(FormatError, match=name.replace(".", r"\.")):
                pt.Lengths.load(tmp_path)


def test_changed_bytes_are_found_by_verify(tmp_path: Path) -> None:
    MADE.save(tmp_path)
    data = bytearray((tmp_path / "tokens.npy").read_bytes())
    data[-1] ^= 1
    (tmp_path / "tokens.npy").write_bytes(bytes(data))
    with pytest.raises(ChecksumError, match=r"tokens\.npy"):
        store.verify(tmp_path)


def test_crash_law(tmp_path: Path) -> None:
    assert crash_points(lambda folder: MADE.save(folder, fingerprint="abc"), tmp_path) > 15
