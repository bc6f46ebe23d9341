"""The demo's processor is the real Qwen2.5-VL processor of transformers, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from packtrain.template import load_processor
from packtrain.testing.demo import DemoSet
from packtrain.testing.demo.processor import MAX_IMAGE_TOKENS, SPECIALS


@pytest.fixture(scope="module")
def processor(demo: DemoSet) -> Any:
    return load_processor(demo.processor_dir)


def test_classes(processor: Any) -> None:
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert type(processor.image_processor).__name__.startswith("Qwen2VLImageProcessor")
    assert processor.image_token_id == SPECIALS.index("<|image_pad|>")
    assert processor.tokenizer.eos_token == "<|im_end|>"
    assert processor.tokenizer.pad_token == "<|endoftext|>"
    assert 1500 < len(processor.tokenizer) <= 4096


def test_saved_again_it_has_the_same_values(processor: Any, demo: DemoSet, tmp_path: Path) -> None:
    processor.save_pretrained(tmp_path)
    ours = json.loads((demo.processor_dir / "processor_config.json").read_text(encoding="utf-8"))
    theirs = json.loads((tmp_path / "processor_config.json").read_text(encoding="utf-8"))
    assert ours["processor_class"] == theirs["processor_class"]
    for part in ("image_processor", "video_processor"):
        assert {key: theirs[part][key] for key in ours[part]} == ours[part]


def test_text_comes_back(processor: Any) -> None:
    tokenizer = processor.tokenizer
    for text in (
        "x_{1} = \\frac{a}{b}",
        "naïve α 漢字 \U0001f600\r\n\tend  ",
        '[{"bbox_2d": [12, 0, 999, 7]}]',
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_box_coordinate_is_one_token(processor: Any) -> None:
    for number in (0, 7, 42, 360, 999):
        assert len(processor.tokenizer(str(number))["input_ids"]) == 1


def test_generation_marks_cover_the_answers_only(processor: Any) -> None:
    picture = Image.new("RGB", (200, 100))
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Nothing."}]},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    made = processor.apply_chat_template(
        turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = made["input_ids"][0], made["assistant_masks"][0]
    answers = processor.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert answers == "Nothing.<|im_end|>Yes.<|im_end|>"
    assert ids.count(processor.image_token_id) == 7 * 4  # 200 x 100 -> 196 x 112 pixels, 28 a token


@pytest.mark.parametrize("size", [(5, 5), (30, 900), (3000, 2000), (56, 56)])
def test_pictures_stay_small(processor: Any, size: tuple[int, int]) -> None:
    grid = processor.image_processor(Image.new("RGB", size), return_tensors="pt")["image_grid_thw"]
    assert 4 <= int(grid.prod()) // 4 <= MAX_IMAGE_TOKENS
