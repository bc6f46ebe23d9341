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
    with pytest.raises(InputError, match=r"^/dev/null is a file, not a folder"):
        files.make_folder("/dev/null/claim")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=rf"^{tmp_path}/folder is a folder, not a file"):
        files.publish_text(tmp_path / "folder", "x")
    with pytest.raises(FormatError, match="is not a plan: AssertionError"), files.reading(tmp_path, "a plan"):
        raise AssertionError
    with pytest.raises(FormatError, match="does not exist"):
        files.read_json(tmp_path / "none.json")
    (tmp_path / "torn.json").write_bytes(b'{"a": ')
    with pytest.raises(FormatError, match=r"torn\.json is not valid JSON"):
        files.read_json(tmp_path / "torn.json")


def test_parallel_writers_of_one_path_never_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts or containers may have the same process id."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    with files.publish(tmp_path / "a") as one, files.publish(tmp_path / "a") as two:
        assert one.name != two.name
        one.write(b"one")
        two.write(b"two")
    assert (tmp_path / "a").read_bytes() == b"one" and len(list(tmp_path.iterdir())) == 1


def test_a_new_file_appears_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b" / "claim"
    assert files.publish_new(path, "one") and not files.publish_new(path, "two")
    assert path.read_text() == "one" and [p.name for p in path.parent.iterdir()] == ["claim"]
    stop_after(monkeypatch, 1)
    with pytest.raises(Stopped):
        files.publish_new(tmp_path / "c", "three")
    assert (tmp_path / "c").read_text() == "three"


def test_a_private_folder_belongs_to_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = files.private_folder("x")
    assert folder.is_dir() and folder.parent.stat().st_mode & 0o777 == 0o700
    (folder / "sub").mkdir()
    (folder / "sub" / "f").write_bytes(b"")
    files.remove_tree(folder.parent)
    assert not folder.parent.exists()
    (tmp_path / "elsewhere").mkdir()
    folder.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is not a folder of this user"):
        files.private_folder("x")
