"""Samples of tars: keys, names, media as byte ranges, tars that were cut short."""

from __future__ import annotations

import io
import json
import logging
import pickle
import tarfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import SampleError, SourceError
from packtrain.media.image import read_header
from packtrain.media.location import media_refs, read_bytes
from packtrain.sources import _index, open_source
from packtrain.sources.chat import ChatSource

Members = Sequence[tuple[str, bytes]]


def make(path: Path, members: Members, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def chat(said: str = "<image>what?", **more: Any) -> bytes:
    turns = [{"role": "user", "content": said}, {"role": "assistant", "content": "b"}]
    return json.dumps({"messages": turns, **more}).encode()


def sample(source: Any, index: int = 0) -> tuple[dict[str, Any], list[bytes]]:
    found = ChatSource(source)[index]
    return found, [read_bytes(ref) for ref in media_refs(found)]


def test_pairs(tmp_path: Path, data: Path) -> None:
    image = (data / "mllm_demo/mllm_demo_data/1.jpg").read_bytes()
    path = make(
        tmp_path / "s.tar",
        [
            ("0.jpg", image),
            ("0.json", chat()),
            ("1.json", chat("x")),
            ("2.mp4", b"v"),
            ("2.json", chat("<video>")),
        ],
    )
    source = open_source(path)
    assert len(source) == 3 and source.where(1) == "s.tar!1"
    found, media = sample(source)
    assert media == [image]
    assert read_header(media_refs(found)[0]) == read_header(image)
    assert sample(source, 1)[1] == [] and sample(source, 2)[1] == [b"v"]
    assert source[0]["__key__"] == "0"
    again = pickle.loads(pickle.dumps(source))
    assert again[0] == source[0] and again.fingerprint == source.fingerprint
    json.dumps(source.fields())


def test_records_name_their_members(tmp_path: Path) -> None:
    members = [
        ("ps_0.img000.jpg", b"0"),
        ("ps_0.img001.jpg", b"1"),
        ("ps_0.json", chat("<image><image>", images=["img001.jpg", "ps_0.img000.jpg"])),
        ("d/k.jpg", b"2"),
        ("d/k.json", chat([{"type": "image", "image": "k.jpg"}, {"type": "text", "text": "k.jpg"}])),
        ("e.jpg", b"3"),
        ("e.json", chat([{"type": "image_url", "value": "jpg"}])),
        ("f.jpg", b"4"),
        ("f.json", chat(images=["elsewhere.jpg"])),
        ("g.jpg", b"5"),
        ("g.json", chat([{"type": ["image"], "value": "jpg"}, {"type": "image", "image": "jpg"}])),
    ]
    source = open_source(make(tmp_path / "s.tar", members))
    assert [sample(source, i)[1] for i in range(3)] == [[b"1", b"0"], [b"2"], [b"3"]]
    assert sample(source, 1)[0]["messages"][0]["content"][1]["text"] == "k.jpg"  # text stays text
    assert media_refs(ChatSource(source)[3]) == [str(tmp_path / "elsewhere.jpg")]
    listed, named = source[4]["messages"][0]["content"]
    assert listed == {"type": ["image"], "value": "jpg"} and named["image"] != "jpg"  # a type may be anything


def test_members_that_nothing_reads_are_counted(tmp_path: Path) -> None:
    """Whatever a sample is made of, each of its members is read, or counted by its kind."""
    rest = [("cls", b"3"), ("npy", b"x"), ("mask.m4a", b"y")]
    for more, unread in (
        ([("json", chat()), ("jpg", b"1")], []),
        ([("json", chat(images=["jpg"])), ("jpg", b"1"), ("png", b"2")], [".png"]),
        ([("json", chat("x")), ("txt", b"c")], [".txt"]),
        ([("txt", b"c"), ("jpg", b"1"), ("png", b"2")], []),
        ([("txt", b"c"), ("json", b'{"score": 1}'), ("jpg", b"1")], []),
    ):
        members = [(f"k.{kind}", data) for kind, data in (*more, *rest)]
        source = ChatSource(open_source(make(tmp_path / "s.tar", members), verify_content=True))
        assert media_refs(source[0]) or "x" in str(source[0])
        source.account.drain()
        source[0]
        assert source.account.drain() == dict.fromkeys(sorted([*unread, ".cls", ".mask.m4a", ".npy"]), 1)


def test_captions(tmp_path: Path) -> None:
    path = make(
        tmp_path / "s.tar",
        [("0.png", b"i"), ("0.txt", b" a dog\n"), ("1.wav", b"w"), ("1.caption", "図".encode())],
    )
    found, media = sample(open_source(path))
    assert media == [b"i"] and found["messages"][1]["content"][0]["text"] == "a dog"
    asked = sample(open_source(path, prompt="Describe."), 1)[0]["messages"][0]["content"]
    assert [part["type"] for part in asked] == ["audio", "text"] and asked[1]["text"] == "Describe."
    assert open_source(path).fingerprint != open_source(path, prompt="x").fingerprint


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names(tmp_path: Path, format: int) -> None:
    """PB-62: names that other readers lose are whole samples here."""
    stems = ["图片_01", "a b ", "🙂", "é" * 120, "x/" * 60 + "n", "n" * 250]
    members = [m for stem in stems for m in ((f"{stem}.jpg", stem.encode()), (f"{stem}.json", chat()))]
    composed, split = unicodedata.normalize("NFC", "é_1"), unicodedata.normalize("NFD", "é_1")
    members += [(f"{composed}.jpg", b"nfc"), (f"{split}.json", chat())]
    members += [("v1.2/shot.seg.png", b"s"), ("v1.2/shot.json", chat())]
    source = open_source(make(tmp_path / "s.tar", members, format=format))
    assert len(source) == len(stems) + 2
    for number, stem in enumerate(stems):
        assert sample(source, number)[1] == [stem.encode()]
    assert sample(source, len(stems))[1] == [b"nfc"]
    assert source[len(stems) + 1]["__key__"] == "v1.2/shot" and sample(source, len(stems) + 1)[1] == [b"s"]


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = make(
        tmp_path / "s.tar",
        [("a\udc92.jpg", b"x"), ("a\udc92.json", chat()), ("b.jpg", b"y"), ("b.json", chat())],
        format=tarfile.GNU_FORMAT,
        encoding="cp1252",
        errors="surrogateescape",
    )
    source = open_source(path)
    assert "\\udc92" in source.where(0)
    with pytest.raises(SampleError, match="surrogate") as error:
        ChatSource(source)[0]
    assert error.value.reason == "malformed_record"
    assert sample(source, 1)[1] == [b"y"]


def test_members_apart_are_one_sample_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PB-36: 0.a 1.a 0.b 1.b."""
    members = [("0.jpg", b"0"), ("1.jpg", b"1"), ("0.json", chat()), ("1.json", chat())]
    with caplog.at_level(logging.WARNING):
        source = open_source(make(tmp_path / "s.tar", members))
    assert "key '0' is opened again at member 2 ('0.json')" in caplog.text
    assert len(source) == 2 and [sample(source, i)[1] for i in (0, 1)] == [[b"0"], [b"1"]]


def test_a_kind_twice_is_refused(tmp_path: Path) -> None:
    members = [("0.jpg", b"0"), ("0.JPG", b"1"), ("0.json", chat()), ("1.jpg", b"2"), ("1.json", chat())]
    source = open_source(make(tmp_path / "s.tar", members))
    with pytest.raises(SampleError, match="two members of kind 'jpg'") as error:
        source[0]
    assert error.value.reason == "malformed_record"
    assert sample(source, 1)[1] == [b"2"]


def test_bad_members(tmp_path: Path) -> None:
    members = [
        ("0.json", b"{"),
        ("1.json", b"[1]"),
        ("2.json", b"\xff"),
        ("3.txt", b"\xff"),
        ("4.jpg", b"x"),
        ("5.json", chat("x")),
    ]
    source = open_source(make(tmp_path / "s.tar", members))
    for number in range(5):
        with pytest.raises(SampleError, match=rf"^s.tar!{number}") as error:
            source[number]
        assert error.value.reason == "malformed_record"
    assert source[5]["__key__"] == "5"


def test_a_cut_tar_is_never_a_shorter_one(tmp_path: Path) -> None:
    """PB-07: the four cuts."""
    members = [
        m
        for n in range(3)
        for m in ((f"{n:04d}.jpg", bytes([n]) * 3000), (f"{n:04d}.json", chat().ljust(100)))
    ]
    content = make(tmp_path / "whole.tar", members).read_bytes()
    assert len(content) == 20480 and len(open_source(tmp_path / "whole.tar")) == 3
    for cut, good in ((9216, 2), (9316, 2), (10728, 2), (12800, 2)):
        path = tmp_path / f"cut-{cut}.tar"
        path.write_bytes(content[:cut])
        with pytest.raises(SourceError, match="last whole key is '0001'"):
            open_source(path)
        source = open_source(path, truncated="keep")
        for number in range(good):
            assert sample(source, number)[1] == [bytes([number]) * 3000]
        for number in range(good, len(source)):
            with pytest.raises(SampleError) as error:
                source[number]
            assert error.value.reason == "truncated_media"


def test_several_tars(tmp_path: Path) -> None:
    for number in (9, 10, 11):
        make(
            tmp_path / f"t/shard-{number}.tar",
            [(f"{number}.json", chat("x")), (f"{number}b.json", chat("y"))],
        )
    source = open_source(tmp_path / "t")
    assert [source.where(i) for i in range(6)][::2] == ["shard-9.tar!9", "shard-10.tar!10", "shard-11.tar!11"]
    assert len(open_source(f"{tmp_path}/t/shard-{{9..10}}.tar")) == 4
    _index.cached(tmp_path / "t/shard-9.tar", ".packtrain-members").write_bytes(b"{")
    assert open_source(tmp_path / "t").fingerprint == source.fingerprint
    make(tmp_path / "t/shard-9.tar", [("z.json", chat("z"))])
    with pytest.raises(SourceError, match="changed"):
        source[0]
    assert len(open_source(tmp_path / "t")) == 5


def test_no_tar(tmp_path: Path) -> None:
    for name, content, message in [
        ("a.tar", b"words " * 500, "no tar file"),
        ("b.tar", b"\x1f\x8b\x08" + bytes(600), "compressed .gzip."),
        ("c.tar", bytes(10240), "holds no samples"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SourceError, match=message):
            open_source(tmp_path / name)
