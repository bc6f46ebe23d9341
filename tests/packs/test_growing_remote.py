"""A growing directory behind a URL: chunks are read as they come, once, and registered with its producer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_lazy_sharded import UNEVEN, Feed, Reader, Ticks, ids

from packtrain.errors import ChecksumError, WaitTimeoutError
from remote_site import afresh, empty_memory, in_memory

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    afresh(tmp_path, monkeypatch)
    yield
    empty_memory()


def test_chunks_are_read_as_they_come(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "out", UNEVEN)

    def turn() -> None:
        if feed.next == 0:
            feed.begin()
        if feed.next < len(UNEVEN):
            feed.chunk()
        else:
            feed.end()
        in_memory(tmp_path / "out", "bucket/out")

    far = Reader("memory://bucket/out", 1, 2, clock=Ticks(turn), run=tmp_path / "run", timeout_s=0)
    read = ids(far)
    assert read == ids(Reader(tmp_path / "out", 1, 2)) and len(read) == 8
    state = far.state_dict(2)
    again = Reader("memory://bucket/out", 1, 2, run=tmp_path / "run")
    again.load_state_dict(state)
    near = Reader(tmp_path / "out", 1, 2)
    near.load_state_dict(state)
    assert ids(again) == ids(near)
    first = Reader("memory://bucket/out", 0, 2, run=tmp_path / "run")
    next(iter(first))
    assert len(fsspec.filesystem("memory").find("/bucket/out/readers")) == 1


def test_what_does_not_come_and_what_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(WaitTimeoutError):
        next(iter(Reader("memory://bucket/none", 0, 1, timeout_s=3, clock=Ticks())))
    Feed(tmp_path / "out", UNEVEN).all()
    system = in_memory(tmp_path / "out", "bucket/out")
    data = bytearray(system.cat("/bucket/out/chunk_00000001.arrow"))
    data[len(data) // 2] ^= 1
    system.pipe("/bucket/out/chunk_00000001.arrow", bytes(data))
    with pytest.raises(ChecksumError, match="chunk_00000001"):
        ids(Reader("memory://bucket/out", 0, 1))
