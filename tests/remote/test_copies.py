"""Copies of remote files: the bytes that are there, whatever the way to them does; told when they change."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from packtrain import world
from packtrain.errors import SourceError
from packtrain.remote import copies, places, ranges
from packtrain.testing import crash_points
from remote_site import Site, afresh, empty_memory, in_memory, serving

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

# aiohttp's connector is closed by fsspec when the interpreter ends, after its loop
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

TEXT = b"".join(b'{"text": "%d"}\n' % n for n in range(200))


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    afresh(tmp_path, monkeypatch)
    monkeypatch.setattr(copies, "PIECE", 1000)
    yield
    empty_memory()


@pytest.fixture(params=["ranges", "whole", "marks"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with serving(ranges=request.param != "whole") as server:
        server.marks = request.param == "marks"
        server.files["/set/a.jsonl"] = TEXT
        yield server


def held(path: str) -> bytes:
    return Path(path).read_bytes()


def below(folder: str) -> dict[str, bytes]:
    found = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("odd", ["drop", "stall", "short", "more", "shift", "junk"])
def test_a_server_that_drops_stalls_truncates_or_lies(
    site: Site, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if odd == "shift" and not site.ranges:
        pytest.skip("a server without ranges has none to shift")
    monkeypatch.setattr(ranges, "STALL", 0.1)
    site.odd = [odd, odd]
    assert held(copies.bring(f"{site.url}/set/a.jsonl")) == TEXT
    assert not site.odd
    monkeypatch.setattr(copies, "TRIES", 2)
    site.files["/set/b.jsonl"] = TEXT
    site.odd = [odd] * 50
    with pytest.raises(SourceError, match="in 2 tries"):
        copies.bring(f"{site.url}/set/b.jsonl")
    assert not below(str(Path(copies.place_of(f"{site.url}/set/b.jsonl")).parent)).keys() - {"a.jsonl"}


@pytest.mark.parametrize("more", [-(len(TEXT) // 2), len(TEXT)])
def test_a_size_that_no_range_confirms_is_no_end(
    site: Site, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a file would be taken for the whole of it."""
    monkeypatch.setattr(copies, "TRIES", 2)
    site.lie, site.files["/set/c.jsonl"] = more, TEXT
    with pytest.raises(SourceError, match="in 2 tries"):
        copies.bring(f"{site.url}/set/c.jsonl")
    assert "c.jsonl" not in below(str(Path(copies.place_of(f"{site.url}/set/c.jsonl")).parent))
    site.lie = 0
    assert held(copies.bring(f"{site.url}/set/c.jsonl")) == TEXT


