"""`--layout llava` against the encoders that read it, and the packs of their own preparation read back."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export_sets import Set
from llava_encoders import encoded
from llava_sets import CAPTIONS, MIXED, NAMES, SAID, VQA, Row, planned, talk
from PIL import Image

from packtrain.data import open_packs
from packtrain.errors import InputError, SampleError
from packtrain.media.location import read_bytes
from packtrain.pipeline.export import export
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.store.pack_records import refusal
from packtrain.store.shards import PackFiles
from packtrain.template import HFTemplate


@pytest.fixture
def real(tmp_path: Path, processor: Any) -> Callable[[list[Row]], tuple[Any, Any, Path, HFTemplate, Any]]:
    """(source, lengths, plan folder, template, processor) of rows with the images of `NAMES`."""
    template = HFTemplate(processor("qwen2_5_vl"))

    def make(rows: list[Row]) -> tuple[Any, Any, Path, HFTemplate, Any]:
        folder = tmp_path / f"set{len(list(tmp_path.glob('set*')))}"
        return *planned(folder, rows, template), template, template.processor

    return make


def loaded(out: Path) -> list[Row]:
    """The samples that the exported loader makes of every pack, media as bytes."""
    loader = runpy.run_path(str(out / ".nv-meta" / "sample_loader.py"))["sample_loader"]
    made = []
    for number, members in PackFiles(out).stream():
        held = {**members, "json": json.loads(members["json"]), "__key__": str(number), "__restore_key__": ()}
        made.append(loader(held))
    return made


@pytest.mark.spec(
    "003",
    "exports that its own encoders read: captions, VQA, multi-turn",
    key="`export.layout: llava`",
    api='`export(options={"layout": "llava"})`',
)
@pytest.mark.parametrize(
    ("rows", "task", "gate"),
    [(CAPTIONS, "captions", "captions"), (CAPTIONS, "captions", "vqa"), (SAID, "captions", "captions"),
     (VQA, "vqa", "vqa"), (MIXED, "multi_turn", "mixed")],
    ids=["captions", "captions-as-vqa", "captions-without-user", "vqa", "multi_turn"],
)  # fmt: skip
def test_its_encoders_read_every_export(real: Any, rows: list[Row], task: str, gate: str) -> None:
    source, lengths, plan, template, processor = real(rows)
    out = plan.parent / "out"
    figures = export(plan, out, format="energon", source=source, options={"layout": "llava"})
    assert figures["task"] == task and figures["samples"] == len(rows)
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    line = processor.tokenizer("\n")["input_ids"]
    packs = PackFiles(out)
    for number, sample in enumerate(loaded(out)):
        ids = packs.record(number)["packtrain"]["ids"]
        for sample_id, theirs in zip(ids, encoded(sample, processor, gate), strict=True):
            ours = template.encode(source[sample_id])["input_ids"].tolist()
            assert theirs.count(pad) == ours.count(pad)  # 0 image tokens and 1 image, once
            if gate != "captions" and rows is not SAID:
                assert theirs == ours[: -len(line)] if gate == "vqa" else theirs == ours
                assert int(lengths.tokens[sample_id]) == len(ours)
    back = open_packs(out, template.encode)
    for pack in (back[i] for i in range(len(back))):
        for member in pack:
            assert (
                member["input_ids"].tolist()
                == template.encode(source[member["sample_id"]])["input_ids"].tolist()
            )


@pytest.mark.spec(
    "003",
    "system turns, several images, questions at the end: refused by sample",
    key="`export.layout: llava`",
    api="`export`",
)
@pytest.mark.parametrize(
    ("row", "why"),
    [
        (talk("be brief", "<image>What?", "This.", images=["a.jpg"], roles="sua"), "the turns system, user"),
        (talk("<image><image>What?", "Two.", images=["a.jpg", "b.png"]), "has 2 images"),
        (talk("<image>What?", "This.", "And then?", images=["a.jpg"]), "nobody answers"),
        (talk("One.", "Two.", "Three.", roles="uua"), "the turns user, user, assistant"),
        ({"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B", "loss": 0},
                       {"role": "user", "content": "C"}, {"role": "assistant", "content": "D"}]}, "has loss"),
        ({**talk("Say it.", "Word."), "tools": [{"name": "f", "parameters": {}}]}, "has tools"),
    ],
    ids=["system", "images", "question-last", "two-questions", "masked-answer", "tools"],
)  # fmt: skip
def test_what_they_would_read_wrongly_is_refused(made: Callable[..., Set], row: Row, why: str) -> None:
    held = made(rows=[row], names=NAMES, cap=900)
    source = held.source
    out = held.folder / "out"
    with pytest.raises(InputError, match=why) as told:
        export(held.plan_folder, out, format="energon", source=source, options={"layout": "llava"})
    assert "layout='packtrain'" in str(told.value.hint)


def test_a_word_that_stands_for_a_medium_there_is_refused() -> None:
    def said(*contents: list[Row]) -> Row:
        roles = ["user", "assistant"]
        return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]}

    image, text = {"type": "image", "image": "x.jpg"}, {"type": "text", "text": "a"}
    assert refusal(said([image, text], [text]), "vqa") is None
    assert "says <image>" in str(
        refusal(said([{"type": "text", "text": "say <image>"}], [text]), "multi_turn")
    )
    assert "an answer holds an image" in str(refusal(said([text], [image, text]), "multi_turn"))
    assert "has video" in str(refusal(said([{"type": "video", "video": "x.mp4"}], [text]), "multi_turn"))
    assert "a size of its own" in str(refusal(said([{**image, "max_pixels": 9}], [text]), "vqa"))
    assert "is not read" in str(refusal(said([image, text], [text]), "captions"))


@pytest.mark.spec(
    "003", "a trailing user turn is never an empty caption", key="`export.format`", api="`export`"
)
def test_a_question_that_nobody_answers_is_no_empty_caption(made: Callable[..., Set]) -> None:
    held = made(rows=[talk("<image>What?", "This.", "And then?", images=["a.jpg"])], names=NAMES)
    out = held.folder / "out"
    export(held.plan_folder, out, format="raw", source=held.source)
    packs = PackFiles(out)
    assert packs.record(0)["captions"] == [["This."]] and packs.record(0)["prompt"] == [["What?"]]
    assert [m["role"] for m in packs.samples(0)[0]["messages"]] == ["user", "assistant", "user"]


# -- their packs -----------------------------------------------------------------------------
def theirs(folder: Path, record: Row, images: list[str], width: int, number: int = 0) -> None:
    """A pack as their preparation leaves it; `images` as in its record."""
    folder.mkdir(exist_ok=True)
    (folder / f"ps_{number:08d}.json").write_text(json.dumps(record), encoding="utf-8")
    for name in images:
        picture = Image.new("RGB", (30 + len(name), 28))
        picture.save(folder / f"ps_{number:08d}.{name}", "JPEG")


def read_all(path: Path, **options: Any) -> list[list[tuple[str, list[str]]]]:
    """(role, parts) of every sample, media by the end of their name."""
    source = ChatSource(open_source(path, kind="llava_packed", **options))
    samples = [source[i]["messages"] for i in range(len(source))]
    told = []
    for messages in samples:
        told.append(
            [
                (m["role"][0], [p.get("text", str(p.get("image", ""))[-10:]) for p in m["content"]])
                for m in messages
            ]
        )
    return told


FLAT = {
    "images": ["img000.jpg", "img001.jpg", "img002.jpg"],
    "prompt": ["描述", "what about <image>?", ""],
    "captions": ["str0", "str1", "str2"],
}
NESTED = {
    "images": [["img000.jpg"], [], ["img002.jpg"]],
    "prompt": [["描述这幅图"], ["what about this fig"], ["How are you?", "I am fine too.<image>"]],
    "captions": [["stri"], ["str2"], ["I am fine and you?", "Have a nice day"]],
}


@pytest.mark.spec(
    "003",
    "its packs are read: captions, VQA, multi-turn, `prompt` or `prompts`",
    key="`data.source: llava_packed`",
    api="`sources.llava_packed`",
)
@pytest.mark.parametrize("spelling", ["prompt", "prompts"])
def test_packs_of_the_published_description_are_read(tmp_path: Path, spelling: str) -> None:
    flat = {("prompts" if spelling == "prompts" and k == "prompt" else k): v for k, v in FLAT.items()}
    theirs(tmp_path / "flat", flat, FLAT["images"], 3)
    theirs(tmp_path / "flat", {**flat, "captions": ["x", "y", "z"]}, FLAT["images"], 3, 1)
    rows = read_all(tmp_path / "flat")
    assert len(rows) == 6
    assert rows[:3] == [
        [("u", ["img000.jpg", "描述"]), ("a", ["str0"])],
        [("u", ["what about ", "img001.jpg", "?"]), ("a", ["str1"])],
        [("u", ["img002.jpg"]), ("a", ["str2"])],
    ]
    assert read_all(tmp_path / "flat", task="captions")[0] == [("u", ["img000.jpg"]), ("a", ["str0"])]
    theirs(tmp_path / "nested", NESTED, ["img000.jpg", "img002.jpg"], 3)
    assert read_all(tmp_path / "nested") == [
        [("u", ["img000.jpg", "描述这幅图"]), ("a", ["stri"])],
        [("u", ["what about this fig"]), ("a", ["str2"])],
        [("u", ["How are you?"]), ("a", ["I am fine and you?"]),
         ("u", ["I am fine too.", "img002.jpg"]), ("a", ["Have a nice day"])],
    ]  # fmt: skip


@pytest.mark.spec(
    "003",
    "its tars are read, whose records name source paths",
    key="`data.source: llava_packed`",
    api="`sources.llava_packed`",
)
def test_packs_in_tars_that_name_where_their_images_were(tmp_path: Path) -> None:
    """The published example keeps absolute source paths in the record; members are `imgI.jpg` by number."""
    folder = tmp_path / "loose"
    record = {
        "images": ["/gone/x.jpg", "/gone/y.jpg"],
        "prompts": ["<image>a", "<image>b"],
        "captions": ["c", "d"],
    }
    theirs(folder, record, ["img0.jpg", "img1.jpg"], 1)
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "pretrain-000000.tar", "w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    rows = read_all(tmp_path / "tars")
    assert rows == [[("u", ["0.img0.jpg", "a"]), ("a", ["c"])], [("u", ["0.img1.jpg", "b"]), ("a", ["d"])]]
    source = ChatSource(open_source(tmp_path / "tars", kind="llava_packed"))
    medium = source[1]["messages"][0]["content"][0]["image"]
    assert Image.open(io.BytesIO(read_bytes(medium))).size == (38, 28)


def test_our_own_packs_are_read_as_theirs(made: Callable[..., Set]) -> None:
    held = made(rows=MIXED, names=NAMES, cap=200)
    for fmt, options in (
        ("raw", {}),
        ("webdataset", {"prompts": "prompts"}),
        ("energon", {"layout": "llava"}),
    ):
        out = held.folder / fmt
        export(held.plan_folder, out, format=fmt, source=held.source, options=options)
        source = ChatSource(open_source(out, kind="llava_packed"))
        order = [i for pack in range(len(held.plan)) for i in held.plan[pack].tolist()]
        assert len(source) == len(order)
        for place, sample_id in enumerate(order):
            want, got = held.source[sample_id]["messages"], source[place]["messages"]
            assert [m["role"] for m in got] == [m["role"] for m in want]
            if fmt == "energon":  # the others say where an image stands in `packtrain.samples` alone
                flat = [[[p.get("text") for p in m["content"]] for m in held] for held in (got, want)]
                assert flat[0] == flat[1]


def test_faults_of_their_packs_are_named(tmp_path: Path) -> None:
    bad = [
        ({**FLAT, "captions": ["a", "b"]}, "same number"),
        (
            {**FLAT, "captions": ["a", "b", " Error: File x.json does not exist"]},
            "a failure in place of a text",
        ),
        ({**NESTED, "captions": [["a"], ["b"], ["c"]]}, "as many prompts as captions"),
        ({**FLAT, "prompt": ["<image><image>", "", ""]}, "2 <image> and 1 image"),
    ]
    for number, (record, told) in enumerate(bad):
        folder = tmp_path / str(number)
        theirs(folder, record, FLAT["images"], 3)
        source = ChatSource(open_source(folder, kind="llava_packed"))
        found = []
        for i in range(len(source)):
            try:
                source[i]
            except SampleError as error:
                found.append(str(error))
        assert found and told in found[-1], (record, found)
        shutil.rmtree(folder)
