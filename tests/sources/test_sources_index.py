"""The persisted index: found again, rebuilt when it cannot be trusted, never a reason for wrong records."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from packtrain import files
from packtrain.errors import SourceError
from packtrain.sources import _handles, _index, _records, open_source
from packtrain.testing import Stopped, stopped_after

Write = Callable[..., Path]
ROWS = [{"i": i, "t": "x" * (i % 7)} for i in range(200)]


def index_of(path: Path) -> Path:
    return _index.cached(path, ".packtrain-index")


@pytest.fixture(params=["a.jsonl", "a.json"])
def path(request: pytest.FixtureRequest, write: Write) -> Path:
    return write(request.param, ROWS)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were indexed anew."""
    seen: list[str] = []
    for kind, build in list(_records._BUILDERS.items()):

        def counted(file: _handles.Pinned, build: object = build) -> _index.Built:
            seen.append(file.path)
            return build(file)  # type: ignore[operator]

        monkeypatch.setitem(_records._BUILDERS, kind, counted)
    return seen


def test_reopening_reads_no_content(path: Path, builds: list[str]) -> None:
    first = open_source(path)
    assert len(builds) == 1 and index_of(path).is_file()
    second = open_source(path)
    assert len(builds) == 1
    assert list(second) == ROWS and second.fingerprint == first.fingerprint
    large = open_source(path, keep=0)  # large indexes are read 16 bytes at a time
    assert large._index.starts is None and list(large) == ROWS


def test_a_changed_source_is_indexed_anew(path: Path, builds: list[str], write: Write) -> None:
    before = open_source(path).fingerprint
    write(path.name, [*ROWS, {"i": 200}])
    grown = open_source(path)
    assert len(grown) == 201 and grown[200] == {"i": 200} and grown.fingerprint != before
    assert len(builds) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "flip", "text", "longer", "other-kind"])
