"""Publishing: a file is absent or whole, whatever the step at which the writer stops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from packtrain import files
from packtrain.errors import FormatError, InputError


class Stopped(BaseException):
    """The process ends here."""


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    seen: list[str] = []

    def observer(kind: str, path: Path) -> None:
        seen.append(kind)
        if len(seen) == count:
            raise Stopped

    monkeypatch.setattr(files, "observer", observer)
    return seen


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_stopped_publish_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, before: bytes | None
) -> None:
    path = tmp_path / "a.bin"
    if before is not None:
        path.write_bytes(before)
    seen = stop_after(monkeypatch, count)
    with pytest.raises(Stopped), files.publish(path) as handle:
        handle.write(b"new")
    assert seen == ["write", "fsync", "rename", "fsync_folder"][:count]
    now = path.read_bytes() if path.exists() else None
    assert now == (before if count < 3 else b"new")
    monkeypatch.setattr(files, "observer", None)
    files.remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == (["a.bin"] if now is not None else [])


def test_a_failing_block_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), files.publish(tmp_path / "a.bin") as handle:
        handle.write(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10, dtype=np.int64),
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.zeros(0, np.uint8),
        np.zeros(3, dtype=[("id", "<i8"), ("code", "u1")]),
        np.arange(20)[::2],
    ],
)
def test_arrays_are_npy_files(tmp_path: Path, array: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 16)
    files.publish_array(tmp_path / "a.npy", array)
    read = np.load(tmp_path / "a.npy")
    assert read.dtype.newbyteorder("=") == array.dtype.newbyteorder("=") and (read == array).all()
    assert read.dtype.byteorder != ">"


def test_json_is_canonical_and_survives_lone_surrogates(tmp_path: Path) -> None:
    files.publish_json(tmp_path / "a.json", {"b": 1, "a": "\ud800 é"})
    files.publish_json(tmp_path / "b.json", {"a": "\ud800 é", "b": 1})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_bytes()) == {"a": "\ud800 é", "b": 1}
    assert files.digest_json({"x": 1, "y": [1, 2]}) == files.digest_json({"y": [1, 2], "x": 1})


def test_lines_are_appended_whole(tmp_path: Path) -> None:
    for number in range(3):
        files.append_line(tmp_path / "log" / "a.jsonl", json.dumps({"n": number}))
    assert (tmp_path / "log" / "a.jsonl").read_text().splitlines() == ['{"n": 0}', '{"n": 1}', '{"n": 2}']


def test_unreadable_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="is a file, not a folder"):
        files.make_folder(tmp_path / "file")
    with pytest.raises(InputError, match="is a file, not a folder"):
        files.make_folder(tmp_path / "file" / "deeper")
    with pytest.raises(FormatError, match="does not exist"):
        files.read_json(tmp_path / "none.json")
    (tmp_path / "torn.json").write_bytes(b'{"a": ')
    with pytest.raises(FormatError, match=r"torn\.json is not valid JSON"):
        files.read_json(tmp_path / "torn.json")
