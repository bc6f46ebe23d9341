"""Media tensors of a row: joined by the family's rules, in placeholder order; and dummies for idle towers.

Placeholder order is sample order, since every sample keeps its media in the order of its own
placeholders. A key without any rows in the row is absent from the batch, so image-less packs need no
special case downstream. Tensors that would not join cleanly (another type or trailing shape) are an
error naming the sample, never a silent promotion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError, counted
from ..families import Family
from .fields import IGNORE, Segment
from .model_traits import config_of, family_for

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
    rules: list[tuple[str, str, int]] = []  # kind of medium, key that counts it, number
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
    tokens: dict[str, Any] = {kind: getattr(config, f"{kind}_token_id", None) for kind, _, _ in rules}
    return {key: (int(tokens[kind]), number) for kind, key, number in rules if tokens[kind] is not None}


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
        expected, held = int(grid.long().prod(-1).sum()), 0 if patches is None else patches.shape[0]
        if held != expected or patches is None:
            told = f"{segment.where}: {key} has {counted(held, 'patches')}, {grid_key} describes {expected}"
            if patches is None:
                told = f"{segment.where} has {grid_key} but no {key}"
            raise InputError(told, hint="media and their grids travel together")


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


# --------------------------------------------------------------------------------------------
# Dummy media: a segment without weight for a row that would leave a tower of the model idle.
# --------------------------------------------------------------------------------------------
# Where ranks exchange gradients or weights per module (DDP without unused-parameter search, FSDP, ZeRO-3), a
# rank whose pack has no image never calls its vision tower, and the others wait for it. A dummy is the
# smallest medium of the family in a segment of its own: labels -100, no sample id, so text logits, loss
# and gradients of the samples stay what they are, and the tower's gradients are zeros instead of missing.
#
# Made from the model's config where that says all (`dummy_media=True`). Crops on a grid (LLaVA-NeXT,
# LLaVA-OneVision) are the processor's matter: there `dummy_media=packtrain.template.dummy_samples(template)`.
# The dummy adds its tokens to the row (3 for Qwen-VL), so leave room under `pad_to_length`.
#: (media keys of a tower, the sample that makes it run)
Dummies = list[tuple[frozenset[str], dict[str, Any]]]

#: The fewest mel frames that give two tokens. Qwen2-Audio takes a row without two neighbouring audio tokens
#: for one that its processor has not expanded, and then expands it itself.
_MEL_FRAMES, _SOUND_TOKENS = 8, 2


def dummies_of(
    wanted: bool | Mapping[str, Any] | Sequence[Mapping[str, Any]], model: Any, family: Family | None
) -> Dummies:
    """One dummy per tower of the family; none when not wanted.

    Raises:
        InputError: the family has no media, or its dummy can't be made from the config.
    """
    if wanted is False or wanted is None:
        return []
    if family is None or not family.towers:
        name = "an unknown family" if family is None else f"family {family.name}"
        raise InputError(
            f"dummy_media for {name}, which has no media", hint="pass a multimodal model, or leave it off"
        )
    if wanted is True:
        config = config_of(model)
        if config is None:
            raise InputError("dummy_media=True without a model", hint="pass the model or its config")
        made = [_weightless(_BUILD[name](config, family), family) for name in family.towers]
    else:
        made = [_weightless(one, family) for one in ([wanted] if isinstance(wanted, Mapping) else wanted)]
    towers = {name: frozenset(keys) for name, keys in family.towers.items()}
    found = [next((keys for keys in towers.values() if keys & set(sample)), None) for sample in made]
    if None in found:
        raise InputError(
            "a dummy_media sample has no media", hint="give encoded samples with one medium each"
        )
    return [(keys, sample) for keys, sample in zip(found, made, strict=True) if keys is not None]


def _weightless(sample: Mapping[str, Any], family: Family) -> dict[str, Any]:
    kept = {key: sample[key] for key in ("input_ids", "position_ids") if sample.get(key) is not None}
    media = {key: sample[key] for key in family.media_keys if sample.get(key) is not None}
    return {**kept, **media, "labels": [IGNORE] * len(sample["input_ids"]), "stand_in": True}


def _vision(config: Any, family: Family) -> dict[str, Any]:
    tower, rule = config.vision_config, family.image_rule
    if rule == "pixels":
        merge = int(tower.spatial_merge_size)
        channels = int(getattr(tower, "in_channels", 3))
        width = channels * int(tower.temporal_patch_size) * int(tower.patch_size) ** 2
        media: dict[str, Any] = {
            "pixel_values": torch.zeros(merge**2, width),
            "image_grid_thw": torch.tensor([[1, merge, merge]]),
        }
        count = 1
    elif rule in ("square", "tiles"):
        size: Any = tower.image_size
        high, wide = (size, size) if isinstance(size, int) else tuple(size)
        media = {"pixel_values": torch.zeros(1, 3, int(high), int(wide))}
        count = int(config.image_seq_length)
        if rule == "square":
            whole = config.vision_feature_select_strategy != "default"
            count = (int(high) // int(tower.patch_size)) ** 2 + whole
    else:
        raise InputError(
            f"the dummy image of {family.name} depends on its processor",
            hint="dummy_media=packtrain.template.dummy_samples(template)",
        )
    ids = [_token(config, "image")] * count
    marks: list[Any] = [getattr(config, f"vision_{name}_token_id", None) for name in ("start", "end")]
    if None not in marks:
        ids = [int(marks[0]), *ids, int(marks[1])]
    return {"input_ids": ids, **_positions(len(ids), family), **media}


def _audio(config: Any, family: Family) -> dict[str, Any]:
    tower = config.audio_config
    fixed = family.position_rows == 1  # Qwen2-Audio takes clips of one width only
    width = 2 * int(tower.max_source_positions) if fixed else _MEL_FRAMES
    mask = torch.zeros(1, width, dtype=torch.int32)
    mask[:, :_MEL_FRAMES] = 1
    return {
        "input_ids": [_token(config, "audio")] * _SOUND_TOKENS,
        **_positions(_SOUND_TOKENS, family),
        "input_features": torch.zeros(1, int(tower.num_mel_bins), width),
        "feature_attention_mask": mask,
    }


_BUILD = {"vision": _vision, "audio": _audio}


def _token(config: Any, kind: str) -> int:
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        found = getattr(config, name, None)
        if found is not None:
            return int(found)
    raise InputError(f"the config of {config.model_type} names no {kind} token")


def _positions(length: int, family: Family) -> dict[str, Any]:
    """Sound and an image of one token count like text on every row."""
    return {"position_ids": torch.arange(length).expand(family.position_rows, -1)}
