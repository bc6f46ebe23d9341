"""Members of tar files, read by their byte range."""

from __future__ import annotations

import io
import tarfile
import unicodedata
from collections.abc import Mapping
from pathlib import Path

import pytest
from made_images import MADE

from packtrain.errors import SampleError
from packtrain.media import _tar, location
from packtrain.media.image import open_image, read_header


def make_tar(path: Path, members: Mapping[str, bytes] | list[tuple[str, bytes]], **options: object) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


MEMBERS = {
    "000.jpg": MADE["jpeg"](),
    "a.b/000.json": b"{}",
    "图片_01.png": MADE["png"](),
    "n" * 150 + "é.bmp": MADE["bmp"](),
    "trailing .gif": MADE["gif"](),
}


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_are_media(tmp_path: Path, format: int) -> None:
    tar = make_tar(tmp_path / "s-000.tar", MEMBERS, format=format)
    for name, data in MEMBERS.items():
        ref = f"tar:{tar}!{name}"
        assert location.exists(ref) and location.read_bytes(ref) == data
        with location.open_head(ref) as head:
            assert head.size == len(data)
            assert head.at(5, len(data)) == data[5:]  # never the bytes of the next member
        if not name.endswith("json"):
            assert read_header(ref) == read_header(data)
            assert open_image(ref).size == open_image(data).size


def test_resolve_and_identity(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "s.tar", MEMBERS)
    ref = location.resolve("tar:s.tar!000.jpg", tmp_path)
    assert ref == f"tar:{tar}!000.jpg"
    name, size, digest = location.identity(ref, tmp_path)
    assert (name, size) == ("s.tar!000.jpg", len(MEMBERS["000.jpg"]))
    assert digest == location.identity(MEMBERS["000.jpg"])[2]
    with pytest.raises(SampleError, match="outside the media root"):
        location.resolve("tar:../s.tar!000.jpg", tmp_path)


def reason(ref: str) -> str:
    with pytest.raises(SampleError) as error:
        location.read_bytes(ref)
    assert not location.exists(ref)
    return error.value.reason


def test_reasons(tmp_path: Path) -> None:
    tar = make_tar(tmp_path / "s.tar", MEMBERS)
    assert reason(f"tar:{tar}!001.jpg") == "missing_media"
    assert reason(f"tar:{tmp_path}/none.tar!000.jpg") == "missing_media"
    twice = make_tar(tmp_path / "twice.tar", [("a", b"1"), ("b", b"2"), ("a", b"3")])
    assert reason(f"tar:{twice}!a") == "unreadable_media"
    assert location.read_bytes(f"tar:{twice}!b") == b"2"
    no_tar = tmp_path / "no.tar"
    no_tar.write_bytes(b"this is text" * 100)
    assert reason(f"tar:{no_tar}!a") == "unreadable_media"
    composed = make_tar(tmp_path / "nfc.tar", {"é.jpg": b"x"})
    with pytest.raises(SampleError, match="has no member") as error:
        location.read_bytes(f"tar:{composed}!{unicodedata.normalize('NFD', 'é')}.jpg")
    assert "Unicode" in (error.value.hint or "")


def test_a_cut_tar(tmp_path: Path) -> None:
    """PB-07: what stands before the cut is whole, what the cut went through is named."""
    members = {
        f"{n:04d}.{kind}": bytes([n + 1]) * size
        for n in range(3)
        for kind, size in (("jpg", 3000), ("json", 20))
    }
    tar = make_tar(tmp_path / "s.tar", members)
    content = tar.read_bytes()
    for cut in (9216, 9316, 12800, 10728):
        short = tmp_path / f"cut{cut}.tar"
        short.write_bytes(content[:cut])
        for name, data in list(members.items())[:4]:
            assert location.read_bytes(f"tar:{short}!{name}") == data
        last = f"tar:{short}!0002.jpg"
        if cut == 12800:
            assert location.read_bytes(last) == members["0002.jpg"]
            assert reason(f"tar:{short}!0002.json") == "missing_media"
        else:
            assert reason(last) == ("truncated_media" if cut == 10728 else "missing_media")


def test_a_rewritten_tar_is_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = make_tar(tmp_path / "s.tar", {"a": b"old"})
    assert location.read_bytes(f"tar:{tar}!a") == b"old"
    make_tar(tar, {"longer": b"x" * 20_000, "a": b"new"})
    assert location.read_bytes(f"tar:{tar}!a") == b"new"
    monkeypatch.setattr(_tar, "KEEP", 3)
    for n in range(5):
        other = make_tar(tmp_path / f"o{n}.tar", {"a": b"%d" % n, "b": b""})
        assert location.read_bytes(f"tar:{other}!a") == b"%d" % n
    assert sum(map(len, _tar._tables.values())) <= 3


def test_long_names_of_long_names_are_a_broken_tar(tmp_path: Path) -> None:
    """Each header names the next one: the library goes one call deeper for each."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("a" * 200 + ".jpg"))
    (tmp_path / "s.tar").write_bytes(held.getvalue()[:1024] * 2000 + held.getvalue())
    with pytest.raises(SampleError, match=r"s\.tar"):
        location.read_bytes(f"tar:{tmp_path / 's.tar'}!a.jpg")
