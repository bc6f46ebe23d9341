"""Rows of Parquet and Arrow files and of real save_to_disk folders."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from packtrain.errors import SourceError, UnknownNameError
from packtrain.extend import Source
from packtrain.media.image import read_header
from packtrain.sources import open_source, parquet
from packtrain.sources.chat import ChatSource

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

# datasets opens files without closing them when its tables go away
quiet = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


def rows(start: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "i": n,
            "messages": [
                {"role": "user", "content": f"q{n} é 图"},
                {"role": "assistant", "content": f"a{n}"},
            ],
            "note": None if n % 3 else "x",
        }
        for n in range(start, start + count)
    ]


def save(path: Path, records: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(records)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=options.get("group", 7))
    elif path.suffix == ".feather":
        feather.write_feather(table, str(path), chunksize=options.get("group", 7))
    else:
        writer = pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file
        with writer(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=options.get("group", 7))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".ipc", ".feather"])
def test_rows_of_a_file(tmp_path: Path, suffix: str) -> None:
    source = open_source(save(tmp_path / f"a{suffix}", rows(0, 30)))
    assert isinstance(source, Source) and list(source) == rows(0, 30)
    order = random.Random(3).sample(range(30), 30)
    assert [source[i]["i"] for i in order] == order
    assert source.where(17) == f"a{suffix}[17]"
    again = pickle.loads(pickle.dumps(source))
    assert again[29] == rows(29, 1)[0] and again.fingerprint == source.fingerprint
    json.dumps(source.fields())
    assert len(ChatSource(source)[4]["messages"]) == 2


def test_a_folder_of_files(tmp_path: Path) -> None:
    save(tmp_path / "set/train-9.parquet", rows(0, 10))
    save(tmp_path / "set/train-10.parquet", rows(10, 9))
    save(tmp_path / "set/deep/train-1.parquet", rows(19, 3))
    source = open_source(tmp_path / "set")
    assert [row["i"] for row in source] == [19, 20, 21, *range(19)]  # folders by name, then files by number
    assert source.where(0) == "deep/train-1.parquet[0]"
    assert [source.where(i) for i in (3, 12, 13, 21)] == [
        "train-9.parquet[0]",
        "train-9.parquet[9]",
        "train-10.parquet[0]",
        "train-10.parquet[8]",
    ]
    assert len(open_source(f"{tmp_path}/set/train-*.parquet")) == 19
    os.rename(tmp_path / "set", tmp_path / "moved")
    assert open_source(tmp_path / "moved").fingerprint == source.fingerprint


def test_columns(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", rows(0, 4))
    source = open_source(path, columns=["i"])
    assert list(source) == [{"i": n} for n in range(4)]
    assert source.fingerprint != open_source(path).fingerprint
    with pytest.raises(UnknownNameError, match="mesages") as error:
        open_source(path, columns=["mesages"])
    assert "messages" in (error.value.hint or "")


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(save(tmp_path / "a.parquet", rows(0, 100), group=5))
    monkeypatch.setattr(parquet, "CACHE_BYTES", 1000)
    for i in random.Random(1).sample(range(100), 100):
        assert source[i]["i"] == i
        assert sum(table.nbytes for table in source._cache.values()) <= 1000


def _read(source: Any, queue: Any) -> None:
    queue.put([source[i]["i"] for i in range(0, 30, 4)])


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
# forking with threads alive is what a data loader does too
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_other_processes(tmp_path: Path, method: str, suffix: str) -> None:
    source = open_source(save(tmp_path / f"a{suffix}", rows(0, 30)))
    assert source[3]["i"] == 3  # open here
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=_read, args=(source, queue)) for _ in range(2)]
    for child in children:
        child.start()
    for _ in children:
        assert queue.get(timeout=60) == list(range(0, 30, 4))
    for child in children:
        child.join(60)
        assert child.exitcode == 0


def test_images_in_a_table(tmp_path: Path, data: Path) -> None:
    image = (data / "mllm_demo/mllm_demo_data/1.jpg").read_bytes()
    record = {
        "messages": [{"role": "user", "content": "<image>who?"}, {"role": "assistant", "content": "b"}],
        "images": [{"bytes": image, "path": "1.jpg"}],
    }
    chat = ChatSource(open_source(save(tmp_path / "a.parquet", [record, record])))
    ref = chat[1]["messages"][0]["content"][0]["image"]
    assert ref == image and read_header(ref).format == "JPEG"


@quiet
def test_a_real_saved_dataset(tmp_path: Path, data: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = (
        [json.loads(x) for x in (data / "text_sft/gsm8k_test.jsonl").open(encoding="utf-8")]
        if (data / "text_sft/gsm8k_test.jsonl").exists()
        else [json.loads(x) for x in (data / "text_sft/gsm8k_train.jsonl").open(encoding="utf-8")]
    )
    saved = datasets.Dataset.from_list(records)
    saved.save_to_disk(str(tmp_path / "one"), num_shards=3)
    source = open_source(tmp_path / "one")
    assert list(source) == records
    chat = ChatSource(source, columns={"prompt": "question", "response": "answer"})
    assert chat[0]["messages"][1]["content"][0]["text"] == records[0]["answer"]
    few = saved.shuffle(seed=1).select(range(20))
    few.save_to_disk(str(tmp_path / "few"))
    assert list(open_source(tmp_path / "few")) == list(few)
    splits = datasets.DatasetDict({"train": saved, "test": few})
    splits.save_to_disk(str(tmp_path / "two"))
    with pytest.raises(SourceError, match="splits train, test"):
        open_source(tmp_path / "two")
    assert list(open_source(tmp_path / "two", split="test")) == list(few)
    with pytest.raises(UnknownNameError):
        open_source(tmp_path / "two", split="tst")
    with pytest.raises(SourceError, match="no splits"):
        open_source(tmp_path / "one", split="train")


@quiet
def test_sequences_and_images_of_datasets(tmp_path: Path, data: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "messages": {
                "role": datasets.List(datasets.Value("string")),
                "content": datasets.List(datasets.Value("string")),
            },
            "image": datasets.Image(decode=False),
        }
    )
    path = str(data / "mllm_demo/mllm_demo_data/2.jpg")
    records = {
        "messages": [{"role": ["user", "assistant"], "content": ["<image>who?", "b"]}] * 2,
        "image": [{"path": path, "bytes": None}, {"path": None, "bytes": Path(path).read_bytes()}],
    }
    datasets.Dataset.from_dict(records, features=features).save_to_disk(str(tmp_path / "set"))
    chat = ChatSource(open_source(tmp_path / "set"))
    headers = [read_header(chat[i]["messages"][0]["content"][0]["image"]) for i in (0, 1)]
    assert headers[0] == headers[1]


def test_bad_tables(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", rows(0, 30))
    content = path.read_bytes()
    for name, held, message in [
        ("cut.parquet", content[: len(content) // 2], "no whole Parquet"),
        ("text.parquet", b"words " * 50, "no whole Parquet"),
        ("empty.arrow", b"", "no whole Parquet|holds no rows"),
    ]:
        (tmp_path / name).write_bytes(held)
        with pytest.raises(SourceError, match=message):
            open_source(tmp_path / name)
    save(tmp_path / "none/a.parquet", rows(0, 1))
    pq.write_table(pa.table({"i": pa.array([], pa.int64())}), tmp_path / "zero.parquet")
    with pytest.raises(SourceError, match="holds no rows"):
        open_source(tmp_path / "zero.parquet")
    save(tmp_path / "odd/a.parquet", rows(0, 2))
    save(tmp_path / "odd/b.parquet", [{"i": 1, "other": 2}])
    with pytest.raises(SourceError, match=r"other columns than .*: messages, note, other"):
        open_source(tmp_path / "odd")
    with pytest.raises(SourceError, match="does not exist"):
        open_source(tmp_path / "none.parquet")


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", rows(0, 5))
    source = open_source(path)
    save(path, rows(1, 6))
    with pytest.raises(SourceError, match="changed"):
        source[0]
    assert open_source(path)[0]["i"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_a_compressed_batch_says_what_it_unpacks_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, codec: str | None
) -> None:
    """It is asked before the memory is taken; batches that are not compressed are mapped as they are."""
    rows = [{"text": "a" * 99, "kind": "uv"[n % 2], "ids": [0] * 50, "more": {"a": None}} for n in range(600)]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(1, "kind", table["kind"].dictionary_encode())
    path = tmp_path / "a.arrow"
    options = pa.ipc.IpcWriteOptions(compression=codec)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=200)
    assert list(open_source(path)) == rows
    monkeypatch.setattr(parquet, "MOST", 10_000)
    monkeypatch.setattr(parquet, "TIMES", 2)
    if codec is None:
        assert list(open_source(path)) == rows
        return
    with pytest.raises(SourceError, match=r"unpacks [\d,]+ bytes of a batch to [\d,]+") as told:
        open_source(path)
    held = int(told.value.message.rpartition(" to ")[2].replace(",", ""))
    assert 0.9 < held / (table.nbytes / (1 if stream else 3)) < 1.2
