"""Dummy media: a segment without weight for a row that would leave a tower of the model idle.

Where ranks exchange gradients or weights per module (DDP without unused-parameter search, FSDP, ZeRO-3), a
rank whose pack has no image never calls its vision tower, and the others wait for it. A dummy is the
smallest medium of the family in a segment of its own: labels -100, no sample id, so text logits, loss
and gradients of the samples stay what they are, and the tower's gradients are zeros instead of missing.

Made from the model's config where that says all (`dummy_media=True`). Crops on a grid (LLaVA-NeXT,
LLaVA-OneVision) are the processor's matter: there `dummy_media=packtrain.template.dummy_samples(template)`.
The dummy adds its tokens to the row (3 for Qwen-VL), so leave room under `pad_to_length`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..families import Family
from .boundaries import config_of
from .fields import IGNORE

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
