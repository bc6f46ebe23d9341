"""Records from hostile files: found in one pass without holding them, bounded in size and depth."""

from __future__ import annotations

import gzip
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtrain.errors import SampleError, SourceError
from packtrain.sources import _derived, _index, _records, open_source, shards
from packtrain.sources._index import pin
from packtrain.sources.chat import ChatSource

Write = Callable[..., Path]
LAWS = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@LAWS
@given(
    st.lists(st.sampled_from(["{}", " ", "\t", "\r", "\n", "\n\n", "a" * 9, " {} "]), max_size=30),
    st.integers(1, 40),
)
def test_lines_are_found_whatever_the_blocks(tmp_path: Path, parts: list[str], block: int) -> None:
    text = "".join(parts).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    starts, gaps, at = [], [], 0
    for line in lines:
        if line.strip(b" \t\r\n"):
            starts.append(at)
        else:
            gaps.append(len(starts))
        at += len(line) + 1
    held, _index.LINES_BLOCK = _index.LINES_BLOCK, block
    try:
        built = _index.scan_lines(pin(path))
    finally:
        _index.LINES_BLOCK = held
    assert built.starts.tolist() == [*starts, len(text)]
    assert built.gaps.tolist() == gaps


@LAWS
@given(st.lists(st.text('a\\"[,{', max_size=9), max_size=6), st.integers(1, 30))
def test_escapes_in_an_array_whatever_the_blocks(tmp_path: Path, texts: list[str], block: int) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"t": text} for text in texts]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index, "_blocks", lambda file, size=0, real=_index._blocks: real(file, block))
        built = _index.scan_array(pin(path))
    data = path.read_bytes()
    spans = zip(built.starts.tolist(), built.starts.tolist()[1:], strict=False)
    assert [json.loads(data[a:b].strip(b", \n"))["t"] for a, b in spans] == texts


def test_a_text_that_unpacks_without_end_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_derived, "_FREE", 1 << 16)
    monkeypatch.setattr(_derived, "_TIMES", 100)
    bomb = write("a.jsonl.gz", gzip.compress(bytes(1 << 22)))
    with pytest.raises(SourceError, match=r"a\.jsonl\.gz unpacks to more than 100 times"):
        open_source(bomb)
    fine = write("b.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 3000))
    assert len(open_source(fine)) == 3000


def test_a_record_has_a_size(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_records, "MOST_RECORD", 1000)
    monkeypatch.setattr(_records, "MOST_RECORD", 1000)
    held = open_source(write("a.jsonl", [{"a": "x" * 900}, {"a": "x" * 2000}]))
    assert len(held[0]["a"]) == 900
    with pytest.raises(
        SampleError, match=r"a\.jsonl:2 has 2,0\d\d bytes, a record has at most 1,000"
    ) as told:
        held[1]
    assert told.value.reason == "malformed_record"


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**6, '{"a":' + "[" * 10**6 + "]" * 10**6 + "}"])
def test_a_record_has_a_depth(write: Write, text: str) -> None:
    held = open_source(write("a.jsonl", b'{"a": 1}\n' + text.encode() + b"\n"))
    with pytest.raises(SampleError, match=r"a\.jsonl:2 is not valid JSON: nested too deeply"):
        held[1]


def test_what_json_still_reads_may_be_too_deep_for_a_chat(write: Write) -> None:
    talk = '"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    text = f'{{{talk}}}\n{{{talk}, "x": {"[" * 700 + "]" * 700}}}\n'
    held = ChatSource(open_source(write("a.jsonl", text.encode())))
    assert held[0]["messages"]
    with pytest.raises(SampleError, match="nested too deeply") as told:
        held[1]
    assert told.value.reason == "malformed_record"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.xz"])
def test_blank_lines_take_no_more_memory_than_records(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_index, "MOST_BLANK", 1000)
    monkeypatch.setattr(_index, "LINES_BLOCK", 512)
    pack = lzma.compress if name.endswith("xz") else bytes
    (tmp_path / name).write_bytes(pack(b"{}\n\n" * 3000 + b"\n" * 900))
    assert len(open_source(tmp_path / name)) == 3000
    (tmp_path / name).write_bytes(pack(b"{}\n" * 10 + b"\n" * 100_000))
    with pytest.raises(SourceError, match=r"[12],\d\d\d blank lines and 10 records") as told:
        open_source(tmp_path / name)
    assert told.value.hint == "remove the blank lines"


def test_a_cache_that_is_nested_deeply_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "MANY", 1)
    (tmp_path / "many").mkdir()
    for number in range(3):
        (tmp_path / "many" / f"{number}.jsonl").write_text(f'{{"n": {number}}}\n')
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "many" / "0.jsonl", "0.json")
    before = [list(open_source(tmp_path / name)) for name in ("many", "a.tar")]
    held = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(held) >= 2
    for path in held:
        path.write_bytes(b"[" * 100_000)
    assert [list(open_source(tmp_path / name)) for name in ("many", "a.tar")] == before
