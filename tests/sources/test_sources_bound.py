"""A source is bound to its data: other content behind the same name is told, at one stat in the good case."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtrain import files
from packtrain.errors import SourceError
from packtrain.sources import open_source

TEXTS = ("one", "two", "six")


def _row(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": text}]}


def _jsonl(folder: Path, texts: tuple[str, ...]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(_row(text)) + "\n" for text in texts))
    return path


def _json(folder: Path, texts: tuple[str, ...]) -> Path:
    path = folder / "a.json"
    path.write_text(json.dumps([_row(text) for text in texts]))
    return path


def _gz(folder: Path, texts: tuple[str, ...]) -> Path:
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(_jsonl(folder, texts).read_bytes(), 0, mtime=0))  # stored: equal sizes
    (folder / "a.jsonl").unlink()
    return path


def _tar(folder: Path, texts: tuple[str, ...]) -> Path:
    path = folder / "a.tar"
    with tarfile.open(path, "w") as tar:
        for number, text in enumerate(texts):
            data = json.dumps(_row(text)).encode()
            info = tarfile.TarInfo(f"{number}.json")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def _parquet(folder: Path, texts: tuple[str, ...]) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "a.parquet"
    table = arrow.table({"prompt": ["a?"] * len(texts), "response": list(texts)})
    parquet.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    return path


def _pairs(folder: Path, texts: tuple[str, ...]) -> Path:
    inner = folder / "pairs"
    inner.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (inner / f"{number}.json").write_text(json.dumps(_row(text)))
    return inner


KINDS: dict[str, Callable[[Path, tuple[str, ...]], Path]] = {
    "jsonl": _jsonl,
    "json": _json,
    "gz": _gz,
    "webdataset": _tar,
    "parquet": _parquet,
    "pairs": _pairs,
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    def made(texts: tuple[str, ...] = TEXTS, where: str = "data") -> Path:
        (tmp_path / where).mkdir(exist_ok=True)
        return KINDS[request.param](tmp_path / where, texts)

    return made


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real = files.sha256_file

    def counted(path: Any) -> str:
        seen.append(str(path))
        return real(path)

    monkeypatch.setattr(files, "sha256_file", counted)
    return seen


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def _listing(folder: Path) -> list[tuple[str, bytes]]:
    return [(str(p), p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()]


def _swap(path: Path, other: Path, way: str) -> None:
    """Other content with the same sizes and times of modification."""
    for mine, theirs in zip(_files(path), _files(other), strict=True):
        status = mine.stat()
        assert status.st_size == theirs.stat().st_size, (mine.name, status.st_size, theirs.stat().st_size)
        os.utime(theirs, ns=(status.st_atime_ns, status.st_mtime_ns))
        if way == "rename" and path.suffix != ".gz":  # of which an unpacked copy is read
            os.replace(shutil.copy2(theirs, theirs.with_name("copy")), mine)
        else:
            mine.write_bytes(theirs.read_bytes())
            os.utime(mine, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_nothing_is_written_beside_the_data(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make()
    before = _listing(tmp_path / "data")
    assert len(list(open_source(path))) == 3
    assert _listing(tmp_path / "data") == before


@pytest.mark.parametrize("way", ["rename", "write"])
def test_other_content_behind_the_same_size_and_time(
    make: Callable[..., Path], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = make(), make(("one", "TWO", "six"), "other")
    before = open_source(path)
    first = before.fingerprint
    _swap(path, other, way)
    after = open_source(path)
    assert "the file changed" in caplog.text and path.name in caplog.text
    assert after.fingerprint != first
    assert "TWO" in json.dumps(after[1])
    if way == "rename" and path.suffix != ".gz":  # of which an unpacked copy is read
        with pytest.raises(SourceError, match="the file changed"):
            before[1]
    caplog.clear()
    open_source(path)
    assert not caplog.records


def test_the_same_content_is_the_same_source(
    make: Callable[..., Path], hashed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A copy with its times kept is read once, told by nothing, and then costs a stat again."""
    path = make()
    before = open_source(path)
    hashed.clear()
    open_source(path)
    assert not hashed
    for file in _files(path):
        os.replace(shutil.copy2(file, file.with_name(f"{file.name}.copy")), file)
    again = open_source(path)
    assert again.fingerprint == before.fingerprint and set(hashed) == set(map(str, _files(path)))
    hashed.clear()
    assert list(open_source(path)) == list(again) == list(before)  # the source that was open goes on too
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_an_appended_file_goes_on_and_a_removed_one_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = _jsonl(tmp_path, TEXTS)
    open_source(path)
    with open(path, "a") as handle:
        handle.write(json.dumps(_row("ten")) + "\n")
    assert len(open_source(path)) == 4
    assert "has grown" in caplog.text and "the file changed" not in caplog.text
    _jsonl(tmp_path, ("ONE", *TEXTS, "ten"))
    open_source(path)
    assert "the file changed" in caplog.text
    tars = tmp_path / "tars"
    tars.mkdir()
    for name in "ab":
        os.replace(_tar(tmp_path, TEXTS), tars / f"{name}.tar")
    open_source(tars)
    caplog.clear()
    open_source(str(tars / "a.tar"))  # one of them: nothing is gone
    assert "gone" not in caplog.text
    (tars / "b.tar").unlink()
    open_source(tars)
    assert "1 file of" in caplog.text and "b.tar" in caplog.text
    caplog.clear()
    open_source(tars)
    assert "gone" not in caplog.text
