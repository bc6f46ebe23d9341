"""A folder of pairs: every rule about names, and the same content in another place."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from packtrain import files
from packtrain.errors import SampleError, SourceError
from packtrain.media.location import media_refs
from packtrain.sources import _index, open_source, pairs
from packtrain.sources.chat import ChatSource
from packtrain.testing import Stopped, stopped_after


def chat(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "yes"}]
    return {"messages": messages, **more}


def fill(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in content.items():
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        (folder / name).write_bytes(data)
    return folder


CONTENT = {
    "000000003474.jpg": b"\xff\xd8\xff",
    "000000003474.json": chat("<image>0"),
    "000000003474_1.jpg": b"\xff\xd8\xff",
    "000000003474_1.json": chat("<image>1", images=["000000003474_1.jpg"]),
    "000000003474_2.JPG": b"\xff\xd8\xff",
    "000000003474_2.json": chat("<image>2"),
    "a.b.c.png": b"\x89PNG",
    "a.b.c.json": chat("<image>dots"),
    "output_00000000.json": chat("text only", images=[]),
    "notes.txt": b"ignored",
    ".hidden.json": b"{}",
}


def test_pairs_of_a_folder(tmp_path: Path) -> None:
    folder = fill(tmp_path / "data", CONTENT)
    source = ChatSource(open_source(folder))
    assert [source.where(i) for i in range(len(source))] == [
        "000000003474.json",
        "000000003474_1.json",
        "000000003474_2.json",
        "a.b.c.json",
        "output_00000000.json",
    ]
    found = [media_refs(sample) for sample in source]
    names = ["000000003474.jpg", "000000003474_1.jpg", "000000003474_2.JPG", "a.b.c.png"]
    assert found == [[str(folder / name)] for name in names] + [[]]
    assert list(pickle.loads(pickle.dumps(source))) == list(source)


def test_a_record_that_cannot_be_used_is_one_sample(tmp_path: Path) -> None:
    content = {
        "a.json": b"{oops",
        "b.json": [1],
        "c.json": b"\xff",
        "d.json": chat("hi"),
        "e.json": chat("x"),
    }
    folder = fill(tmp_path, {**content, "e.png": b"1", "e.webp": b"2"})
    source = open_source(folder)
    assert len(source) == 5 and source[3] == chat("hi")
    for index in (0, 1, 2, 4):
        with pytest.raises(SampleError, match=source.where(index)) as error:
            source[index]
        assert error.value.reason == "malformed_record"
    named = fill(tmp_path / "named", {"e.json": chat("x", images=["e.webp"]), "e.png": b"1", "e.webp": b"2"})
    assert open_source(named)[0]["images"] == ["e.webp"]


def test_unicode_names(tmp_path: Path) -> None:
    composed, split = "é", unicodedata.normalize("NFD", "é")
    folder = fill(tmp_path / "one", {f"{composed}.json": chat("<image>"), f"{split}.jpg": b"1"})
    assert open_source(folder)[0]["images"] == [f"{split}.jpg"]
    folder = fill(tmp_path / "two", {f"{composed}.json": chat("a"), f"{split}.json": chat("b")})
    with pytest.raises(SourceError, match="two records of one stem"):
        open_source(folder)


def test_images_without_record_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = fill(tmp_path, {"a.json": chat("a"), "b.jpg": b"1", "c.png": b"2"})
    with caplog.at_level(logging.WARNING):
        source = open_source(folder)
    assert isinstance(source, pairs.Pairs) and source.unpaired == 2 and len(source) == 1
    assert "2 images without a .json" in caplog.text


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is not a folder"):
        open_source(tmp_path / "none", kind="pairs")
    fill(tmp_path / "top" / "deep", {"a.json": chat("a")})
    with pytest.raises(SourceError, match=r"holds no \.json files") as error:
        open_source(tmp_path / "top")
    assert "deep" in str(error.value)


def test_the_fingerprint_is_content_not_place(tmp_path: Path) -> None:
    folder = fill(tmp_path / "one", CONTENT)
    first = open_source(folder)
    copied = tmp_path / "two"
    shutil.copytree(folder, copied)
    assert open_source(copied).fingerprint == first.fingerprint
    (copied / "000000003474.jpg").rename(copied / "000000003474.png")
    assert open_source(copied).fingerprint != first.fingerprint


def test_reopening_hashes_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path, CONTENT)
    first = open_source(folder)
    reads: list[str] = []
    read = files.sha256_file
    hashed = lambda path: (reads.append(os.path.basename(path)), read(path))[1]  # noqa: E731
    monkeypatch.setattr(files, "sha256_file", hashed)
    assert open_source(folder).fingerprint == first.fingerprint and not reads
    fill(folder, {"a.b.c.json": chat("<image>other")})
    changed = open_source(folder)
    assert reads == ["a.b.c.json"] and changed.fingerprint != first.fingerprint
    with pytest.raises(SourceError, match="changed after"):
        first[3]
    _index.cached(folder, pairs.TABLE).write_bytes(b'{"digest": "0", "files": {}}')
    reads.clear()
    assert open_source(folder).fingerprint == changed.fingerprint and len(reads) == 5
    reads.clear()
    open_source(folder, verify_content=True)
    assert len(reads) == 5
    (folder / "output_00000000.json").unlink()
    assert len(open_source(folder)) == 4


def test_a_read_only_folder(tmp_path: Path) -> None:
    folder = fill(tmp_path / "sealed", CONTENT)
    folder.chmod(0o555)
    try:
        source = open_source(folder, cache_dir=tmp_path / "cache")
        assert len(source) == 5 and pairs.TABLE not in os.listdir(folder)
        assert len(list((tmp_path / "cache" / "index").iterdir())) == 1
    finally:
        folder.chmod(0o755)


def test_the_table_is_published_whole(tmp_path: Path) -> None:
    folder = fill(tmp_path, CONTENT)
    expected = open_source(folder).fingerprint
    whole = _index.cached(folder, pairs.TABLE).read_bytes()
    for stop in range(1, 5):
        _index.cached(folder, pairs.TABLE).unlink()
        with pytest.raises(Stopped), stopped_after(stop):
            open_source(folder)
        assert open_source(folder).fingerprint == expected
        assert _index.cached(folder, pairs.TABLE).read_bytes() == whole
