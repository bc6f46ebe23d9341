"""mRoPE positions of a sample alone: literal numbers, and equality with the models' own function."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from packtrain.errors import SampleError
from packtrain.template import ensure_torchvision, mrope_positions, text_positions


def test_text_counts_up() -> None:
    assert text_positions(4).tolist() == [0, 1, 2, 3]
    assert mrope_positions(np.zeros(3, bool), [], 2).tolist() == [[0, 1, 2]] * 3
    assert mrope_positions(np.zeros(0, bool), [], 2).shape == (3, 0)


def test_one_image_between_text_pb04() -> None:
    """[txt, vstart, img x4, vend, txt, txt], grid (1,4,4), merge 2; two of them restart."""
    image = np.array([0, 0, 1, 1, 1, 1, 0, 0, 0], dtype=bool)
    rows = mrope_positions(image, [(4, 4)], 2)
    assert rows.dtype == np.int64
    assert rows.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 2, 3, 3, 4, 5, 6],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]
    packed = np.concatenate([rows, rows], axis=1)
    assert packed[0].tolist() == [0, 1, 2, 2, 2, 2, 4, 5, 6] * 2


def test_image_first_last_and_adjacent() -> None:
    image = np.ones(2 + 1, dtype=bool)
    assert mrope_positions(image, [(2, 4), (2, 2)], 2).tolist() == [[0, 0, 2], [0, 0, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("image", "grids"),
    [
        ([1, 1, 1, 1], []),  # tokens without an image
        ([0, 1, 1], [(4, 4)]),  # too few tokens
        ([1, 1, 0, 1, 1], [(4, 4)]),  # a run interrupted by text
        ([1, 1, 1, 1, 1], [(4, 4)]),  # too many tokens
    ],
)
def test_tokens_must_match_grids(image: list[int], grids: list[tuple[int, int]]) -> None:
    with pytest.raises(SampleError) as caught:
        mrope_positions(np.array(image, dtype=bool), grids, 2)
    assert caught.value.reason == "placeholder_mismatch"


def model_of(name: str) -> Any:
    """The model class with a one-layer random network: only its position function is used."""
    ensure_torchvision()
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(name)
    text, vision = config.get_text_config(), config.vision_config
    text.num_hidden_layers, text.hidden_size, text.intermediate_size = 1, 32, 32
    text.num_attention_heads = text.num_key_value_heads = 2
    text.head_dim = 16
    vision.depth, vision.num_heads, vision.hidden_size, vision.intermediate_size = 1, 2, 32, 32
    vision.out_hidden_size = 32
    text.vocab_size = 152_000
    if hasattr(vision, "embed_dim"):
        vision.embed_dim = 32
    if hasattr(vision, "deepstack_visual_indexes"):
        vision.deepstack_visual_indexes = [0]
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config).model


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_equal_to_get_rope_index(name: str, template, chat) -> None:
    rng = np.random.default_rng(7)

    def picture() -> bytes:
        buffer = io.BytesIO()
        Image.new("RGB", tuple(rng.integers(20, 500, 2).tolist())).save(buffer, "PNG")
        return buffer.getvalue()

    samples = [
        chat([picture(), "What?"], "This."),
        chat(["Look", picture(), "and", picture()], "Both.", ["Again", picture()], "No."),
        chat([picture(), picture(), picture()], "Three."),
        chat("No image", "None."),
    ]
    model = model_of(name)
    for sample in samples:
        ours = template(name).encode(sample)
        kinds = (ours["input_ids"] == template(name).image_token_id).long()
        if not kinds.any():
            theirs = torch.arange(len(kinds)).expand(3, 1, -1)
        else:
            theirs, _ = model.get_rope_index(
                ours["input_ids"][None], kinds[None], image_grid_thw=ours["image_grid_thw"]
            )
        assert torch.equal(theirs[:, 0], ours["position_ids"])
