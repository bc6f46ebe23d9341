"""Compressed text comes in pieces of bounded size, whatever the ratio."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtrain.errors import SourceError
from packtrain.sources import _derived
from packtrain.sources._open import open_source

zstandard = pytest.importorskip("zstandard")


def test_a_small_file_of_many_zeros_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_derived, "_PIECE", 64)
    size = 48 << 20
    path = tmp_path / "zeros.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=1).compress(bytes(size)))
    assert path.stat().st_size < size // 1000
    blocks = [len(block) for block in _derived.unpack(str(path), "zstd")]
    # 64 compressed bytes hold at most 16 blocks of 128 KiB
    assert sum(blocks) == size and max(blocks) <= _derived.BLOCK + (2 << 20)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(texts=st.lists(st.binary(max_size=400), max_size=6), piece=st.integers(1, 50), cut=st.integers(0, 10))
def test_frames_are_read_to_their_end_or_told_as_cut(
    tmp_path: Path, texts: list[bytes], piece: int, cut: int
) -> None:
    packed = b"".join(zstandard.ZstdCompressor().compress(text) for text in texts)
    path = tmp_path / "a.zst"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_derived, "_PIECE", piece)
        path.write_bytes(packed)
        assert b"".join(_derived.unpack(str(path), "zstd")) == b"".join(texts)
        if texts and cut and cut < len(zstandard.ZstdCompressor().compress(texts[-1])):
            path.write_bytes(packed[:-cut])
            with pytest.raises(SourceError):
                list(_derived.unpack(str(path), "zstd"))


@pytest.mark.parametrize("magic", [0x50, 0x5F])
def test_frames_to_skip_may_stand_anywhere(magic: int, tmp_path: Path) -> None:
    """pzstd puts one before each frame, with its size; the seekable form ends in one."""
    frame = zstandard.ZstdCompressor().compress(b'{"a": 1}\n' * 100)
    skipped = bytes([magic]) + b"\x2a\x4d\x18\x04\0\0\0" + struct.pack("<I", len(frame))
    for data, records in ((skipped + frame, 100), ((skipped + frame) * 3, 300), (frame + skipped, 100)):
        (tmp_path / "a.jsonl.zst").write_bytes(data)
        assert len(open_source(tmp_path / "a.jsonl.zst")) == records
