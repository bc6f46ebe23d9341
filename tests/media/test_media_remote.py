"""Media behind URLs: range reads over HTTP on this machine and over fsspec's memory file system."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from made_images import MADE
from test_media_tar import make_tar

from packtrain.errors import MissingExtraError, SampleError
from packtrain.media import location
from packtrain.media.image import open_image, read_header
from packtrain.remote import ranges
from remote_site import Site, serving

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

# aiohttp's connector is closed by fsspec when the interpreter ends, after its loop
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

LARGE = MADE["bmp"]() + bytes(1 << 20)


@pytest.fixture(params=[True, False], ids=["ranges", "no-ranges"])
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(ranges, "PAUSE", 0.001)
    with serving(ranges=request.param) as server:
        yield server


@pytest.fixture
def memory() -> Iterator[object]:
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/a/x.jpg", MADE["jpeg-exif6"]())
    system.pipe("/bucket/large.bmp", LARGE)
    yield system
    system.rm("/bucket", recursive=True)


def reason(ref: str) -> str:
    with pytest.raises(SampleError) as error:
        location.read_bytes(ref)
    assert not location.exists(ref)
    return error.value.reason


def test_images_over_http(site: Site) -> None:
    for name in ("jpeg-exif6", "png", "gif-animated", "webp"):
        site.files[f"/{name}"] = MADE[name]()
        assert read_header(f"{site.url}/{name}") == read_header(MADE[name]())
        assert open_image(f"{site.url}/{name}").size == open_image(MADE[name]()).size
    assert location.exists(f"{site.url}/png")
    assert location.identity(f"{site.url}/png", site.url)[:2] == ("png", len(MADE["png"]()))
    assert location.identity(f"{site.url}/png")[0] == f"{site.url}/png"


def test_only_ranges_are_asked_for(site: Site) -> None:
    site.files["/large.bmp"] = LARGE
    assert read_header(f"{site.url}/large.bmp")[:2] == (61, 40)
    assert site.sent < 20_000 if site.ranges else site.sent == len(LARGE)
    with location.open_head(f"{site.url}/large.bmp") as head:
        assert head.size == len(LARGE)
        assert head.at(head.size - 3, 10) == LARGE[-3:]
        assert head.at(head.size + 1, 10) == b""
    assert location.read_bytes(f"{site.url}/large.bmp") == LARGE


def test_faults_of_a_server(site: Site) -> None:
    assert reason(f"{site.url}/none.jpg") == "missing_media"
    site.files["/a.jpg"] = MADE["jpeg"]()
    url = f"{site.url}/a.jpg"
    site.fail = [500, 503]
    assert read_header(url)[:2] == (61, 40)  # tried again
    for status, expected in ((500, "unreachable_media"), (403, "unreadable_media")):
        site.fail = [status] * 50
        with pytest.raises(SampleError) as error:
            read_header(url)
        assert error.value.reason == expected
        site.fail = []
    site.shutdown()
    site.server_close()
    with pytest.raises(SampleError, match="3 tries") as error:
        read_header(f"{site.url}/b.jpg")
    assert error.value.reason == "unreachable_media" and "network" in (error.value.hint or "")


@pytest.mark.parametrize("odd", ["drop", "stall", "short", "more", "shift"])
def test_a_server_that_drops_stalls_truncates_or_lies(
    site: Site, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: asked again. Always: a network fault in the ledger, never other bytes or a damaged medium."""
    if odd == "shift" and not site.ranges:
        pytest.skip("a server without ranges has none to shift")
    monkeypatch.setattr(ranges, "STALL", 0.2)
    data = MADE["jpeg"]()
    site.files["/a.jpg"] = data
    url = f"{site.url}/a.jpg"
    site.odd = [odd]
    assert location.read_bytes(url) == data
    assert not site.odd
    site.odd = [odd] * 50
    assert reason(url) == "unreachable_media"


def test_tar_members_over_http(site: Site, tmp_path) -> None:
    members = {f"{n:03d}.jpg": MADE["jpeg"]() for n in range(5)} | {"x/1.png": MADE["png"]()}
    site.files["/s.tar"] = make_tar(tmp_path / "s.tar", members).read_bytes()
    for name, data in members.items():
        ref = location.resolve(f"tar:{site.url}/s.tar!{name}", allow_remote=True)
        assert location.read_bytes(ref) == data and read_header(ref) == read_header(data)
    assert reason(f"tar:{site.url}/s.tar!none.jpg") == "missing_media"


