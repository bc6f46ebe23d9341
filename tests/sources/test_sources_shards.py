"""Several files as one source, compressed files, and which files a path means."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import ConfigError, SampleError, SourceError
from packtrain.extend import Source
from packtrain.sources import _handles, open_source, shards
from packtrain.sources._open import expand, natural, ordered
from packtrain.sources.chat import ChatSource
from packtrain.sources.shards import Shards

zstandard = pytest.importorskip("zstandard")

Write = Callable[..., Path]
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,  # as the zstd command does
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def rows(start: int, count: int) -> list[dict[str, Any]]:
    return [{"i": n, "t": "é" * (n % 5)} for n in range(start, start + count)]


def text(records: list[Any]) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()


@pytest.fixture
def folder(write: Write, tmp_path: Path) -> Path:
    write("set/part-9.jsonl", rows(0, 5))
    write("set/part-10.jsonl", rows(5, 7))
    write("set/part-100.jsonl.gz", gzip.compress(text(rows(12, 3))))
    write("set/_SUCCESS", b"")
    write("set/.part-8.jsonl.swp", b"x")
    return tmp_path / "set"


def test_natural_order() -> None:
    names = ["b", "a10", "a9", "a09", "a", "x/1", "a9/z", "é2", "é10", "A1"]
    assert sorted(names, key=natural) == ["A1", "a", "a09", "a9", "a9/z", "a10", "b", "x/1", "é2", "é10"]
    assert ordered(["p3", "p1", "p2"], known=["p2", "gone"]) == ["p2", "p1", "p3"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["p", "-", "/", "0", "3", "19", "9"]), max_size=4), max_size=6))
def test_names_that_differ_in_digits_alone_are_in_natural_order(names: list[list[str]]) -> None:
    told = {"".join(name) for name in names}
    assert ordered(told) == sorted(told, key=natural)


def test_a_folder_is_one_source(folder: Path) -> None:
    source = open_source(folder)
    assert isinstance(source, Shards) and isinstance(source, Source)
    assert list(source) == rows(0, 15)
    assert [source.where(i) for i in (0, 5, 14)] == [
        "part-9.jsonl:1",
        "part-10.jsonl:1",
        "part-100.jsonl.gz:3",
    ]
    assert [(s.name, s.start, s.stop) for s in source.shards] == [
        ("part-9.jsonl", 0, 5),
        ("part-10.jsonl", 5, 12),
        ("part-100.jsonl.gz", 12, 15),
    ]
    again = pickle.loads(pickle.dumps(source))
    assert list(again) == rows(0, 15) and again.fingerprint == source.fingerprint
    json.dumps(source.fields())
    for bad in (-1, 15):
        with pytest.raises(IndexError):
            source[bad]


def test_globs_and_braces(folder: Path) -> None:
    assert len(open_source(f"{folder}/part-*.jsonl")) == 12
    assert len(open_source(f"{folder}/part-{{9,10}}.jsonl")) == 12
    assert len(open_source(f"{folder}/part-{{9..10}}.jsonl")) == 12
    assert open_source(f"{folder.parent}/**/part-9.jsonl").where(0) == "set/part-9.jsonl:1"
    with pytest.raises(SourceError, match=r"part-11\.jsonl does not exist"):
        open_source(f"{folder}/part-{{9..11}}.jsonl")
    with pytest.raises(SourceError, match="matches no files") as error:
        open_source(f"{folder.parent}/*/*/part-*.jsonl", kind="shards")
    assert "part-" in (error.value.hint or "")  # PB-74: they lie at another depth
    (folder / "a[1].jsonl").write_bytes(text(rows(0, 1)))
    assert len(open_source(folder / "a[1].jsonl")) == 1  # a file of that very name
    assert [os.path.basename(p) for p in expand(f"{folder}/{{part,x}}-*.jsonl", ())] == [
        "part-9.jsonl",
        "part-10.jsonl",
    ]


def test_appending_keeps_ids(folder: Path, write: Write) -> None:
    before = open_source(folder)
    write("set/part-101.jsonl", rows(15, 2))
    after = open_source(folder)
    assert list(after)[:15] == list(before) and len(after) == 17
    assert after.shards[:3] == before.shards and after.fingerprint != before.fingerprint
    write("set/part-1.jsonl", rows(90, 2))  # sorts first: earlier ids would move
    moved = open_source(folder)
    assert moved[0] == {"i": 90, "t": ""}
    known = [shard.name for shard in after.shards]
    kept = open_source(folder, known=known)
    assert list(kept)[:17] == list(after) and kept[17] == {"i": 90, "t": ""}
    (folder / "part-10.jsonl").unlink()
    with pytest.raises(SourceError, match=r"lacks the shard 'part-10.jsonl'"):
        open_source(folder, known=known)


def test_the_fingerprint_is_content_in_order(folder: Path, tmp_path: Path) -> None:
    first = open_source(folder)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shutil.move(other / "part-9.jsonl", other / "a.jsonl")  # another name, the same order
    (other / "part-10.jsonl.zst").write_bytes(PACK[".zst"]((other / "part-10.jsonl").read_bytes()))
    (other / "part-10.jsonl").unlink()
    for left in other.glob(".*"):
        left.unlink()
    assert open_source(other).fingerprint == first.fingerprint
    (other / "a.jsonl").write_bytes(text([*rows(0, 4), {"i": 5}]))
    assert open_source(other).fingerprint != first.fingerprint


def test_a_bad_shard_is_named(folder: Path, write: Write) -> None:
    write("set/part-11.jsonl", b"")
    with pytest.raises(SourceError, match=r"part-11.jsonl is empty"):
        open_source(folder)


def test_many_shards_keep_few_files_open(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"s{number}.jsonl").write_bytes(text(rows(number * 10, 10)))
    source = open_source(tmp_path)
    for step in (7, 11, 13):
        assert [source[i * step % 600]["i"] for i in range(600)] == [i * step % 600 for i in range(600)]
    assert _handles.open_count() <= _handles.LIMIT


def test_media_start_from_the_folder(folder: Path) -> None:
    record = {"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "b"}]}
    (folder / "part-9.jsonl").write_bytes(text([{**record, "images": ["1.jpg"]}]))
    chat = ChatSource(open_source(f"{folder}/part-9*.jsonl"))
    assert chat[0]["messages"][0]["content"][0]["image"] == str(folder / "1.jpg")


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("layout", ["jsonl", "json"])
def test_compressed_files(write: Write, tmp_path: Path, suffix: str, layout: str) -> None:
    records = rows(0, 300)
    content = text(records) if layout == "jsonl" else json.dumps(records).encode()
    plain = open_source(write(f"plain.{layout}", content))
    path = write(f"a.{layout}{suffix}", PACK[suffix](content))
    source = open_source(path)
    assert list(source) == records and source.fingerprint == plain.fingerprint
    assert source.folder == str(tmp_path) and source.path == str(path)
    assert source.where(16) == (f"a.jsonl{suffix}:17" if layout == "jsonl" else f"a.json{suffix}[16]")
    assert list(pickle.loads(pickle.dumps(source))) == records
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(f".a.{layout}")]


def test_what_is_unpacked_is_kept_and_made_again(write: Write, tmp_path: Path) -> None:
    path = write("a.jsonl.gz", gzip.compress(text(rows(0, 9))))
    source = open_source(path, cache_dir=tmp_path / "cache")
    (made,) = (tmp_path / "cache" / "derived").glob("*.jsonl")
    stamp = made.stat().st_mtime_ns
    assert list(open_source(path, cache_dir=tmp_path / "cache")) == rows(0, 9)
    assert made.stat().st_mtime_ns == stamp
    made.unlink()
    assert list(open_source(path, cache_dir=tmp_path / "cache")) == rows(0, 9)
    travelling = pickle.dumps(source)
    path.write_bytes(gzip.compress(text(rows(0, 10))))
    with pytest.raises(SourceError, match="changed"):
        pickle.loads(travelling)
    assert len(open_source(path, cache_dir=tmp_path / "cache")) == 10


def test_a_wrong_suffix_does_not_matter(write: Write) -> None:
    assert list(open_source(write("a.jsonl", gzip.compress(text(rows(0, 3)))))) == rows(0, 3)
    assert list(open_source(write("b.jsonl.gz", text(rows(0, 3))))) == rows(0, 3)


@pytest.mark.parametrize("suffix", PACK)
def test_a_cut_compressed_file_is_an_error(write: Write, tmp_path: Path, suffix: str) -> None:
    packed = PACK[suffix](text([{"r": os.urandom(40).hex()} for _ in range(2000)]))
    for share in (0.95, 0.5, 0.02):
        with pytest.raises(SourceError, match="cut short or broken"):
            open_source(write(f"a{share}.jsonl{suffix}", packed[: int(len(packed) * share)]))
    broken = bytearray(packed)
    broken[len(broken) // 2] ^= 0xFF
    with pytest.raises(SourceError):
        open_source(write(f"b.jsonl{suffix}", bytes(broken)))


def test_frames_after_each_other(write: Write) -> None:
    for suffix, pack in PACK.items():
        content = pack(text(rows(0, 4))) + pack(text(rows(4, 4)))
        assert list(open_source(write(f"two.jsonl{suffix}", content))) == rows(0, 8)


def test_a_generator_is_no_path() -> None:
    with pytest.raises(SourceError, match="generator"):
        open_source(row for row in [{}])  # type: ignore[arg-type]


def test_options_are_checked(folder: Path) -> None:
    with pytest.raises(ConfigError, match="knwon"):
        open_source(folder, knwon=[])


def test_folders_of_several_kinds(folder: Path, tmp_path: Path, write: Write) -> None:
    write("set/x.json", {"messages": []})
    with pytest.raises(SourceError, match="several kinds: shards, pairs"):
        open_source(folder)
    assert len(open_source(folder, kind="shards")) == 15
    (tmp_path / "nothing").mkdir()
    with pytest.raises(SourceError, match=r"no \.json files"):
        open_source(tmp_path / "nothing")


def test_very_many_small_files_are_what_few_are(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Known by one table instead of an index each: the same records, ids, places and fingerprint."""
    odd = {
        "bom": b"\xef\xbb\xbf" + text(rows(0, 2)),
        "blank": b"\n \t\n" + text(rows(2, 2)) + b"\r\n\n" + text(rows(4, 1)).rstrip(),
        "crlf": text(rows(5, 2)).replace(b"\n", b"\r\n"),
        "array": json.dumps(rows(7, 3)).encode(),
        "bad": b'{"a": 1}\n{"a": \n',
        "large": text(rows(10, 4000)),
    }
    for name, data in odd.items():
        write(f"set/{name}.jsonl", data)
    write("set/packed.jsonl.gz", gzip.compress(text(rows(3, 3))))
    few = open_source(tmp_path / "set")
    monkeypatch.setattr(shards, "MANY", 1)
    many = open_source(tmp_path / "set")
    assert sum(isinstance(file, shards.SmallFile) for file in many._files) == 4
    assert (many.fingerprint, many.shards, many.fields()) == (few.fingerprint, few.shards, few.fields())

    def told(source: Any, number: int) -> Any:
        try:
            return source[number], source.where(number)
        except SampleError as error:
            return str(error)

    for source in (many, pickle.loads(pickle.dumps(many))):
        assert [told(source, n) for n in range(len(few))] == [told(few, n) for n in range(len(few))]
    assert not list((tmp_path / "set").glob(".*"))
    with monkeypatch.context() as unread:
        unread.setattr(shards, "_counted", None)
        assert open_source(tmp_path / "set").fingerprint == few.fingerprint  # nothing is read again
    write("set/crlf.jsonl", text(rows(6, 2)).replace(b"\n", b"\r\n"))
    shards._opened.cache_clear()
    with pytest.raises(SourceError, match="the file changed"):
        [told(many, n) for n in range(len(many))]
    assert open_source(tmp_path / "set").fingerprint != few.fingerprint
    assert "the file changed" in caplog.text
    write("set/crlf.jsonl", b"\n\n")
    with pytest.raises(SourceError, match="empty"):
        open_source(tmp_path / "set")
