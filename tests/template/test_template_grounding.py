"""Boxes of `objects` are written as each family publishes them, in measuring and encoding alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from packtrain.errors import SampleError
from packtrain.sources.chat import ChatSource

QWEN = "<|object_ref_start|>a dog<|object_ref_end|>"


@pytest.fixture
def record(tmp_path: Path) -> dict[str, Any]:
    Image.new("RGB", (200, 100)).save(tmp_path / "x.png")
    Image.new("RGB", (400, 400)).save(tmp_path / "y.png")
    turns = [
        {"role": "user", "content": "<image><image>Find <ref-object> near <bbox>."},
        {"role": "assistant", "content": "It is at <bbox>."},
    ]
    objects = {"ref": ["a dog"], "bbox": [[100, 100], [20, 10, 100, 50]], "image_id": [1, 0]}
    images = [str(tmp_path / name) for name in ("x.png", "y.png")]
    return {"messages": turns, "images": images, "objects": objects}


@pytest.mark.parametrize(
    ("name", "ref", "near", "at"),
    [
        (
            "qwen2_vl",
            QWEN,
            "<|box_start|>(250,250)<|box_end|>",
            "<|box_start|>(100,100),(500,500)<|box_end|>",
        ),
        (
            "qwen3_vl",
            QWEN,
            "<|box_start|>(250,250)<|box_end|>",
            "<|box_start|>(100,100),(500,500)<|box_end|>",
        ),
        # 400 x 400 becomes 392 x 392, 200 x 100 becomes 196 x 112: multiples of 28
        ("qwen2_5_vl", QWEN, "<|box_start|>(98,98)<|box_end|>", "<|box_start|>(20,11),(98,56)<|box_end|>"),
        ("internvl3", "<ref>a dog</ref>", "<box>[[250, 250]]</box>", "<box>[[100, 100, 500, 500]]</box>"),
    ],
)
def test_boxes_are_written(
    template: Any, record: dict[str, Any], name: str, ref: str, near: str, at: str
) -> None:
    used = template(name)
    sample = ChatSource([record])[0]
    encoded = used.encode(sample)
    assert int(used.measure(sample)) == len(encoded["input_ids"])
    text = used.tokenizer.decode(encoded["input_ids"])
    assert f"Find {ref} near {near}." in text and f"It is at {at}." in text
    used.check_decoded(sample, encoded)
    shares = {**record["objects"], "bbox": [[0.25, 0.25], [0.1, 0.1, 0.5, 0.5]], "bbox_type": "norm1"}
    again = used.rendered(ChatSource([{**record, "objects": shares}])[0]).text
    assert again == used.rendered(sample).text


def test_a_family_without_a_notation_refuses(template: Any, record: dict[str, Any]) -> None:
    sample = ChatSource([record])[0]
    (outcome,) = template("llava_onevision").measure_batch([sample])
    assert isinstance(outcome, SampleError) and outcome.reason == "unread_key"
    assert "objects" in outcome.message and "ignore_keys" in str(outcome.hint)
