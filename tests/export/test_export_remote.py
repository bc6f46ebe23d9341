"""Exports behind URLs: the packs of the folder, fetched as they are read; damage and changes are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_sets import Set
from test_export_laws import FORMATS, write

from packtrain.data import open_packs
from packtrain.errors import ChecksumError, FormatError
from packtrain.remote import copies
from remote_site import afresh, empty_memory, in_memory

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    afresh(tmp_path, monkeypatch)
    yield
    empty_memory()


def plain(pack: Any) -> list[dict[str, Any]]:
    return [{name: np.asarray(value).tolist() for name, value in dict(one).items()} for one in pack]


@pytest.mark.parametrize("fmt", FORMATS)
def test_packs_are_those_of_the_folder_and_come_when_they_are_read(
    made: Callable[..., Set], tmp_path: Path, fmt: str
) -> None:
    held = made(count=24)
    write(held, tmp_path / "out", format=fmt)
    system = in_memory(tmp_path / "out", "bucket/out")
    near, far = (open_packs(at, held.template.encode) for at in (tmp_path / "out", "memory://bucket/out"))
    assert far.plan.checksum == near.plan.checksum and len(far) == len(near) > 4
    place = Path(copies.place_of("memory://bucket/out"))
    assert not [path for path in place.iterdir() if path.suffix in (".tar", ".arrow", ".jpg")]  # none yet
    assert plain(far[1]) == plain(near[1])
    assert 0 < len(list(place.glob("*"))) < len(list((tmp_path / "out").glob("*")))
    assert [plain(far[n]) for n in range(len(far))] == [plain(near[n]) for n in range(len(near))]
    with pytest.raises(FormatError, match="no export"):
        system.pipe("/bucket/else/a.txt", b"")
        open_packs("memory://bucket/else", held.template.encode)
    shard = next(n for n in system.find("/bucket/out") if n.endswith((".tar", ".arrow", "ps_00000003.json")))
    bytes_ = bytearray(system.cat(shard))
    bytes_[len(bytes_) // 2] ^= 1
    system.pipe(shard, bytes(bytes_))
    damaged = open_packs("memory://bucket/out", held.template.encode)
    with pytest.raises(ChecksumError):
        [damaged[n] for n in range(len(damaged))]
