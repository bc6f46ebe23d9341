"""Detection sets as chats with boxes 0 … 999."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.errors import SampleError, SourceError, UnknownNameError
from packtrain.media import hints
from packtrain.sources import open_source
from packtrain.sources.chat import ChatSource
from packtrain.sources.coco import PROMPT, normalise

Write = Callable[..., Path]


def answer(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return json.loads(sample["messages"][1]["content"][0]["text"])


def test_lvis(data: Path) -> None:
    """100 real images, 977 boxes: counted and computed again here."""
    path = data / "detection/lvis_val_100.json"
    held = json.loads(path.read_bytes())
    sizes = {image["id"]: (image["width"], image["height"]) for image in held["images"]}
    names = {category["id"]: category["name"] for category in held["categories"]}
    chat = ChatSource(open_source(path))
    assert len(chat) == 100 and chat.where(3) == "lvis_val_100.json[3]"
    total = 0
    for index, image in enumerate(held["images"]):
        sample = chat[index]
        part, question = sample["messages"][0]["content"]
        assert question == {"type": "text", "text": PROMPT}
        assert part["image"] == str(path.parent / image["file_name"])
        assert (part["width"], part["height"]) == sizes[image["id"]]
        expected = []
        for note in held["annotations"]:
            if note["image_id"] == image["id"]:
                (x, y, w, h), (width, height) = note["bbox"], sizes[image["id"]]
                corners = (x / width, y / height, min(x + w, width) / width, min(y + h, height) / height)
                expected.append(([int(c * 999 + 0.5) for c in corners], names[note["category_id"]]))
        found = answer(sample)
        assert sorted((box["bbox_2d"], box["label"]) for box in found) == sorted(expected)
        tops = [(box["bbox_2d"][1], box["bbox_2d"][0]) for box in found]
        assert tops == sorted(tops)
        total += len(found)
    assert total == 977


def test_coco_with_its_images(data: Path) -> None:
    folder = data / "detection/coco_mmpose"
    for name in ("test_coco.json", "test_coco_wholebody.json", "test_keypoint_partition_metric.json"):
        source = open_source(folder / name)
        chat = ChatSource(source)
        assert len(chat) == 4
        for index in range(4):
            part = chat[index]["messages"][0]["content"][0]
            assert hints.differences(part) == []  # the pictures are there and of that size
            for box in answer(chat[index]):
                x1, y1, x2, y2 = box["bbox_2d"]
                assert 0 <= x1 <= x2 <= 999 and 0 <= y1 <= y2 <= 999 and box["label"] == "person"
        boxes = sum(len(answer(chat[i])) for i in range(4))
        assert boxes + sum(source.fields()["left_out"].values()) == 14
    with pytest.raises(SourceError):
        open_source(folder / "test_coco_det_AP_H_56.json", kind="coco")  # a list of results


@given(st.integers(1, 5000), st.integers(1, 5000), st.data())
def test_boxes_stay_in_range_and_order(width: int, height: int, draw: st.DataObject) -> None:
    xs = sorted(draw.draw(st.lists(st.floats(0, width), min_size=2, max_size=2)))
    ys = sorted(draw.draw(st.lists(st.floats(0, height), min_size=2, max_size=2)))
    x1, y1, x2, y2 = normalise((xs[0], ys[0], xs[1], ys[1]), width, height)
    assert 0 <= x1 <= x2 <= 999 and 0 <= y1 <= y2 <= 999
    assert normalise((0, 0, width, height), width, height) == (0, 0, 999, 999)


def box(number: int, image: int, bbox: Any, category: int = 1, **more: Any) -> dict[str, Any]:
    return {"id": number, "image_id": image, "category_id": category, "bbox": bbox, **more}


SET = {
    "images": [
        {"id": 7, "file_name": "v1/patch8/a.jpg", "width": 1000, "height": 500},
        {"id": 8, "coco_url": "http://host/val2017/b.jpg", "width": 100, "height": 100},
        {"id": 9, "file_name": "c.jpg", "width": 100, "height": 100},
        {"id": 10, "file_name": "d.jpg", "width": 0, "height": 100},
        {"id": 11, "width": 100, "height": 100},
        {"id": 12, "file_name": "e.jpg", "width": 100, "height": 100},
        {"id": 13, "file_name": "f.jpg", "width": 100, "height": 100},
    ],
    "annotations": [
        box(1, 7, [500, 250, 500, 250], 2),
        box(2, 7, [0, 0, 500, 250]),
        box(3, 7, [-10, 0, 20, 10]),
        box(4, 7, [0, 0, 0, 10]),
        box(5, 7, [2000, 0, 10, 10]),
        box(6, 7, [0, 0, 10, 10], iscrowd=1),
        box(7, 12, [0, 0, 10, 10], 99),
        box(8, 13, [0, 0, float("nan"), 10]),
        box(9, 4711, [0, 0, 10, 10]),
    ],
    "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "Ampel 信号"}],
}


def test_what_is_kept_left_out_and_refused(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    source = open_source(write("a.json", SET))
    chat = ChatSource(source)
    assert answer(chat[0]) == [
        {"bbox_2d": [0, 0, 10, 20], "label": "dog"},
        {"bbox_2d": [0, 0, 500, 500], "label": "dog"},
        {"bbox_2d": [500, 500, 999, 999], "label": "Ampel 信号"},
    ]
    assert "信号" in chat[0]["messages"][1]["content"][0]["text"]
    assert chat[1]["messages"][0]["content"][0]["image"].endswith("/val2017/b.jpg")
    assert answer(chat[2]) == []
    said = {3: "width and height", 4: "neither file_name", 5: "unknown category 99", 6: "bbox"}
    for index, words in said.items():
        with pytest.raises(SampleError, match=words) as error:
            chat[index]
        assert error.value.reason == "malformed_record" and error.value.message.startswith(f"a.json[{index}]")
    assert source.fields()["left_out"] == {"crowd": 1, "no area inside the image": 2}
    assert "2 boxes left out: no area" in caplog.text and "1 annotations of images" in caplog.text


def test_options(write: Write) -> None:
    path = write("a.json", SET)
    plain = open_source(path)
    in_order = open_source(path, order="file", crowd=True, prompt="Boxes?")
    assert [b["bbox_2d"][0] for b in answer(in_order[0])] == [500, 0, 0, 0]
    assert in_order[0]["messages"][0]["content"][1]["text"] == "Boxes?"
    assert plain.fingerprint != in_order.fingerprint
    again = pickle.loads(pickle.dumps(in_order))
    assert again[0] == in_order[0] and again.where(2) == "a.json[2]"
    with pytest.raises(UnknownNameError):
        open_source(path, order="size")
    assert open_source(write("deep/b.json", SET)).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"annotations": None}, "no list of annotations"),
        ({"images": [{"id": 1}, {"id": 1}]}, "two images of the id 1"),
        ({"images": [{"file_name": "a"}]}, "image 0 has no id"),
        ({"images": [{"id": [1], "file_name": "a"}]}, "image 0 has no id"),
        ({"images": []}, "empty|no records"),
    ],
)
def test_bad_files(write: Write, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_source(write("a.json", {**SET, **change}), kind="coco")


def test_values_of_other_kinds_are_told_and_stop_nothing(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """A list where an id or a name belongs, a size that is no number: found by an hour of damaged input."""
    images = [{"id": n, "file_name": "a.jpg", "width": 9, "height": 9} for n in range(4)]
    images[1]["width"] = float("inf")
    notes = [box(1, 0, [0, 0, 9, 9]), box(2, 2, [0, 0, 9, 9], [1]), box(3, 3, [0, 0, 9, 9], 2)]  # type: ignore[arg-type]
    notes.append(box(4, [0], [0, 0, 9, 9]))  # type: ignore[arg-type]
    kinds = [{"id": 1, "name": "dog"}, {"id": [2], "name": "cat"}, {"id": 2, "name": ["cat"]}]
    source = open_source(write("a.json", {"images": images, "annotations": notes, "categories": kinds}))
    assert answer(source[0]) == [{"bbox_2d": [0, 0, 999, 999], "label": "dog"}]
    for index, words in {
        1: "width and height",
        2: r"unknown category \[1\]",
        3: "unknown category 2",
    }.items():
        with pytest.raises(SampleError, match=words):
            source[index]
    assert "1 annotations of images that are not in the file" in caplog.text


def test_a_cut_file(write: Write) -> None:
    text = json.dumps(SET).encode()
    with pytest.raises(SourceError, match="not valid JSON"):
        open_source(write("a.json", text[:-5]))