def test_a_damaged_index_is_built_again(path: Path, builds: list[str], damage: str) -> None:
    good = open_source(path)
    index = index_of(path)
    content = bytearray(index.read_bytes())
    if damage == "empty":
        content = bytearray()
    elif damage == "cut":
        del content[-9:]
    elif damage == "flip":
        content[len(content) // 2 + 100] ^= 4
    elif damage == "text":
        content = bytearray(b"this is no index at all, only text")
    elif damage == "longer":
        content += b"\0" * 8
    else:
        content = bytearray(bytes(content).replace(b'"kind":"json', b'"kind":"csv '))
    index.write_bytes(content)
    again = open_source(path)
    assert len(builds) == 2
    assert list(again) == ROWS and again.fingerprint == good.fingerprint
    open_source(path)
    assert len(builds) == 2


def test_a_read_only_folder_gets_its_index_in_the_cache(
    path: Path, tmp_path: Path, builds: list[str]
) -> None:
    folder = tmp_path / "sealed"
    folder.mkdir()
    sealed = Path(shutil.copy2(path, folder))
    folder.chmod(0o555)  # also respected where the tests run as root
    try:
        cache = tmp_path / "cache"
        source = open_source(sealed, cache_dir=cache)
        assert list(source) == ROWS
        assert os.listdir(folder) == [sealed.name]
        assert len(list((cache / "index").iterdir())) == 1
        open_source(sealed, cache_dir=cache)
        assert len(builds) == 1
    finally:
        folder.chmod(0o755)


def test_nowhere_to_store_is_only_slower(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    path.parent.chmod(0o555)
    try:
        source = open_source(path, cache_dir=blocked)
    finally:
        path.parent.chmod(0o755)
    assert "could not be stored" in caplog.text
    assert list(pickle.loads(pickle.dumps(source))) == ROWS


def test_equal_content_has_one_fingerprint(path: Path, tmp_path: Path, builds: list[str]) -> None:
    """K5: other name, other folder, other times: the same; one changed byte: another."""
    source = open_source(path)
    other = tmp_path / "elsewhere" / f"renamed{path.suffix}"
    other.parent.mkdir()
    shutil.copy(path, other)
    os.utime(other, ns=(1, 1))
    copy = open_source(other)
    assert copy.fingerprint == source.fingerprint and copy.fields() == source.fields()
    assert copy.where(3) != source.where(3)
    content = other.read_bytes().replace(b'"xxx"', b'"xxy"', 1)
    other.write_bytes(content)
    assert open_source(other).fingerprint != source.fingerprint


def test_verify_content_sees_what_a_stat_cannot(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(path)
    stamp = files.Stamp.of(path.stat())
    path.write_bytes(path.read_bytes().replace(b'"xxx"', b'"xxy"', 1))
    monkeypatch.setattr(_index, "pin", lambda path: _handles.Pinned(os.path.abspath(path), stamp))
    monkeypatch.setattr(_handles.Pinned, "is_it", lambda *_: True)  # a file system that keeps all four
    assert open_source(path).fingerprint == source.fingerprint
    assert open_source(path, verify_content=True).fingerprint != source.fingerprint


def test_a_file_changed_after_opening_is_an_error(path: Path, write: Write) -> None:
    source = open_source(path)
    assert source[0] == ROWS[0]
    with open(path, "r+b") as handle:
        handle.truncate(path.stat().st_size // 2)
    with pytest.raises(SourceError, match="changed after it was opened"):
        source[150]
    with pytest.raises(SourceError, match="changed after it was opened"):
        source[0]
    fresh = open_source(write(path.name, ROWS))
    path.unlink()
    assert fresh[0] == ROWS[0]  # an open file lives on, whole
    _handles._close(str(path))
    with pytest.raises(SourceError, match="is gone"):
        fresh[0]


def test_a_replaced_file_is_another_source(path: Path, tmp_path: Path, write: Write) -> None:
    """Editors write a new file and rename it over the old one."""
    old = open_source(path)
    assert old[0] == ROWS[0]
    os.replace(write(f"new-{path.name}", ROWS[::-1]), path)
    new = open_source(path)
    assert list(new) == ROWS[::-1]
    with pytest.raises(SourceError, match="changed after it was opened"):
        old[0]
    assert new[0] == ROWS[-1]


def test_a_replaced_index_is_no_changed_source(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index, "KEEP", 0)
    source = open_source(path)
    index_of(path).unlink()
    open_source(path)  # another process builds it again
    monkeypatch.setattr(_handles, "_table", _handles.OrderedDict())
    assert list(source) == ROWS
    index_of(path).unlink()
    monkeypatch.setattr(_handles, "_table", _handles.OrderedDict())
    assert list(source) == ROWS


def test_a_stopped_writer_leaves_nothing_harmful(path: Path) -> None:
    """Crash law: stop after each step of publishing the index, run again, same bytes."""
    open_source(path)
    whole = index_of(path).read_bytes()
    for stop in range(1, 5):
        index_of(path).unlink()
        with pytest.raises(Stopped), stopped_after(stop):
            open_source(path)
        assert list(open_source(path)) == ROWS
        assert index_of(path).read_bytes() == whole


def _sum(source: object, out: object) -> None:
    out.put(sum(row["i"] for row in source))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_reopen(path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(path)
    assert source[5] == ROWS[5]  # the parent's handle is open
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    worker = context.Process(target=_sum, args=(source, queue))
    worker.start()
    assert queue.get() == sum(range(200))
    worker.join(30)
    assert worker.exitcode == 0 and source[6] == ROWS[6]


def test_a_pickled_source_refuses_another_file(path: Path, write: Write) -> None:
    state = pickle.dumps(open_source(path))
    write(path.name, ROWS[:100])
    with pytest.raises(SourceError, match="changed after it was opened"):
        pickle.loads(state)[0]


def test_open_files_are_bounded(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """PB-66: 400 shards, few descriptors, any order."""
    monkeypatch.setattr(_index, "KEEP", 0)
    sources = [open_source(write(f"s{n:03d}.jsonl", [{"i": n}])) for n in range(400)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
    try:
        for step in (1, 7, 131):
            for n in range(0, 400 * step, step):
                assert sources[n % 400][0] == {"i": n % 400}
        assert _handles.open_count() <= _handles.LIMIT
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_index_is_eight_bytes_a_record(path: Path) -> None:
    open_source(path)
    content = index_of(path).read_bytes()
    assert len(content) % 8 == 0 and len(content) < 8 * len(ROWS) + 400
    length = int.from_bytes(content[8:12], "little")
    header = json.loads(content[12 : 12 + length])
    assert header["records"] == 200 and header["sha256"] == files.sha256_file(path)
