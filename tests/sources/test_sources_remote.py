"""Sources behind URLs: every kind gives the records, ids and fingerprint of the files on a disk."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import SampleError, SourceError
from packtrain.media import location
from packtrain.media.image import read_header
from packtrain.media.location import media_refs
from packtrain.remote import copies, ranges
from packtrain.sources import _handles, open_source
from packtrain.sources.chat import ChatSource, open_chats
from remote_site import empty_memory, in_memory, serving

fsspec = pytest.importorskip("fsspec")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def turns(number: int, **further: Any) -> dict[str, Any]:
    asked, said = {"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}."}
    return {"messages": [asked, said], **further}


ROWS = [turns(number) for number in range(12)]
LINES = [json.dumps(row) + "\n" for row in ROWS]


def picture() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (40, 30)).save(out, "PNG")
    return out.getvalue()


def lay(folder: Path) -> None:
    """A file or folder of every kind."""

    def put(name: str, data: bytes | str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    text = "".join(LINES)
    put("rows.jsonl", text)
    put("rows.json", json.dumps(ROWS))
    put("rows.jsonl.gz", gzip.compress(text.encode()))
    for shard in (9, 10, 11):
        put(f"shards/p-{shard}.jsonl", "".join(LINES[(shard - 9) * 4 : (shard - 8) * 4]))
    import pyarrow as pa

    for shard in (0, 1):
        (folder / "tables/deep").mkdir(parents=True, exist_ok=True)
        rows = pa.Table.from_pylist(ROWS[shard::2])
        pq.write_table(rows, folder / f"tables/{'deep/' * shard}t{shard}.parquet", row_group_size=2)
    for shard in (0, 1):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for number in range(shard, 12, 2):
                said = {"messages": [{"role": "user", "content": "<image>"}, ROWS[number]["messages"][1]]}
                for kind, data in (("json", json.dumps(said).encode()), ("png", picture())):
                    info = tarfile.TarInfo(f"{number:03d}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        put(f"tars/s-{shard}.tar", out.getvalue())
    for number in range(3):
        asked = turns(number, images=[f"{number}.png"])
        asked["messages"][0]["content"] = "<image>"
        put(f"pairs/{number}.json", json.dumps(asked))
        put(f"pairs/{number}.png", picture())
    with_media = [turns(n, images=["media/1.png"]) for n in range(2)]
    for row in with_media:
        row["messages"][0]["content"] = "<image>" + row["messages"][0]["content"]
    put("asked.jsonl", "".join(json.dumps(row) + "\n" for row in with_media))
    put("media/1.png", picture())
    put("mixed.yaml", "sources:\n- {path: shards}\n- {path: rows.jsonl, weight: 0.5}\n")


KINDS = ["rows.jsonl", "rows.json", "rows.jsonl.gz", "shards", "shards/p-*.jsonl", "shards/p-{9..10}.jsonl"]
KINDS += ["tables", "tables/t0.parquet", "tars", "tars/s-1.tar", "pairs", "mixed.yaml"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(ranges, "PAUSE", 0.001)
    copies._taken.clear()
    lay(tmp_path / "data")
    in_memory(tmp_path / "data", "bucket/set")
    yield tmp_path / "data"
    empty_memory()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_what_it_is_on_a_disk(here: Path, name: str) -> None:
    near, far = open_source(here / name), open_source(f"memory://bucket/set/{name}")
    assert far.fingerprint == near.fingerprint
    assert [far.where(n) for n in range(len(far))] == [near.where(n) for n in range(len(near))]
    chats = [ChatSource(near), ChatSource(far)] if name != "mixed.yaml" else [near, far]
    places = [str(here), copies.place_of("memory://bucket/set")]
    told = [
        [json.dumps(c[n]).replace(p, "") for n in range(len(c))] for c, p in zip(chats, places, strict=True)
    ]
    assert told[0] == told[1]
    for number in range(len(chats[1])):
        for ref in media_refs(chats[1][number]):
            assert read_header(ref)[:2] == (40, 30)
    assert [dict(row) for row in pickle.loads(pickle.dumps(far))] == [dict(row) for row in far]


def test_what_is_not_there_is_named_by_its_url(here: Path) -> None:
    for name in ("none.jsonl", "none-*.jsonl", "none"):
        with pytest.raises(SourceError, match=f"memory://bucket/set/{name.split('*')[0]}"):
            open_source(f"memory://bucket/set/{name}")


def test_media_beside_a_remote_source_are_read_and_urls_of_records_are_not(here: Path) -> None:
    chats = open_chats("memory://bucket/set/asked.jsonl")
    (ref,) = media_refs(chats[0])
    assert read_header(ref)[:2] == (40, 30) and location.exists(ref)
    assert location.read_bytes(ref) == picture()
    fsspec.filesystem("memory").rm("/bucket/set/media/1.png")
    assert location.read_bytes(ref) == picture()  # a copy is here
    Path(ref).unlink()
    with pytest.raises(SampleError, match="does not exist") as gone:
        location.read_bytes(ref)
    assert gone.value.reason == "missing_media"
    fsspec.filesystem("memory").pipe("/bucket/set/media/1.png", picture())
    near = open_chats(here / "asked.jsonl")
    names = [location.identity(media_refs(held[0])[0], held.media_root) for held in (near, chats)]
    assert names[0] == names[1]
    for named, reason in (
        ("memory://bucket/set/media/1.png", "remote_media"),
        ("https://host/1.png", "remote_media"),
        ("../elsewhere.png", "outside_media_root"),
    ):
        row = turns(0, images=[named])
        row["messages"][0]["content"] = "<image>?"
        fsspec.filesystem("memory").pipe("/bucket/set/one.jsonl", json.dumps(row).encode())
        with pytest.raises(SampleError) as error:
            open_chats("memory://bucket/set/one.jsonl")[0]
        assert error.value.reason == reason, named


def test_a_file_that_changes_is_named(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = open_source("memory://bucket/set/rows.jsonl")
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/set/rows.jsonl", "".join(LINES).replace("3", "4").encode())
    assert source[3] == ROWS[3]  # the copy that was opened
    again = open_source("memory://bucket/set/rows.jsonl")
    assert again.fingerprint != source.fingerprint and again[3] == turns(4)
    assert "the file changed: memory://bucket/set/rows.jsonl" in caplog.text
    with pytest.raises(SourceError, match="the file changed"):
        source[4]


def test_a_copy_that_was_let_go_comes_back(here: Path) -> None:
    source = open_source("memory://bucket/set/shards")
    for path in Path(source.folder).glob("*.jsonl"):
        _handles._close(str(path))
        path.unlink()
    assert [source[n] for n in range(12)] == ROWS
    for path in Path(source.folder).glob("*.jsonl"):
        _handles._close(str(path))
        path.unlink()
    changed = "".join(LINES[:4]).replace("1", "7").encode()
    fsspec.filesystem("memory").pipe("/bucket/set/shards/p-9.jsonl", changed)
    assert source[11] == ROWS[11]
    with pytest.raises(SourceError, match="the file changed"):
        source[0]


def test_over_http_with_a_page_of_links(here: Path) -> None:
    with serving() as site:
        for path in (here / "shards").iterdir():
            site.files[f"/set/{path.name}"] = path.read_bytes()
        near = open_source(here / "shards")
        for name in ("set/", "set", "set/p-*.jsonl", "set/p-{9..11}.jsonl"):
            assert open_source(f"{site.url}/{name}").fingerprint == near.fingerprint
        one = f"{site.url}/set/p-9.jsonl?signature=abc"
        assert open_source(one).fingerprint == open_source(here / "shards/p-9.jsonl").fingerprint
