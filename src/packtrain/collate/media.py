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

from ..errors import InputError, counted
from ..families import Family
from .boundaries import config_of, family_for
from .fields import Segment

#: Patch tensor -> the grid tensor ([media, 3]: t, h, w in patches) that describes its rows.
_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


def placeholders_of(model: Any) -> dict[str, tuple[int, int]]:
    """Media key -> (placeholder token id, number), as far as the model's config says; empty for text.

    The number by key: patches per placeholder for grids, placeholders per row for crops of a fixed size, 0
    where only the presence of both can be compared (crops on a grid, pooled videos) and for sound.
    """
    config, family = config_of(model), family_for(model)
    if config is None or family is None:
        return {}
    found = {}
    for kind, key, number in _rules(config, family):
        token = getattr(config, f"{kind}_token_id", None)
        if token is not None:
            found[key] = (int(token), number)
    return found


def _rules(config: Any, family: Family) -> list[tuple[str, str, int]]:
    """(kind of medium, key that counts it, number) of a family."""
    rules = []
    if family.image_rule == "pixels":
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
        if merge is not None:
            rules += [(kind, f"{kind}_grid_thw", int(merge) ** 2) for kind in ("image", "video")]
    elif family.image_rule == "tiles":
        rules.append(("image", "pixel_values", int(getattr(config, "image_seq_length", 0))))
    elif family.image_rule is not None:
        rules.append(("image", "pixel_values", 0))
    if family.video_rule == "pooled":
        rules.append(("video", "pixel_values_videos", 0))
    if family.audio_rule == "whisper":
        rules.append(("audio", "feature_attention_mask", 0))
    return rules


def _expected(key: str, media: torch.Tensor | None, number: int) -> int | None:
    """Placeholders that a sample's media take; None: some, how many only the processor knows."""
    if media is None:
        return 0
    if key in _GRIDS.values():
        return int((media.long().prod(-1) // number).sum())
    if key == "feature_attention_mask":  # two halvings of the mel frames of each clip
        halved = (media.long().sum(-1) - 1) // 2 + 1
        return int(((halved - 2) // 2 + 1).sum())
    return int(media.shape[0]) * number or None


def join_media(segments: list[Segment], rules: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Key -> joined tensor, for the keys that at least one sample has.

    Raises:
        InputError: a sample's patches and grids do not agree, or tensors of two samples do not join.
    """
    joined = {}
    fed = [segment for segment in segments if segment.media]
    for segment in fed:
        _check_grids(segment)
    for key in rules if fed else ():  # the one rule, cat0: rows of all samples, along the first axis
        owners = [segment for segment in fed if key in segment.media]
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
                f"{segment.where}: {key} has "
                f"{counted(patches.shape[0], 'patches')}, {grid_key} describes {expected}"
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
    for key, (token, number) in placeholders.items():
        counts = (ids == token).cumsum(0)[ends - 1].diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        for segment, found in zip(segments, counts, strict=True):
            expected = _expected(key, segment.media.get(key), number)
            if found != expected and (found == 0 or expected is not None):
                raise InputError(
                    f"{segment.where} has {found} placeholders for {key}, its media give "
                    f"{'some' if expected is None else expected}",
                    hint="encode samples with the processor that belongs to the model",
                )


def _tail(tensor: torch.Tensor) -> str:
    return ", ".join(str(size) for size in tensor.shape[1:]) or "-"