def test_memory(memory) -> None:
    ref = "memory://bucket/a/x.jpg"
    assert read_header(ref)[:3] == (40, 61, 6)
    assert location.read_bytes(ref) == MADE["jpeg-exif6"]()
    assert reason("memory://bucket/none.jpg") == "missing_media"
    assert reason("memory://bucket/a") == "unreadable_media"
    name, size, digest = location.identity(ref, "memory://bucket")
    assert (name, size) == ("a/x.jpg", len(MADE["jpeg-exif6"]()))
    assert digest == hashlib.sha256(MADE["jpeg-exif6"]()[:4096]).hexdigest()


def test_remote_roots() -> None:
    root = "s3://bucket/set"
    assert location.resolve("a/b.jpg", root) == "s3://bucket/set/a/b.jpg"
    assert location.resolve("a/../b.jpg", root) == "s3://bucket/set/b.jpg"
    assert location.resolve("tar:a.tar!b.jpg", root) == "tar:s3://bucket/set/a.tar!b.jpg"
    for other in ("gs://other/b.jpg", "s3://bucket/set-two/b.jpg", "tar:https://host/s.tar!b.jpg"):
        for where in (root, "/local/root", None):
            with pytest.raises(SampleError) as error:
                location.resolve(other, where)
            assert error.value.reason == "remote_media", (other, where)
            assert location.resolve(other, where, allow_remote=True) == other
    assert location.resolve("/local/b.jpg", root) == "/local/b.jpg"
    assert location.resolve("s3://bucket/set/b.jpg", root, absolute_ok=False) == "s3://bucket/set/b.jpg"
    assert location.resolve("../b.jpg", root, allow_outside=True) == "s3://bucket/b.jpg"
    for ref, options in [
        ("../b.jpg", {}),
        ("../set-two/b.jpg", {}),
        ("..%2f..%2fb.jpg".replace("%2f", "/"), {}),
        ("%2e%2e/b.jpg", {}),
        ("/local/b.jpg", {"absolute_ok": False}),
        ("s3://bucket/set-two/b.jpg", {"absolute_ok": False}),
        ("s3://bucket/set/../b.jpg", {"absolute_ok": False}),
        ("https://host/b.jpg", {"absolute_ok": False}),
    ]:
        with pytest.raises(SampleError) as error:
            location.resolve(ref, root, **options)
        assert error.value.reason == "outside_media_root", ref
        with pytest.raises(SampleError):  # one permission is not the other
            location.resolve(ref, root, **options, allow_remote=True)
    for ways in ({"allow_remote": True}, {"allow_remote": True, "allow_outside": True}):
        ref = "s3://bucket/b.jpg"
        assert location.resolve(ref, "/local/root", absolute_ok=False, **ways) == ref
    for root in ("/local/root", "s3://other"):
        with pytest.raises(SampleError) as error:
            location.resolve("s3://bucket/b.jpg", root, allow_outside=True, absolute_ok=False)
        assert error.value.reason == "remote_media", root
    for scheme in ("ftp", "sftp", "github", "reference", "unknown"):
        assert reason(f"{scheme}://host/b.jpg") == "unsupported_media"
    assert reason("simplecache::https://host/b.jpg") == "missing_media"  # a file name like any other


def test_a_missing_package_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtraError, match="fsspec") as error:
        monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
        location.read_bytes("s3://bucket/key")
    assert "packtrain[remote]" in (error.value.hint or "")
    monkeypatch.undo()
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match="s3") as error:
            location.read_bytes("s3://bucket/key")
        assert "s3fs" in (error.value.hint or "")


def test_a_name_leads_back_to_its_medium(tmp_path, memory) -> None:
    """`ref_of` is the inverse of `identity`, for files, tar members and URLs, with and without a root."""
    (tmp_path / "图 1.jpg").write_bytes(MADE["jpeg"]())
    tar = make_tar(tmp_path / "s.tar", {"a!b.jpg": MADE["png"]()})
    for ref, root in [
        (str(tmp_path / "图 1.jpg"), str(tmp_path)),
        (str(tmp_path / "图 1.jpg"), None),
        (f"tar:{tar}!a!b.jpg", str(tmp_path)),
        (f"tar:{tar}!a!b.jpg", None),
        ("memory://bucket/a/x.jpg", "memory://bucket"),
        ("memory://bucket/a/x.jpg", None),
        ("memory://bucket/a/x.jpg", str(tmp_path)),
    ]:
        name = location.identity(ref, root)[0]
        assert location.read_bytes(location.ref_of(name, root)) == location.read_bytes(ref), (ref, root)
