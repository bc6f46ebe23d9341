"""How shards are written: headers as `tarfile` makes them, bytes of many pieces, reading ahead in bounds."""

from __future__ import annotations

import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain import files
from packtrain.export import _job
from packtrain.export._job import Lane, members_ahead
from packtrain.export.webdataset import Hashed, _header, _made
from packtrain.files import sha256_file, write_pieces
from packtrain.store.pack_records import crc32


@given(st.text(max_size=130), st.integers(0, 2**40))
def test_headers_are_those_of_tarfile(name: str, size: int) -> None:
    try:
        want = _made(name, size)
    except UnicodeEncodeError:
        return
    assert _header(name, size) == want


@pytest.mark.parametrize("size", [0, 511, 512, 8**11 - 1, 8**11, 2**40])
@pytest.mark.parametrize("name", ["", "ps_00000000.img000_1.jpg", "x" * 100, "x" * 101, "é.json"])
def test_headers_at_the_edges(name: str, size: int) -> None:
    assert _header(name, size) == _made(name, size)


@pytest.mark.parametrize("short", [None, 1, 700, 5000])
def test_pieces_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int | None) -> None:
    """More pieces than the system takes at once, and a system that takes only some bytes of them."""
    import os

    pieces = [bytes([i % 251]) * (i % 7) for i in range(3000)]
    if short is not None:
        real = os.write
        monkeypatch.setattr(os, "writev", lambda fd, todo: real(fd, b"".join(todo)[:short]))
    with files.publish(tmp_path / "file") as handle:
        handle.write(b"begin")
        write_pieces(handle, pieces)
        write_pieces(handle, [])
        handle.write(b"end")
    assert (tmp_path / "file").read_bytes() == b"begin" + b"".join(pieces) + b"end"


def test_hashing_beside(tmp_path: Path) -> None:
    pieces = [bytes([i]) * 70_000 for i in range(200)]
    (tmp_path / "file").write_bytes(b"".join(pieces))
    digest = Hashed()
    for i in range(0, 200, 5):
        digest.update(pieces[i : i + 5], 350_000)
    assert digest.hexdigest() == sha256_file(tmp_path / "file")


class Packs:
    """A job of `count` packs of one medium and a record each; counts what was read, fails at `bad`."""

    def __init__(self, count: int, size: int, bad: int | None = None) -> None:
        self.count, self.size, self.bad, self.begun = count, size, bad, 0

    def packs_of(self, part: int) -> range:
        return range(self.count)

    def read(self, number: int) -> int:
        self.begun += 1
        if number == self.bad:
            raise KeyError(f"pack {number}")
        return number

    def members(self, number: int) -> Any:
        yield "img000.jpg", bytes([number % 256]) * self.size
        yield "json", b"{}"


def still_reading() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "packtrain-read"]


@pytest.mark.parametrize("size", [1, 100_000, 3_000_000])
def test_members_come_in_order(size: int) -> None:
    job: Any = Packs(40, size)
    with members_ahead(job, 0) as members:
        got = [(number, name, len(data)) for number, name, data in members]
    assert got == [row for i in range(40) for row in ((i, "img000.jpg", size), (i, "json", 2))]
    assert not still_reading()


def test_what_is_read_ahead_is_bounded() -> None:
    job: Any = Packs(500, 1 << 20)
    with members_ahead(job, 0) as members:
        next(members)
        held = -1
        while held != job.begun:  # until the reader waits
            held = job.begun
            time.sleep(0.2)
        assert held <= (_job._AHEAD >> 20) + 4
    assert not still_reading(), "a writer that gives up ends the reader"


def test_an_error_comes_where_its_pack_would() -> None:
    job: Any = Packs(9, 2_000_000, bad=5)
    seen = []
    with members_ahead(job, 0) as members, pytest.raises(KeyError, match="pack 5"):
        for number, _, _ in members:
            seen.append(number)
    assert set(seen) <= set(range(5)) and not still_reading()


def test_a_lane_takes_one_item_of_any_size_and_none_when_closed() -> None:
    lane: Lane[str] = Lane(10)
    assert lane.put("large", 1000) and lane.get() == "large"
    assert lane.put("a", 6)
    waiting = threading.Thread(target=lane.put, args=("b", 6))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive() and lane.get() == "a" and lane.get() == "b"
    waiting.join()
    lane.close()
    assert not lane.put("c", 1)


@given(st.binary(max_size=3000), st.binary(max_size=100))
def test_sums_are_those_of_zlib(data: bytes, more: bytes) -> None:
    assert crc32(more, crc32(data)) == zlib.crc32(data + more)


def test_flushing_ahead_changes_no_byte(tmp_path: Path) -> None:
    pieces = [bytes([i % 251]) * 5000 for i in range(100)]
    with files.publish(tmp_path / "file") as handle:
        ahead = files.FlushAhead(handle, every=20_000)
        for data in pieces:
            write_pieces(handle, [data])
            ahead.wrote(len(data))
            time.sleep(0.001)
        ahead.close()
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert "packtrain-flush" not in [thread.name for thread in threading.enumerate()]
