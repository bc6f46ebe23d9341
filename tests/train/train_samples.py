"""Encoded samples with images for tiny models, made without processors."""

from __future__ import annotations

from typing import Any

import torch

VISION = ("tiny:qwen2_vl", "tiny:qwen2_5_vl", "tiny:qwen3_vl")
ALL = ("tiny:qwen3", *VISION)


def text_sample(length: int, sample_id: int, rows: int = 1, supervised: int | None = None) -> dict[str, Any]:
    """Random text; the last `supervised` tokens are trained (default: all)."""
    generator = torch.Generator().manual_seed(sample_id)
    ids = torch.randint(1, 500, (length,), generator=generator)
    labels = ids.clone()
    labels[: length - (length if supervised is None else supervised)] = -100
    positions = torch.arange(length)
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions if rows == 1 else positions.expand(rows, -1),
        "sample_id": sample_id,
    }


def image_sample(
    model: Any, sample_id: int, grids: tuple[tuple[int, int, int], ...] = ((1, 4, 6),), text: int = 5
) -> dict[str, Any]:
    """Text, then per image: vision start, placeholders, vision end; then text that is trained."""
    config, tower = model.config, model.config.vision_config
    generator = torch.Generator().manual_seed(1000 + sample_id)
    merge = tower.spatial_merge_size
    ids: list[int] = torch.randint(1, 500, (text,), generator=generator).tolist()
    types = [0] * text
    for t, h, w in grids:
        count = t * h * w // merge**2
        ids += [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]
        types += [0, *[1] * count, 0]
    ids += torch.randint(1, 500, (text,), generator=generator).tolist()
    types += [0] * text
    input_ids, grid = torch.tensor(ids), torch.tensor(grids)
    positions, _ = model.model.get_rope_index(
        input_ids[None], mm_token_type_ids=torch.tensor(types)[None], image_grid_thw=grid
    )
    labels = torch.full_like(input_ids, -100)
    labels[-text:] = input_ids[-text:]
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    patches = int(grid.prod(-1).sum())
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": positions[:, 0],
        "sample_id": sample_id,
        "pixel_values": torch.randn(patches, width, generator=generator),
        "image_grid_thw": grid,
    }


def samples_for(name: str, model: Any) -> list[dict[str, Any]]:
    """Text of several lengths, and for vision models one, two and no images."""
    if name not in VISION:
        return [text_sample(n, i) for i, n in enumerate((7, 4, 12, 2))]
    return [
        text_sample(6, 0, rows=3),
        image_sample(model, 1),
        image_sample(model, 2, ((1, 4, 4), (1, 6, 4)), text=3),
        text_sample(9, 3, rows=3),
    ]
