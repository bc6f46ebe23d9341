"""Worked examples of documents 002 and 003: the files, records and phases that they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_sets import Set
from PIL import Image
from verbs import call
from words_in import put

import packtrain as pt
from packtrain.data import LazyShardedDataset, open_packs
from packtrain.errors import SampleError
from packtrain.export import PackingProducer
from packtrain.pipeline.export import export
from packtrain.pipeline.pairs import split_pairs
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.sources.encoded import EncodedTemplate

BOOK = {
    "messages": [
        {
            "content": "<image>\nWho is the author of this book?\n"
            "Answer the question using a single word or phrase.",
            "role": "user",
        },
        {"content": "Kevin J. Todeschi", "role": "assistant"},
        {"content": "What is the genre of this book?", "role": "user"},
        {"content": "Religion & Spirituality", "role": "assistant"},
        {"content": "Is this book related to Business & Money?", "role": "user"},
        {"content": "No", "role": "assistant"},
    ],
    "images": ["876044011.jpg"],
}
TEXT = {
    "messages": [
        {
            "content": "Express the system configuration diagram\nAnswer in English.지금 번역하기",
            "role": "user",
        },
        {"content": "A metaverse-based aftercare service prototype ......", "role": "assistant"},
    ],
    "images": [],
}


def picture(path: Path) -> None:
    Image.new("RGB", (40, 30), (90, 120, 30)).save(path)


@pytest.mark.spec(
    "003",
    "the sample format: `{img, json}` pairs, and `output_00000000.json` for samples without image",
    key="`data.source: pairs`",
    api="`open_source`, `ChatSource`",
)
def test_the_two_records_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "876044011.json").write_text(json.dumps(BOOK), encoding="utf-8")
    picture(tmp_path / "876044011.jpg")
    (tmp_path / "output_00000000.json").write_text(json.dumps(TEXT, ensure_ascii=False), encoding="utf-8")
    book, text = ChatSource(open_source(tmp_path))
    assert [m["role"] for m in book["messages"]] == ["user", "assistant"] * 3
    first = book["messages"][0]["content"]
    assert [part["type"] for part in first] == ["image", "text"]
    assert [m["content"][0]["text"] for m in book["messages"][1::2]] == [
        "Kevin J. Todeschi", "Religion & Spirituality", "No",
    ]  # fmt: skip
    assert text["messages"][0]["content"] == [{"type": "text", "text": TEXT["messages"][0]["content"]}]


@pytest.mark.spec(
    "003",
    "three records of one image: `000000003474.jpg/.json`, `…_1`, `…_2`",
    key="`packtrain pairs`",
    api="`pipeline.pairs`",
)
def test_the_names_of_the_split(tmp_path: Path) -> None:
    picture(tmp_path / "000000003474.jpg")
    rows = [
        {
            "messages": [{"role": "user", "content": f"<image>{n}?"}, {"role": "assistant", "content": "x"}],
            "images": ["000000003474.jpg"],
        }
        for n in range(3)
    ]
    (tmp_path / "vqa.jsonl").write_text(
        "".join(json.dumps(held) + "\n" for held in [*rows, TEXT]), encoding="utf-8"
    )
    split_pairs(ChatSource(open_source(tmp_path / "vqa.jsonl")), tmp_path / "pairs")
    assert sorted(path.name for path in (tmp_path / "pairs").glob("[!.]*")) == [
        "000000003474.jpg", "000000003474.json", "000000003474_1.jpg", "000000003474_1.json",
        "000000003474_2.jpg", "000000003474_2.json", "output_00000003.json",  # the number of the record
    ]  # fmt: skip


FLAT = {
    "images": ["img000.jpg", "img001.jpg", "img002.jpg"],
    "prompt": ["描述", "what about...", ""],
    "captions": ["str0", "str1", "str2"],
}
NESTED = {
    "images": [["img000.jpg"], [], ["img002.jpg"]],
    "prompt": [["描述这幅图"], ["what about this fig"], ["How are you?", "I am fine too."]],
    "captions": [["stri"], ["str2"], ["I am fine and you?", "Have a nice day"]],
}


def samples_of(record: dict[str, Any], members: list[int]) -> list[dict[str, Any]]:
    """The samples that a record of the text was packed from, in our words."""
    out = []
    for number in members:
        asked, said, named = (record[key][number] for key in ("prompt", "captions", "images"))
        asked, said, named = ([one] if isinstance(one, str) else one for one in (asked, said, named))
        turns: list[dict[str, Any]] = []
        for place, (question, answer) in enumerate(zip(asked, said, strict=True)):
            mark = "<image>" * len(named) if place == 0 else ""
            turns += [
                {"role": "user", "content": mark + question},
                {"role": "assistant", "content": answer},
            ]
        out.append({"messages": turns, "images": [f"{number}-{name}" for name in named]})
    return out


@pytest.mark.spec(
    "003",
    "`ps_00000000.json` and its images, word for word: flat for captions and VQA, lists of lists for turns",
    key="`export.format: raw`",
    api="`export`",
)
@pytest.mark.parametrize(("record", "pictures"), [(FLAT, [0, 1, 2]), (NESTED, [0, 2])])
def test_the_record_of_the_text(
    made: Callable[..., Set], record: dict[str, Any], pictures: list[int]
) -> None:
    """The samples of the text, exported, are the record of the text: keys, nesting and names of images."""
    names = [f"{n}-img{n:03d}.jpg" for n in pictures]
    held = made(rows=samples_of(record, [0, 1, 2]), names=names, cap=300)
    out = held.folder / "out"
    export(held.plan_folder, out, format="raw", source=held.source)
    assert sorted(path.name for path in out.glob("ps_*")) == [
        *(f"ps_00000000.img{n:03d}.jpg" for n in pictures),
        "ps_00000000.json",
    ]
    written = json.loads((out / "ps_00000000.json").read_text(encoding="utf-8"))
    assert {key: written[key] for key in ("images", "prompt", "captions")} == record
    back = ChatSource(open_source(out, kind="llava_packed"))
    answers = [[m["content"][0]["text"] for m in sample["messages"][1::2]] for sample in back]
    assert answers == [[one] if isinstance(one, str) else one for one in record["captions"]]


@pytest.mark.spec(
    "003",
    "members with other numbers of prompts than captions are named, not read",
    key="`data.source: llava_packed`",
    api="`sources.llava_packed`",
)
def test_prompts_and_captions_of_different_lengths(tmp_path: Path) -> None:
    """`convert_to_messages` raises "cur_prompt & cur_caption have different lengths"."""
    record = {**NESTED, "captions": [["stri"], ["str2"], ["I am fine and you?"]]}
    (tmp_path / "ps_00000000.json").write_text(json.dumps(record), encoding="utf-8")
    for name in ("img000", "img002"):
        picture(tmp_path / f"ps_00000000.{name}.jpg")
    source = open_source(tmp_path, kind="llava_packed")
    assert source[1]["messages"][1]["content"] == "str2"
    with pytest.raises(SampleError, match="member 2 has not as many prompts as captions"):
        source[2]


@pytest.mark.spec(
    "003",
    "1st phase: lengths that are powers of two fill their packs, greedily where mixing ends",
    key="`data.packer: diverse`",
    api='`plan(packer="diverse")`',
)
def test_powers_of_two_fill_their_packs() -> None:
    """box_capacity = 2^N; what is left of the powers is less than one pack. Then seeds above half of it."""
    lengths = np.repeat([1 << n for n in range(10)], [64, 40, 33, 21, 17, 9, 8, 6, 5, 3])
    full = pt.plan(lengths, box_capacity=512, packer="diverse").pack_tokens
    assert (np.sort(full)[1:] == 512).all() and len(full) == -(-int(lengths.sum()) // 512)
    one_kind = pt.plan([64] * 80, 512, packer="diverse")  # a deadlock of mixing: greedy alone
    assert one_kind.pack_tokens.tolist() == [512] * 10
    long = pt.plan([300, 310, 290, 100, 90, 110, 100], 512, packer="diverse")
    assert len(long) == 3  # a pack for every seed


@pytest.mark.spec(
    "003",
    "the four steps: token lengths, packing with the distribution seen, shards, training on them",
    key="`measure`, `plan`, `show --distribution`, `export`, `OFFLINE_PACKED_DATA`",
    api="`measure`, `plan`, `export`, `open_packs`",
)
def test_the_four_steps(
    made: Callable[..., Set], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 1 is `Set`'s measuring; the environment of step 4 says nothing that the shards do not."""
    held = made(rows=samples_of(NESTED, [0, 1, 2]), names=["0-img000.jpg", "2-img002.jpg"], cap=300)
    lengths = held.plan_folder.parent / "lengths"
    plan = held.folder / "again"
    call("plan", str(lengths), "--pack-length", "300", "--packer", "diverse", "--out", str(plan))
    shown = call("show", str(lengths), "--distribution", "--pack-length", "300").output
    assert "3" in shown
    export(plan, held.folder / "shards", format="webdataset", source=held.source)
    assert [path.name for path in (held.folder / "shards").glob("*.tar")]
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    monkeypatch.setenv("OFFLINE_PACKING_BMR", "1")
    packs = open_packs(held.folder / "shards", held.template.encode)
    assert sorted(one for pack in map(packs.__getitem__, range(len(packs))) for one in pack.ids) == [0, 1, 2]
    assert "no effect" not in caplog.text  # BMR is what these shards hold


