"""Media of a row: joined in placeholder order, absent without media, checked against their grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from packtrain.collate import PaddingFreeCollator
from packtrain.errors import InputError


def text(sample_id: int) -> dict[str, Any]:
    return {"input_ids": [1, 2], "labels": [1, 2], "position_ids": [0, 1], "sample_id": sample_id}


def image(sample_id: int, *grids: tuple[int, int, int], value: float = 1.0) -> dict[str, Any]:
    patches = sum(t * h * w for t, h, w in grids)
    length = 2 + patches // 4
    return {
        "input_ids": [9] * length,
        "labels": [-100] * length,
        "position_ids": torch.arange(length).expand(3, -1),
        "sample_id": sample_id,
        "pixel_values": torch.full((patches, 6), value),
        "image_grid_thw": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
    }


PACKS = {
    "text": [text(0)],
    "text text": [text(0), text(1)],
    "image text": [image(0, (1, 2, 2)), text(1)],
    "text image image": [text(0), image(1, (1, 2, 4), value=2.0), image(2, (1, 2, 2), (1, 4, 2), value=3.0)],
}


@pytest.mark.spec(
    "001", "media of all samples are joined in order", key="every key", api="`PaddingFreeCollator`"
)
def test_pb72_every_mix_of_media_collates_alone_and_together() -> None:
    collate = PaddingFreeCollator("qwen2_vl")
    for name, pack in PACKS.items():
        batch = collate([pack])
        assert ("pixel_values" in batch) == ("image_grid_thw" in batch) == ("image" in name), name
        assert batch["position_ids"].shape[0] == 4
    everything = collate(list(PACKS.values()))
    assert everything["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 2], [1, 4, 2]]
    assert everything["pixel_values"].dtype is torch.float32
    assert everything["pixel_values"][:, 0].tolist() == [1.0] * 4 + [2.0] * 8 + [3.0] * 12


def test_empty_media_tensors_count_as_no_media() -> None:
    member = {**text(0), "pixel_values": torch.empty(0, 6), "image_grid_thw": torch.empty(0, 3)}
    batch = PaddingFreeCollator("qwen2_vl")([[member]])
    assert "pixel_values" not in batch and "image_grid_thw" not in batch


def test_media_are_not_the_callers_tensors() -> None:
    member = image(0, (1, 2, 2))
    batch = PaddingFreeCollator("qwen2_vl")([[member]])
    batch["pixel_values"].zero_()
    assert bool((member["pixel_values"] == 1).all())


def test_media_and_grids_must_agree_per_sample() -> None:
    collate = PaddingFreeCollator("qwen2_vl")
    short, long = image(3, (1, 2, 2)), image(4, (1, 2, 4))
    short["pixel_values"], long["pixel_values"] = long["pixel_values"], short["pixel_values"]
    with pytest.raises(InputError, match="sample 3: pixel_values has 8 patches, image_grid_thw describes 4"):
        collate([[short, long]])
    lone = image(5, (1, 2, 2))
    del lone["pixel_values"]
    with pytest.raises(InputError, match="sample 5 has image_grid_thw but no pixel_values"):
        collate([[lone]])
    mixed = image(6, (1, 2, 2))
    mixed["pixel_values"] = mixed["pixel_values"].double()
    with pytest.raises(InputError, match=r"sample 6: pixel_values is torch\.float64"):
        collate([[image(0, (1, 2, 2)), mixed]])


def test_media_without_mrope_positions_are_refused() -> None:
    member = image(7, (1, 2, 2))
    del member["position_ids"]
    for model in ("qwen2_vl", None):
        with pytest.raises(InputError, match="sample 7 has media but no t, h, w positions"):
            PaddingFreeCollator(model)([[member]])
    with pytest.raises(InputError, match="undeclared field 'pixel_values'"):
        PaddingFreeCollator("qwen3")([[{**image(7, (1, 2, 2)), "position_ids": [0, 1, 2]}]])


class VisionConfig:
    """What the collator reads of a vision-language config."""

    spatial_merge_size = 2
    model_type, _attn_implementation, layer_types = "qwen2_vl", "sdpa", None
    image_token_id, video_token_id = 9, 8

    @property
    def vision_config(self) -> VisionConfig:
        return self


def test_placeholders_equal_what_the_images_give_per_sample() -> None:
    """Counts that only agree over the whole row are still an error: an image would move to a neighbour."""
    collate = PaddingFreeCollator(VisionConfig())

    def member(sample_id: int, placeholders: int) -> dict[str, Any]:
        made = image(sample_id, (1, 2, 4))
        made["input_ids"] = [9] * placeholders + [1] * (4 - placeholders)
        return made

    assert "pixel_values" in collate([[member(0, 2)]])
    with pytest.raises(InputError, match="sample 1 has 3 placeholders for image_grid_thw, its media give 2"):
        collate([[member(1, 3), member(2, 1)]])
    with pytest.raises(InputError, match="sample 3 has 1 placeholders for image_grid_thw, its media give 0"):
        collate([[{**text(3), "input_ids": [1, 9]}]])
