"""Stores of other libraries as sources: their rows are the records that were written, media to the byte.

None of the libraries is in the development environment: `tests/hosts/test_stores.py` runs this file.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packtrain.errors import MissingExtraError, SourceError, UnknownNameError
from packtrain.media.location import media_refs, read_bytes
from packtrain.sources import open_source
from packtrain.sources._stores import plain
from packtrain.sources.chat import ChatSource

STORES = {"mds": "streaming", "litdata": "litdata", "lance": "lance"}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, about themselves


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    from packtrain.template import ensure_torchvision

    if importlib.util.find_spec(STORES[request.param]) is None:
        pytest.skip(f"{STORES[request.param]} is not installed; tests/hosts/test_stores.py runs this")
    ensure_torchvision()
    return str(request.param)


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """30 chats with a picture each, and where the pictures lie."""
    made = []
    for number in range(30):
        path = tmp_path / "pictures" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (20 + number, 16), (number * 8, 40, 90)).save(path, "JPEG")
        turns = [
            ("user", f"<image>\nWhat is {number}? 你好"),
            ("assistant", f"It is é {number}." * (number % 4 + 1)),
        ]
        messages = [{"role": role, "content": text} for role, text in turns]
        made.append({"id": number, "messages": messages, "path": path})
    return made


def write(kind: str, out: Path, rows: list[dict[str, Any]], *, picture: str = "bytes") -> None:
    if kind == "mds":
        import streaming

        columns = {"id": "int", "messages": "json", "image": picture}
        with streaming.MDSWriter(columns=columns, out=str(out), size_limit=4000) as writer:
            for row in rows:
                writer.write({"id": row["id"], "messages": row["messages"], "image": _held(row, picture)})
    elif kind == "litdata":
        from litdata.streaming.cache import Cache

        cache = Cache(str(out), chunk_bytes=4000)
        for number, row in enumerate(rows):
            held = {"messages": json.dumps(row["messages"]), "image": _held(row, picture)}
            cache[number] = {"id": row["id"], **held}
        cache.done()
        cache.merge()
    else:
        import lance
        import pyarrow as pa

        held = [{"bytes": row["path"].read_bytes(), "path": row["path"].name} for row in rows]
        table = {
            "id": [row["id"] for row in rows],
            "messages": [row["messages"] for row in rows],
            "image": held,
        }
        lance.write_dataset(pa.table(table), str(out), max_rows_per_file=8)


def _held(row: dict[str, Any], picture: str) -> Any:
    return row["path"].read_bytes() if picture == "bytes" else Image.open(row["path"])


def facts(source: Any) -> list[Any]:
    told = []
    for index in range(len(source)):
        sample = source[index]
        turns = [
            (m["role"], [p["text"] if p["type"] == "text" else p["type"] for p in m["content"]])
            for m in sample["messages"]
        ]
        told.append((turns, [read_bytes(ref) for ref in media_refs(sample)]))
    return told


def plain_source(rows: list[dict[str, Any]], folder: Path) -> ChatSource:
    path = folder / "train.jsonl"
    lines = [{"id": r["id"], "messages": r["messages"], "image": str(r["path"])} for r in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return ChatSource(open_source(path))


@pytest.mark.parametrize("picture", ["bytes", "jpeg"])
def test_the_same_samples_as_jsonl(kind: str, rows: Any, tmp_path: Path, picture: str) -> None:
    """Lance has no type for pictures: it holds their bytes either way."""
    write(kind, tmp_path / "store", rows, picture=picture)
    source = open_source(tmp_path / "store")  # the kind is found by content
    assert source.fields()["kind"] == kind and len(source) == 30
    assert len(source.shards) > 2 and source.shards[-1].stop == 30
    want = facts(plain_source(rows, tmp_path))
    chats = ChatSource(source)
    assert facts(chats) == want
    again = pickle.loads(pickle.dumps(chats))
    assert [facts([again[i]])[0] for i in (29, 0, 17)] == [want[i] for i in (29, 0, 17)]
    shard = source.shards[1]
    assert source.where(shard.start) == f"{shard.name}[0]"


def test_the_fingerprint_is_of_the_content(kind: str, rows: Any, tmp_path: Path) -> None:
    write(kind, tmp_path / "store", rows)
    first = open_source(tmp_path / "store", kind=kind).fingerprint
    assert open_source(tmp_path / "store").fingerprint == first
    write(kind, tmp_path / "other", rows[:-1])
    assert open_source(tmp_path / "other").fingerprint != first


def test_damage_and_changes_are_named(kind: str, rows: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(kind, store, rows)
    source = open_source(store)
    path = store / source.shards[1].name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(SourceError, match=r"changed"):
        source[source.shards[1].start]
    path.unlink()
    with pytest.raises(SourceError, match=r"gone|missing|no such|cannot be read"):
        pickle.loads(pickle.dumps(source))[0]
    with pytest.raises(SourceError):
        open_source(store)


def test_a_torn_index_is_named(kind: str, rows: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(kind, store, rows)
    (path,) = store.glob("_versions/*.manifest" if kind == "lance" else "index.json")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(Exception) as told:
        open_source(store, kind=kind)
    assert getattr(told.value, "exit_code", None) == 2 and str(store) in str(told.value)


@pytest.mark.parametrize("encoding", ["pil", "pkl"])
def test_what_is_no_file_of_a_medium_is_refused(rows: Any, tmp_path: Path, kind: str, encoding: str) -> None:
    """A decoded picture, a pickle; a Lance dataset holds neither."""
    if kind == "mds":
        write(kind, tmp_path / "store", rows, picture=encoding)
    elif kind == "litdata":
        from litdata.streaming.cache import Cache

        cache = Cache(str(tmp_path / "store"), chunk_bytes=4000)
        for number in range(9):
            cache[number] = {"text": "a", "image": Image.new("RGB", (4, 4)) if encoding == "pil" else {1, 2}}
        cache.done()
        cache.merge()
    else:
        return
    with pytest.raises(SourceError, match="which is no file of a medium"):
        open_source(tmp_path / "store")


def test_a_version_and_its_deletions(rows: Any, tmp_path: Path) -> None:
    lance = pytest.importorskip("lance", reason="tests/hosts/test_stores.py runs this")
    store = tmp_path / "store"
    write("lance", store, rows)
    first = open_source(store)
    lance.dataset(str(store)).delete("id % 10 == 3")
    now = open_source(store)
    assert [now[i]["id"] for i in range(len(now))] == [i for i in range(30) if i % 10 != 3]
    assert now.fingerprint != first.fingerprint
    old = open_source(store, version=1)
    assert old.fingerprint == first.fingerprint and len(old) == 30 and old[3]["id"] == 3
    assert set(open_source(store, columns=["id"])[0]) == {"id"}
    with pytest.raises(UnknownNameError, match="ids"):
        open_source(store, columns=["ids"])


def test_without_the_library(kind: str, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(kind, tmp_path / "store", rows)
    monkeypatch.setitem(sys.modules, STORES[kind], None)
    with pytest.raises(MissingExtraError) as told:
        open_source(tmp_path / "store")
    assert f"packtrain[{kind}]" in str(told.value.hint)


def test_values_are_plain() -> None:
    held = {"a": np.int64(3), "b": np.arange(3), "c": [np.float32(0.5)], "d": bytearray(b"x"), "e": (1, "y")}
    assert plain(held) == {"a": 3, "b": [0, 1, 2], "c": [0.5], "d": b"x", "e": [1, "y"]}


def test_an_open_store_is_measured_by_workers(kind: str, rows: Any, tmp_path: Path) -> None:
    """Ranges go to worker processes; lengths are those of the same rows as JSONL."""
    from packtrain.pipeline.measure import measure

    write(kind, tmp_path / "store", rows)
    words = _words()
    ours = measure(ChatSource(open_source(tmp_path / "store")), words, tmp_path / "lengths", workers=2)
    want = measure(plain_source(rows, tmp_path), words, tmp_path / "plain", workers=1)
    assert ours.tokens.tolist() == want.tokens.tolist()


def _words() -> Any:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "export"))
    from export_sets import Words

    return Words()


def test_a_store_behind_a_url(
    kind: str, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies are read as the files on a disk are: the same rows, ids and fingerprint, in workers too."""
    pytest.importorskip("fsspec")
    from packtrain.pipeline.measure import measure
    from packtrain.remote.copies import place_of
    from remote_site import afresh, bucket

    afresh(tmp_path, monkeypatch)
    write(kind, tmp_path / "store", rows)
    near = open_source(tmp_path / "store")
    want = facts(ChatSource(near))
    with bucket("gs") as system:
        for path in (tmp_path / "store").rglob("*"):
            if path.is_file():
                system.pipe_file(f"/b/store/{path.relative_to(tmp_path / 'store')}", path.read_bytes())
        far = open_source("gs://b/store")
        assert (far.fingerprint, far.fields(), far.where(17)) == (
            near.fingerprint,
            near.fields(),
            near.where(17),
        )
        assert [shard.name for shard in far.shards] == [shard.name for shard in near.shards]
        assert facts(ChatSource(far)) == want
        lengths = measure(ChatSource(open_source("gs://b/store/")), _words(), tmp_path / "lengths", workers=2)
        assert len(lengths) == 30
        again = pickle.loads(pickle.dumps(ChatSource(far)))
        held = Path(place_of("gs://b/store"))
        for shard in far.shards:
            (held / shard.name).unlink()  # let go: copies take room
        assert facts(again) == want
        for shard in far.shards:
            (held / shard.name).unlink()
        assert facts(ChatSource(far)) == want  # of a store that is open already
        name = f"/b/store/{far.shards[1].name}"
        system.rm(name)
        with pytest.raises(SourceError):
            open_source("gs://b/store")
        write(kind, tmp_path / "other", rows[5:])
        system.rm("/b/store", recursive=True)
        for path in (tmp_path / "other").rglob("*"):
            if path.is_file():
                system.pipe_file(f"/b/store/{path.relative_to(tmp_path / 'other')}", path.read_bytes())
        assert open_source("gs://b/store").fingerprint == open_source(tmp_path / "other").fingerprint
        assert facts(ChatSource(open_source("gs://b/store"))) == want[5:]