@pytest.mark.spec(
    "002",
    "token ids of the producer come out of the reader, by `chunk_idx % dp_world_size`",
    key="`produce IN OUT`, `data.kind: growing`",
    api="`PackingProducer(input_dir=)`, `LazyShardedDataset(data_dir=, dp_rank=)`",
)
def test_the_two_components_together(tmp_path: Path) -> None:
    lengths = [7 + (n * 13) % 60 for n in range(60)]
    put(tmp_path / "raw", "a.jsonl", lengths)
    PackingProducer(
        input_dir=tmp_path / "raw",
        output_dir=tmp_path / "packed",
        template=EncodedTemplate(),
        packing_length=100,
        packs_per_chunk=4,
        kind="encoded",
        packing_strategy="ffd",
        num_proc=1,
    ).run()
    rows = [
        json.loads(line) for line in (tmp_path / "raw" / "a.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    seen: list[int] = []
    for rank in range(3):
        reader = LazyShardedDataset(data_dir=tmp_path / "packed", dp_rank=rank, dp_world_size=3, timeout_s=5)
        for pack in reader:
            if pack.is_filler:
                continue
            assert pack.chunk % 3 == rank and len(pack["input_ids"]) <= 100
            for sample in pack.members():
                assert list(sample["input_ids"]) == rows[sample["sample_id"]]["input_ids"]
                seen.append(sample["sample_id"])
        reader.acknowledge()
    assert sorted(seen) == list(range(60))
    marks = sorted((tmp_path / "packed").rglob("*.completed"))
    assert len(marks) == len(list((tmp_path / "packed").glob("chunk_*.arrow")))
