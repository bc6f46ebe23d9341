"""JSONL and JSON-array files: every record, whatever the bytes around it, and clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import ConfigError, SampleError, SourceError, UnknownNameError
from packtrain.extend import Source, names
from packtrain.sources import _index, open_source

Write = Callable[..., Path]
RECORDS: list[dict[str, Any]] = [
    {"id": 0, "text": "plain"},
    {"id": 1, "text": 'quotes " and \\ and \\" and [brackets] {braces}, commas'},
    {"id": 2, "text": "图片 – é \u2028 \U0001f600", "nested": [[1, 2], {"a": ["]", "}"]}]},
    {"id": 3, "text": ""},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_records_come_back(write: Write, name: str) -> None:
    source = open_source(write(name, RECORDS))
    assert isinstance(source, Source)
    assert len(source) == 4
    assert list(source) == RECORDS  # IndexError ends the iteration
    for index in (-1, 4):
        with pytest.raises(IndexError):
            source[index]


@pytest.mark.parametrize("block", [4, 9, 1 << 24])
def test_lines_of_every_kind(write: Write, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index, "LINES_BLOCK", block)
    content = b'\xef\xbb\xbf{"i":0}\r\n\r\n  \t\n{"i":1}\n   {"i":2}  \r\n\n\n{"i":3}'
    source = open_source(write("a.jsonl", content))
    assert [record["i"] for record in source] == [0, 1, 2, 3]
    assert [source.where(i) for i in range(4)] == ["a.jsonl:1", "a.jsonl:4", "a.jsonl:5", "a.jsonl:8"]


@pytest.mark.parametrize("space", ["", " \r\n\t"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_arrays_of_every_kind(write: Write, space: str, bom: bytes) -> None:
    text = f"{space}[{space}" + f"{space},{space}".join(map(json.dumps, RECORDS)) + f"{space}]{space}"
    source = open_source(write("a.json", bom + text.encode()))
    assert list(source) == RECORDS
    assert source.where(2) == "a.json[2]"


def test_one_bad_line_is_one_bad_sample(write: Write) -> None:
    content = b'{"i":0}\n{"i":\n\n[1]\nnull\n{"t":"\xff"}\n{"i":1}{"i":2}\n' + b"[" * 100_000 + b'\n{"i":8}\n'
    source = open_source(write("a.jsonl", content))
    assert len(source) == 8
    assert source[0] == {"i": 0} and source[7] == {"i": 8}
    lines = {1: 2, 2: 4, 3: 5, 4: 6, 5: 7, 6: 8}
    for index, line in lines.items():
        with pytest.raises(SampleError, match=rf"^a\.jsonl:{line} ") as error:
            source[index]
        assert error.value.reason == "malformed_record"
    with pytest.raises(SampleError, match="not UTF-8"):
        source[4]


def test_one_bad_element_is_one_bad_sample(write: Write) -> None:
    source = open_source(write("a.json", b'[{"i":0}, {"i":}, 3, , {"t":"\xff"}, {"i":5},]'))
    assert len(source) == 7
    assert source[0] == {"i": 0} and source[5] == {"i": 5}
    for index in (1, 2, 3, 4, 6):
        with pytest.raises(SampleError, match=rf"^a\.json\[{index}\] ") as error:
            source[index]
        assert error.value.reason == "malformed_record"


def test_content_decides_over_the_name(write: Write) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    array = json.dumps(RECORDS, indent=2).encode()
    assert list(open_source(write("a.json", lines))) == RECORDS
    assert list(open_source(write("a.jsonl", array))) == RECORDS
    assert list(open_source(write("b.jsonl", json.dumps(RECORDS).encode() + b"\n"))) == RECORDS
    assert list(open_source(write("noname", array))) == RECORDS
    assert list(open_source(write("noname.txt", lines))) == RECORDS
    assert list(open_source(write("one.jsonl", b'{"i":0}'))) == [{"i": 0}]
    same = open_source(write("c.json", lines))
    assert same.fingerprint == open_source(write("c.jsonl", lines)).fingerprint


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \r\n", "is empty"),
        ("a.json", b"\xef\xbb\xbf", "is empty"),
        ("a.json", b"[]", "no records"),
        ("a.json", b" [ \n ] ", "no records"),
        ("a.json", b'{"data": [1]}', "one JSON object"),
        ("a.json", b'{\n "data": [\n 1]}\n', "one JSON object"),
        ("a.json", b'"text"', "no JSON array"),
        ("a.json", b'[{"a": 1}', "not a whole JSON array"),
        ("a.json", b'[{"a": "1}]', "inside a string"),
        ("a.json", b"[{}] [{}]", "more text after"),
        ("a.jsonl", b"\x1f\x8b\x08\0\0\0", "cut short or broken gzip"),
        ("a.json", '[{"a": 1}]'.encode("utf-16"), "UTF-16"),
        ("a.txt", b"some words", "no known kind"),
    ],
)
def test_bad_sources(write: Write, name: str, content: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as error:
        open_source(write(name, content))
    assert error.value.exit_code == 2


def test_missing_names_the_nearest(write: Write, tmp_path: Path) -> None:
    path = write("train.jsonl", RECORDS)
    with pytest.raises(SourceError, match="does not exist") as error:
        open_source(tmp_path / "trian.jsonl")
    assert str(path) in str(error.value)
    with pytest.raises(SourceError, match="folder"):
        open_source(tmp_path / "no" / "train.json")
    with pytest.raises(SourceError, match="is a folder"):
        open_source(tmp_path, kind="jsonl")


def test_options_are_checked(write: Write) -> None:
    path = write("a.jsonl", RECORDS)
    with pytest.raises(ConfigError, match="verify_contents") as error:
        open_source(path, verify_contents=True)
    assert "verify_content" in str(error.value.hint)
    with pytest.raises(UnknownNameError, match="jsonll"):
        open_source(path, kind="jsonll")
    assert {"json", "jsonl"} <= set(names("sources"))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
records = st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), min_size=1, max_size=9)


@settings(max_examples=120, deadline=None)
@given(records, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([7, 64, 1 << 20]))
def test_any_records_in_any_block_size(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    ascii_only: bool,
    indent: int | None,
    block: int,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    array = folder / "a.json"
    array.write_text(json.dumps(rows, ensure_ascii=ascii_only, indent=indent), encoding="utf-8", newline="")
    lines = folder / "a.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    lines.write_text(text, encoding="utf-8", newline="")
    before = _index.BLOCK, _index.LINES_BLOCK
    _index.BLOCK = _index.LINES_BLOCK = block
    try:
        sources = open_source(array), open_source(lines)
    finally:
        _index.BLOCK, _index.LINES_BLOCK = before
    for source in sources:
        assert list(source) == rows


def test_escapes_over_block_borders(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"t": "\\" * n + '"' + "," * (n % 3) + "]"} for n in range(40)]
    path = write("a.json", json.dumps(rows).encode())
    for block in range(1, 24):
        monkeypatch.setattr(_index, "BLOCK", block)
        assert list(open_source(path, cache_dir=path.parent / str(block), verify_content=True)) == rows


def test_a_ten_megabyte_message(write: Write) -> None:
    text = "x" * 10_000_000
    for name in ("a.jsonl", "a.json"):
        source = open_source(write(name, [{"t": text}, {"t": "y"}]))
        assert source[0]["t"] == text and source[1]["t"] == "y"


def test_real_files(data: Path) -> None:
    files = {
        "text_sft/gsm8k_train.jsonl": 7473,
        "text_sft/alpaca_zh_demo.json": 1000,
        "text_sft/glaive_toolcall_en_demo.json": 300,
        "text_sft/c4_demo.jsonl": 300,
        "mllm_demo/mllm_demo.json": 6,
        "mllm_demo/v1_multimodal_demo.jsonl": 24,
    }
    for name, count in files.items():
        source = open_source(data / name)
        text = (data / name).read_text(encoding="utf-8")
        rows = (
            json.loads(text)
            if name.endswith(".json")
            else [json.loads(x) for x in text.split("\n") if x.strip()]
        )
        assert len(source) == count == len(rows)
        assert list(source) == rows
    assert not list((data / "text_sft").glob(".*packtrain-index"))  # read-only folders stay as they are
    for name in ("detection/coco_to_synset.json", "vqa_text/textvqa_val_questions_vqa_format.json"):
        with pytest.raises(SourceError, match="one JSON object"):
            open_source(data / name)


@pytest.mark.parametrize(
    ("asked", "near"), [("trian.jsonl", "train.jsonl"), ("train.json", "train.jsonl"), ("nothere.jsonl", "")]
)
def test_a_missing_file_names_one_like_it_and_no_other(asked: str, near: str, tmp_path: Path) -> None:
    """A common ending makes no likeness."""
    for name in ("c.jsonl", "train.jsonl", "empty.json", "file"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(SourceError, match="does not exist") as error:
        open_source(tmp_path / asked)
    none = f"nothing in {tmp_path} has a name like it"
    assert error.value.hint == (f"did you mean {tmp_path / near}?" if near else none)
