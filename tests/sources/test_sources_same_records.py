"""The same records in any file give the same samples; nothing of a file is passed over in silence."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import SampleError
from packtrain.media.location import read_bytes
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.sources.text import TextSource

Write = Callable[..., Path]

QA = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c63606060f80f0001040100a5d2b3090000000049454e44ae426082"
)


def digest(source: ChatSource) -> str:
    """Of all samples; media by their bytes."""
    held = hashlib.sha256()
    for index in range(len(source)):
        sample = source[index]
        for message in sample["messages"]:
            for part in message["content"]:
                if part["type"] != "text":
                    part[part["type"]] = hashlib.sha256(read_bytes(part[part["type"]])).hexdigest()
        held.update(json.dumps(sample).encode())
    return held.hexdigest()


def mixed(number: int) -> dict[str, Any]:
    """A record of one of five sorts: chat, tools, reasoning, a picture, nulls."""
    sort = number % 5
    turns: list[dict[str, Any]] = [{"role": "user", "content": f"question {number}?"}]
    if sort == 1:
        name, value = (("q", number), ("city", f"c{number}"))[number % 2]
        call = {"type": "function", "function": {"name": f"f{number % 3}", "arguments": {name: value}}}
        turns += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "found", "name": "f"},
        ]
    answer: dict[str, Any] = {"role": "assistant", "content": f"answer {number}"}
    if sort == 2:
        answer["reasoning_content"] = "because"
    if sort == 4:
        answer["reasoning_content"] = None
        answer["loss_weight"] = 0.5
    record: dict[str, Any] = {"id": number, "messages": [*turns, answer]}
    if sort == 1:
        properties = {f"p{number % 4}": {"type": "string", "description": None}}
        tool = {"name": f"f{number % 3}", "parameters": {"type": "object", "properties": properties}}
        record["tools"] = [{"type": "function", "function": tool}]
    if sort == 3:
        record["messages"][0]["content"] = f"<image>question {number}?"
        record["images"] = ["x.png"]
    return record


def test_500_records_in_six_forms_are_one(tmp_path: Path, write: Write) -> None:
    datasets = pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    (tmp_path / "x.png").write_bytes(PNG)
    records = [mixed(number) for number in range(500)]
    names = sorted({name for record in records for name in record})
    table = pa.Table.from_pylist([{n: r.get(n) for n in names} for r in records])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=64)
    held = datasets.Dataset.from_list([{n: r.get(n) for n in names} for r in records])
    held.save_to_disk(str(tmp_path / "saved"))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, record in enumerate(records):
            for kind, data in (("json", json.dumps(record).encode()), ("png", PNG)):
                if kind == "json" or record.get("images"):
                    info = tarfile.TarInfo(f"{number:04d}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    forms = {
        "jsonl": ChatSource(open_source(write("a.jsonl", records))),
        "json": ChatSource(open_source(write("a.json", records))),
        "parquet": ChatSource(open_source(tmp_path / "a.parquet")),
        "save_to_disk": ChatSource(open_source(tmp_path / "saved"), media_root=tmp_path),
        "memory": ChatSource(held, media_root=tmp_path),
        "webdataset": ChatSource(open_source(tmp_path / "a.tar")),
    }
    found = {name: digest(source) for name, source in forms.items()}
    assert set(found.values()) == {found["jsonl"]}, found


def nested(depth: int) -> Any:
    """Objects whose members have one type under one name, as a table needs it."""
    if not depth:
        return st.fixed_dictionaries(
            {}, optional={"s": st.none() | st.text("ab", max_size=3), "n": st.integers(0, 9)}
        )
    inner = nested(depth - 1)
    optional = {
        "s": st.none() | st.text("ab", max_size=3),
        "o": st.none() | inner,
        "l": st.lists(inner, max_size=2),
    }
    return st.fixed_dictionaries({}, optional=optional)


parts = st.lists(
    st.sampled_from(
        [
            {"type": "text", "text": "a?"},
            {"type": "text", "text": "b", "image": "x.png"},
            {"type": "image", "image": "x.png", "max_pixels": 99},
            {"type": "image", "image": "x.png", "width": 3, "height": 4},
        ]
    ),
    max_size=3,
).map(lambda held: [{"type": "text", "text": "q"}, *held])


orders = st.permutations("snol").map(lambda one: [one]) | st.lists(
    st.permutations("snol"), min_size=2, max_size=4
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(nested(2), nested(2), parts), min_size=1, max_size=5), orders=orders)
def test_nested_records_are_the_same_from_every_file(
    tmp_path_factory: Any, rows: list[Any], orders: list[Any]
) -> None:
    """Null, {}, [], "" and absent members of arguments, tools and parts: JSONL, Parquet, save_to_disk.

    Equal to the letter where all records order the members of their objects alike, whatever that order is;
    else a table has lost the order of those that differ from its first ones, and nothing besides.
    """
    datasets = pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    full = {"s": "x", "o": {"s": "x", "o": {"s": "x", "n": 1}, "l": [{"s": "x", "n": 1}]}, "l": []}
    full["l"] = [full["o"]]

    def record(arguments: Any, parameters: Any, content: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [], "tool_calls": [call], "weight": None},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        ]
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return {"messages": turns, "tools": [tool], "meta": {"s": None}}

    records = [
        record(ordered(a, orders[n % len(orders)]), ordered(b, orders[n % len(orders)]), c)
        for n, (a, b, c) in enumerate([(full, full, []), *rows])
    ]
    records[0]["messages"][0]["content"] = [{"type": "text", "text": "q"}]
    folder = tmp_path_factory.mktemp("forms")
    lines = "".join(json.dumps(one) + "\n" for one in records)
    (folder / "a.jsonl").write_text(lines, encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets.Dataset.from_list(records).save_to_disk(str(folder / "saved"))
    alike = all(order == orders[0] for order in orders)
    said = [
        json.dumps([source[i] for i in range(len(records))], sort_keys=not alike)
        for source in (
            ChatSource(open_source(folder / name), media_root=folder)
            for name in ("a.jsonl", "a.parquet", "saved")
        )
    ]
    assert said[1] == said[0] and said[2] == said[0]


def ordered(value: Any, order: Any) -> Any:
    """Members in this order."""
    if isinstance(value, dict):
        return {name: ordered(value[name], order) for name in order if name in value}
    return [ordered(item, order) for item in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------ files
def test_links_in_a_tar_are_their_members(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:

        def add(name: str, data: bytes = b"", link: str = "", kind: bytes = tarfile.REGTYPE) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.linkname, info.type = len(data), link, kind
            tar.addfile(info, io.BytesIO(data) if data else None)

        for key in ("a", "b", "c", "d"):
            add(f"s/{key}.txt", b"words")
            if key == "a":
                add("s/a.png", PNG)
        add("s/b.png", link="s/a.png", kind=tarfile.LNKTYPE)
        add("s/c.png", link="b.png", kind=tarfile.SYMTYPE)
        add("s/d.png", link="gone.png", kind=tarfile.SYMTYPE)
    source = ChatSource(open_source(path))
    for index in range(3):
        (part, *_) = source[index]["messages"][0]["content"]
        assert read_bytes(part["image"]) == PNG
    with pytest.raises(SampleError, match="link"):
        source[3]


def test_caption_tars_with_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        meta = json.dumps({"caption": "a cat", "width": 3, "hue": 4}).encode()
        for name, data in (("k.jpg", PNG), ("k.txt", b"a cat"), ("k.json", meta)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    source = ChatSource(open_source(path, prompt="Describe it."))
    user, answer = source[0]["messages"]
    assert [part["type"] for part in user["content"]] == ["image", "text"]
    assert answer["content"] == [{"type": "text", "text": "a cat"}]
    assert source.account.drain() == {"hue": 1}


def test_a_clip_that_no_row_names_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(b"RIFF")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.wav,hello\n")
    with caplog.at_level(logging.WARNING):
        source = open_source(tmp_path, kind="audio_dir")
    assert source.unlisted == source.fields()["unlisted"] == 1 and "b.wav" in caplog.text


def test_keys_given_twice_and_one_record_in_a_json(write: Write) -> None:
    source = open_source(write("a.jsonl", b'{"messages": [], "messages": [1]}\n{"a": {"b": 1, "b": 2}}\n'))
    for index, key in ((0, "messages"), (1, "b")):
        with pytest.raises(SampleError, match=f"the key '{key}' twice"):
            source[index]
    single = ChatSource(open_source(write("one.json", {"messages": QA})))
    assert len(single) == 1 and single[0]["messages"][1]["content"][0]["text"] == "b"
    assert single.where(0) == "one.json[0]"


# ------------------------------------------------------------------------------------------ raw text
def test_raw_text_is_read_and_accounted_for() -> None:
    source = TextSource(
        [{"text": "once", "meta": 1}, {"text": ""}, {"text": "x", "image": "a.png"}, {"b": 1}]
    )
    assert source[0] == {"text": "once"} and source.account.drain() == {"meta": 1}
    for index, reason in ((1, "empty"), (2, "unread_key"), (3, "malformed_record")):
        with pytest.raises(SampleError) as error:
            source[index]
        assert error.value.reason == reason
    assert TextSource([{"body": "t"}], columns={"text": "body"})[0] == {"text": "t"}


def test_raw_text_is_trained_as_it_is(processor: Any) -> None:
    from packtrain.template.text import TextTemplate

    qwen = processor("qwen2_5_vl")
    template = TextTemplate(qwen)
    sample = {"text": "Once upon a time."}
    encoded = template.encode(sample)
    ids = qwen.tokenizer("Once upon a time.", add_special_tokens=False)["input_ids"]
    assert encoded["input_ids"].tolist() == [*ids, qwen.tokenizer.eos_token_id]
    assert encoded["labels"].tolist() == [-100, *encoded["input_ids"].tolist()[1:]]
    measured = template.measure(sample)
    assert measured == len(ids) + 1 and measured.costs["supervised"] == len(ids)
    assert TextTemplate(qwen, eos=False).encode(sample)["input_ids"].tolist() == ids
