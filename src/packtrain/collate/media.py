"""Media tensors of a row: joined by the family's rules, in placeholder order.

Placeholder order is sample order, since every sample keeps its media in the order of its own
placeholders. A key without any rows in the row is absent from the batch, so image-less packs need no
special case downstream. Tensors that would not join cleanly (another type or trailing shape) are an
error naming the sample, never a silent promotion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InputError
from .boundaries import config_of
from .fields import Segment

__all__ = ["check_placeholders", "join_media", "placeholders_of"]

#: Patch tensor -> the grid tensor ([media, 3]: t, h, w in patches) that describes its rows.
_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


#: Grid tensor -> the config's id of its placeholder token.
_PLACEHOLDERS = {"image_grid_thw": "image_token_id", "video_grid_thw": "video_token_id"}


def placeholders_of(model: Any) -> dict[str, tuple[int, int]]:
    """Grid key -> (placeholder token id, patches per placeholder), as far as the model's config says."""
    config = config_of(model)
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    if merge is None:
        return {}
    ids = {key: getattr(config, name, None) for key, name in _PLACEHOLDERS.items()}
    return {key: (int(token), int(merge) ** 2) for key, token in ids.items() if token is not None}


def join_media(segments: list[Segment], rules: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Key -> joined tensor, for the keys that at least one sample has.

    Raises:
        InputError: a sample's patches and grids do not agree, or tensors of two samples do not join.
    """
    joined = {}
    for segment in segments:
        if segment.media:
            _check_grids(segment)
    for key in rules:  # the one rule, cat0: rows of all samples, along the first axis
        owners = [segment for segment in segments if key in segment.media]
        if owners:
            _check_alike(key, owners)
            joined[key] = torch.cat([segment.media[key] for segment in owners])
    return joined


def _check_alike(key: str, owners: list[Segment]) -> None:
    first = owners[0].media[key]
    for segment in owners[1:]:
        other = segment.media[key]
        if other.dtype is not first.dtype or other.shape[1:] != first.shape[1:]:
            raise InputError(
                f"{segment.where}: {key} is {other.dtype} [rows, {_tail(other)}], "
                f"{owners[0].where} in the same row has {first.dtype} [rows, {_tail(first)}]",
                hint="all samples of a run go through the same processor",
            )


def _check_grids(segment: Segment) -> None:
    """Grids come with their patches, exactly as many as they describe. (Other families have no grids.)"""
    for key, grid_key in _GRIDS.items():
        patches, grid = segment.media.get(key), segment.media.get(grid_key)
        if grid is None:
            continue
        if patches is None:
            raise InputError(
                f"{segment.where} has {grid_key} but no {key}", hint="media and their grids travel together"
            )
        expected = int(grid.long().prod(-1).sum())
        if patches.shape[0] != expected:
            raise InputError(
                f"{segment.where}: {key} has {patches.shape[0]} patches, {grid_key} describes {expected}"
            )


def check_placeholders(
    segments: list[Segment], ids: torch.Tensor, placeholders: Mapping[str, tuple[int, int]]
) -> None:
    """Placeholder tokens of every sample equal what its media give, so no image slides to a neighbour.

    Args:
        ids: int64 [T], the row.
        placeholders: see `placeholders_of`.
    """
    if not placeholders:
        return
    ends = torch.tensor([segment.length for segment in segments]).cumsum(0)
    for key, (token, patches) in placeholders.items():
        counts = (ids == token).cumsum(0)[ends - 1].diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        for segment, found in zip(segments, counts, strict=True):
            grid = segment.media.get(key)
            expected = 0 if grid is None else int((grid.long().prod(-1) // patches).sum())
            if found != expected:
                raise InputError(
                    f"{segment.where} has {found} placeholders for {key}, its media give {expected}",
                    hint="encode samples with the processor that belongs to the model",
                )


def _tail(tensor: torch.Tensor) -> str:
    return ", ".join(str(size) for size in tensor.shape[1:]) or "-"