def test_a_file_that_changes_between_its_ranges_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server gives no mark: the ends that it has then are others than those that came."""
    url, other = f"{site.url}/set/a.jsonl", TEXT.replace(b"7", b"8")
    real = ranges.Remote.read

    def read(self: ranges.Remote, offset: int, count: int, tries: int | None = None) -> bytes:
        if offset == 2000:
            site.files["/set/a.jsonl"] = other
        return real(self, offset, count, tries)

    monkeypatch.setattr(ranges.Remote, "read", read)
    if site.ranges:
        with pytest.raises(SourceError, match="changed while it was read"):
            copies.bring(url)
        assert held(copies.bring(url)) == other
    else:
        assert held(copies.bring(url)) == TEXT  # it came in one answer


def test_a_size_that_is_no_size_of_the_file(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "TRIES", 2)
    for site.lie in (1, 5000):
        with pytest.raises(SourceError):
            copies.bring(f"{site.url}/set/a.jsonl")


def test_what_has_not_changed_is_not_read_again_and_what_has_is_told(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{site.url}/set/a.jsonl?key=secret"
    place = copies.bring(url)
    before, stamp = site.sent, os.stat(place)
    assert copies.bring(url) == place and held(place) == TEXT
    assert os.stat(place).st_ino == stamp.st_ino  # the same file: at most its ends were asked for
    assert site.sent == before or not site.marks
    assert not caplog.records
    site.files["/set/a.jsonl"] = TEXT.replace(b"7", b"8")  # of the same size
    copies.bring(url)
    assert held(place) == TEXT.replace(b"7", b"8")
    assert any(
        "the file changed" in one.message and url.partition("?")[0] in one.message for one in caplog.records
    )
    assert os.stat(place).st_mtime_ns != stamp.st_mtime_ns
    written = [held(str(path)) for path in (Path(place).parents[3]).rglob("*") if path.is_file()]
    assert not any(b"secret" in one for one in written) and "secret" not in caplog.text


def test_folders_globs_and_braces(tmp_path: Path) -> None:
    for name in ("set/p-9.jsonl", "set/p-10.jsonl", "set/deep/p-1.jsonl", "set/other.txt", "else/p-1.jsonl"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    system = in_memory(tmp_path / "data", "bucket")
    every = {"p-9.jsonl", "p-10.jsonl", "deep/p-1.jsonl", "other.txt"}
    for text, found in {
        "set": every,
        "set/": every,
        "set/p-*.jsonl": {"p-9.jsonl", "p-10.jsonl"},
        "set/**/*.jsonl": every - {"other.txt"},
        "set/p-{9..10}.jsonl": {"p-9.jsonl", "p-10.jsonl"},
        "{set,else}/p-*.jsonl": {"set/p-9.jsonl", "set/p-10.jsonl", "else/p-1.jsonl"},
    }.items():
        cache = tmp_path / text.strip("/").replace("/", "_")
        place = copies.bring(f"memory://bucket/{text}", cache)
        start = Path(copies.bring("memory://bucket/set/p-9.jsonl", cache)).parent
        folder = start.parent if text.startswith("{") else start
        assert set(below(str(folder))) == found | ({"p-9.jsonl"} if folder == start else set()), text
        assert places.url_of(place) == f"memory://bucket/{text.rstrip('/')}"
    system.rm("/bucket/set/p-9.jsonl")
    place = copies.bring("memory://bucket/set", tmp_path / "set")
    assert set(below(place)) == every - {"p-9.jsonl"}  # what is gone there is gone here
    for absent in (
        "memory://bucket/none",
        "memory://bucket/none-*.jsonl",
        "memory://bucket/../x",
        "memory://",
    ):
        with pytest.raises(SourceError):
            copies.bring(absent)


def test_a_listing_cannot_name_a_file_outside(tmp_path: Path) -> None:
    system = in_memory(tmp_path, "bucket")
    for name in ("/bucket/set/../../../x", "/bucket/set/a\0b", "/bucket/set/" + "n" * 300):
        system.store[name] = fsspec.implementations.memory.MemoryFile(system, name, b"x")
    system.pipe("/bucket/set/ok", b"ok")
    assert below(copies.bring("memory://bucket/set")) == {"ok": b"ok"}
    assert [path.name for path in tmp_path.rglob("x")] == []


def test_copies_take_no_more_than_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        (tmp_path / "data" / f"{number}").parent.mkdir(exist_ok=True)
        (tmp_path / "data" / f"{number}").write_bytes(bytes([number]) * 1000)
    in_memory(tmp_path / "data", "bucket")
    monkeypatch.setenv("PACKTRAIN_REMOTE_GB", "4e-6")  # 4,000 bytes
    with pytest.raises(SourceError, match="PACKTRAIN_REMOTE_GB"):
        copies.bring("memory://bucket")
    places = [copies.bring(f"memory://bucket/{number}") for number in range(6)]
    there = [os.path.isfile(place) for place in places]
    assert there[-1] and 1 <= sum(there) <= 4
    first = places[there.index(False)]
    assert copies.present(first) and held(first) == bytes([there.index(False)]) * 1000  # it comes back
    assert not copies.present(tmp_path / "nowhere")
    for wrong in ("0", "-1", "much"):
        monkeypatch.setenv("PACKTRAIN_REMOTE_GB", wrong)
        with pytest.raises(ValueError, match="PACKTRAIN_REMOTE_GB"):
            world.copies_limit(str(tmp_path))


def test_without_a_network_whole_copies_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "TRIES", 2)
    with serving() as site:
        site.files |= {"/set/a.txt": b"a", "/set/b.txt": b"b"}
        url = f"{site.url}/set/"
        place = copies.bring(url)
        site.files["/two/a.txt"] = b"a"
        copies.bring(f"{site.url}/two/a.txt")
    assert below(copies.bring(url)) == {"a.txt": b"a", "b.txt": b"b"}
    assert any("could not be reached" in one.message for one in caplog.records)
    with pytest.raises(SourceError, match="could not be reached"):
        copies.bring(url.replace("/set/", "/two/"))  # nobody knows what else it holds
    (Path(place) / "b.txt").unlink()
    with pytest.raises(SourceError, match="could not be reached"):
        copies.bring(url)


def test_what_is_left_for_later_comes_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("a.tar", "b.tar", "index.json"):
        (tmp_path / "data" / name).write_text(name)
    in_memory(tmp_path / "data", "bucket")
    place = copies.bring("memory://bucket", later=lambda name: name.endswith(".tar"))
    assert set(below(place)) == {"index.json"}
    assert copies.present(Path(place) / "b.tar") and set(below(place)) == {"index.json", "b.tar"}
    assert copies.names(place) == ["a.tar", "b.tar", "index.json"] and copies.names(tmp_path) is None
    assert copies.size_of(Path(place) / "a.tar") == 5
    with pytest.raises(SourceError, match="does not exist"):
        copies.present(Path(place) / "c.tar")


@pytest.mark.parametrize("scheme", ["gs", "hf"])
def test_file_systems_of_other_packages(scheme: str) -> None:
    """A file system of the scheme that is a fake: what it is called by, listed, read by ranges, marked."""
    from fsspec.implementations.memory import MemoryFileSystem

    asked: list[tuple[int | None, int | None]] = []

    class Fake(MemoryFileSystem):
        protocol = scheme
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(MemoryFileSystem._strip_protocol(path.replace(f"{scheme}://", "memory://")))

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
            asked.append((start, end))
            return bytes(super().cat_file(path, start=start, end=end))

    fsspec.register_implementation(scheme, Fake, clobber=True)
    system = fsspec.filesystem(scheme)
    system.pipe("/datasets/org/set/data/a.jsonl", TEXT)
    place = copies.bring(f"{scheme}://datasets/org/set/data")
    assert below(place) == {"a.jsonl": TEXT}
    assert asked and all(stop - start <= 1000 for start, stop in asked)
    assert places.url_of(place) == f"{scheme}://datasets/org/set/data"
    importlib.import_module("fsspec.registry")._registry.pop(scheme)


def test_one_of_many_fetches_a_file(site: Site) -> None:
    with ThreadPoolExecutor(6) as pool:
        places = list(pool.map(copies.bring, [f"{site.url}/set/a.jsonl"] * 6))
    assert {held(place) for place in places} == {TEXT}
    assert site.sent == len(TEXT) or not site.marks


def test_a_fetch_that_was_stopped_at_any_write_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(TEXT)
    in_memory(tmp_path / "data", "bucket")
    monkeypatch.setattr(copies, "OLD", -1.0)  # what a stopped one left goes at once

    def fetch(out: Path) -> None:
        copies._taken.clear()
        copies._swept.clear()
        assert held(copies.bring("memory://bucket/a.jsonl", out)) == TEXT

    assert crash_points(fetch, tmp_path / "crash", ignore=(".locks",)) > 4
