"""Refs: where bytes are, what is refused, what a fingerprint takes."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

import pytest

from packtrain.errors import SampleError
from packtrain.media import location


@pytest.fixture
def medium(tmp_path: Path) -> Path:
    path = tmp_path / "media" / "图 片.bin"
    path.parent.mkdir()
    path.write_bytes(bytes(range(256)) * 100)
    return path


def raised(call: object, *args: object, **options: object) -> SampleError:
    with pytest.raises(SampleError) as error:
        call(*args, **options)  # type: ignore[operator]
    return error.value


def test_the_same_bytes_from_every_kind_of_ref(medium: Path) -> None:
    content = medium.read_bytes()
    text = base64.b64encode(content).decode()
    refs = [
        medium,
        str(medium),
        medium.as_uri(),
        content,
        f"data:image/png;base64,{text}",
        "data:image/png;base64," + "\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
    ]
    for ref in refs:
        assert location.exists(ref)
        assert location.read_bytes(ref) == content
        with location.open_head(ref) as head:
            assert head.size == len(content)
            assert head.at(5000, 10) == content[5000:5010]
            assert head.at(len(content) - 3, 10) == content[-3:]
            assert head.at(len(content) + 5, 10) == b""
    assert location.read_bytes("data:text/plain,a%20b") == b"a b"


def test_only_the_head_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with open(path, "wb") as handle:
        handle.truncate(10 << 30)  # sparse: 10 GiB that nobody reads
    with location.open_head(path) as head:
        assert head.size == 10 << 30
        assert len(head.bytes) == location.HEAD_BYTES
        assert head.at(head.size - 2, 2) == b"\0\0"


def test_reasons(tmp_path: Path, medium: Path) -> None:
    assert raised(location.read_bytes, tmp_path / "none").reason == "missing_media"
    assert raised(location.read_bytes, medium / "below-a-file").reason == "missing_media"
    assert raised(location.read_bytes, "").reason == "missing_media"
    assert raised(location.read_bytes, tmp_path).reason == "unreadable_media"
    assert raised(location.read_bytes, "a\0b").reason == "unreadable_media"
    assert raised(location.read_bytes, "lone\ud800surrogate").reason == "unreadable_media"
    assert raised(location.read_bytes, "data:image/png;base64,@@@").reason == "unreadable_media"
    assert raised(location.read_bytes, "data:image/png").reason == "unreadable_media"
    assert "prefix data:" in (raised(location.read_bytes, "iVBORw0KGgo" * 500).hint or "")
    assert raised(location.read_bytes, "ftp://example.com/a.jpg").reason == "unsupported_media"
    os.mkfifo(tmp_path / "pipe")
    assert raised(location.read_bytes, tmp_path / "pipe").reason == "unreadable_media"
    for ref in (tmp_path / "none", tmp_path, "a\0b", "ftp://example.com/a.jpg"):
        assert not location.exists(ref)


def test_no_permission(medium: Path) -> None:
    medium.chmod(0)
    if os.geteuid() == 0:
        assert location.exists(medium)  # root reads everything
    else:
        assert raised(location.read_bytes, medium).reason == "unreadable_media"


def test_descriptors_are_closed(medium: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        location.read_bytes(medium)
        raised(location.read_bytes, medium.parent)
        location.identity(medium)
    assert len(os.listdir("/proc/self/fd")) == before


def test_resolve(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert location.resolve("a/b.jpg", root) == str(root / "a/b.jpg")
    assert location.resolve("a/../b.jpg", root) == str(root / "b.jpg")
    assert location.resolve(b"bytes", root) == b"bytes"
    assert location.resolve("data:,x", root) == "data:,x"
    for climbing in ("../b.jpg", "a/../../b.jpg", "..", "."):
        assert raised(location.resolve, climbing, root).reason == "outside_media_root"
    assert location.resolve("../b.jpg", root, allow_outside=True) == str(tmp_path / "b.jpg")
    sibling = tmp_path / "root-two" / "b.jpg"  # shares the prefix, not the folder
    assert location.resolve(sibling, root) == str(sibling)
    assert raised(location.resolve, sibling, root, absolute_ok=False).reason == "outside_media_root"
    assert location.resolve(root / "b.jpg", root, absolute_ok=False) == str(root / "b.jpg")
    assert location.resolve(sibling, root, True, absolute_ok=False) == str(sibling)
    assert location.resolve((root / "b c.jpg").as_uri(), root) == str(root / "b c.jpg")
    assert raised(location.resolve, "ftp://bucket/key", root).reason == "unsupported_media"


def test_a_link_that_leaves_a_root_that_was_given_needs_leave(tmp_path: Path, medium: Path) -> None:
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "own.jpg").write_bytes(medium.read_bytes())
    (root / "folder").symlink_to(medium.parent)
    (root / "file.jpg").symlink_to(medium)
    (root / "chain.jpg").symlink_to("file.jpg")
    (root / "up").symlink_to("..")
    (root / "inner/back.jpg").symlink_to("../own.jpg")
    (root / "gone.jpg").symlink_to("nowhere.jpg")
    (root / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "alias").symlink_to(root)  # the root itself may be a link
    outward = ["file.jpg", "chain.jpg", f"folder/{medium.name}", "tar:folder/s.tar!a", "up/x.jpg"]
    for held in (root, tmp_path / "alias"):
        for ref in outward:
            fault = raised(location.resolve, ref, held, absolute_ok=False)
            assert fault.reason == "outside_media_root" and " by a link to " in str(fault), ref
            location.resolve(ref, held, True, absolute_ok=False)
            location.resolve(ref, held)  # nobody asked for a root: read as written
        for ref in ("own.jpg", "inner/back.jpg", "up/root/own.jpg", held / "own.jpg"):
            path = location.resolve(ref, held, absolute_ok=False)
            assert path == str(held / ref) and location.read_bytes(path) == medium.read_bytes()
        for ref in ("gone.jpg", "loop.jpg", "none/at/all.jpg", "a\0b"):
            assert raised(location.read_bytes, location.resolve(ref, held, absolute_ok=False)).reason in (
                "missing_media",
                "unreadable_media",
            )


def test_identity_does_not_know_the_place(tmp_path: Path, medium: Path) -> None:
    copy = tmp_path / "elsewhere" / medium.name
    copy.parent.mkdir()
    copy.write_bytes(medium.read_bytes())
    head = hashlib.sha256(medium.read_bytes()[:4096]).hexdigest()
    assert location.identity(medium, medium.parent) == (medium.name, 25600, head)
    assert location.identity(copy, copy.parent) == location.identity(medium, medium.parent)
    assert location.identity(medium)[0] == str(medium)
    assert location.identity(b"abc") == ("", 3, hashlib.sha256(b"abc").hexdigest())
    copy.write_bytes(b"x" + medium.read_bytes()[1:])
    assert location.identity(copy, copy.parent) != location.identity(medium, medium.parent)


def test_messages_never_hold_content() -> None:
    assert location.name_of("data:image/png;base64," + "A" * 5000) == "data URL of 5022 characters"
    assert location.name_of(b"secret") == "medium of 6 bytes in memory"
    assert len(location.name_of("p" * 9000)) < 200
