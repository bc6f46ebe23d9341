"""Configs of tiny models beyond Qwen-VL: crops, tiles and sound, each with its real tower class."""

from __future__ import annotations

from typing import Any

from ..families import family_of
from .tiny_parts import HIDDEN, LAYERS, TOWER, Vocabulary, rope, text_layers, vision_tower

__all__ = ["internvl", "llava_1_5", "llava_next", "llava_onevision", "qwen2_5_omni", "qwen2_audio"]

_PATCH = 14


def _id(vocabulary: Vocabulary, family: str, kind: str) -> int:
    return vocabulary.id_of(getattr(family_of(name=family), f"{kind}_token"), kind)


def _crops(side: int) -> dict[str, Any]:
    return {
        "hidden_size": TOWER,
        "intermediate_size": 2 * TOWER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "image_size": side,
        "patch_size": _PATCH,
    }


def _sound(vocabulary: Vocabulary, longest: int) -> dict[str, Any]:
    bins, frames = vocabulary.mel(longest)
    return {
        "d_model": TOWER,
        "encoder_layers": LAYERS,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * TOWER,
        "num_mel_bins": bins,
        "max_source_positions": frames // 2,
    }


def llava_onevision(transformers: Any, vocabulary: Vocabulary) -> Any:
    """SigLIP tower, crops on the processor's grids."""
    side = vocabulary.side(56)
    images = getattr(vocabulary.source, "image_processor", None)
    grids = getattr(images, "image_grid_pinpoints", [[side, side], [side, 2 * side], [2 * side, side]])
    return transformers.LlavaOnevisionConfig(
        text_config=text_layers(vocabulary, model_type="qwen2"),
        vision_config={**_crops(side), "model_type": "siglip_vision_model", "vision_use_head": False},
        image_grid_pinpoints=[list(grid) for grid in grids],
        image_token_index=_id(vocabulary, "llava_onevision", "image"),
        video_token_index=_id(vocabulary, "llava_onevision", "video"),
    )


def llava_1_5(transformers: Any, vocabulary: Vocabulary) -> Any:
    """CLIP tower, one square an image."""
    side = vocabulary.side(56, "crop_size")
    return transformers.LlavaConfig(
        text_config=text_layers(vocabulary, model_type="qwen2"),
        vision_config={**_crops(side), "model_type": "clip_vision_model", "projection_dim": TOWER},
        image_token_index=_id(vocabulary, "llava_1_5", "image"),
        image_seq_length=(side // _PATCH) ** 2,
        vision_feature_layer=-1,
    )


def llava_next(transformers: Any, vocabulary: Vocabulary) -> Any:
    """CLIP tower, crops on the processor's grids."""
    side = vocabulary.side(56, "crop_size")
    images = getattr(vocabulary.source, "image_processor", None)
    grids = getattr(images, "image_grid_pinpoints", [[side, 2 * side], [2 * side, side]])
    return transformers.LlavaNextConfig(
        text_config=text_layers(vocabulary, model_type="qwen2"),
        vision_config={**_crops(side), "model_type": "clip_vision_model", "projection_dim": TOWER},
        image_token_index=_id(vocabulary, "llava_next", "image"),
        image_grid_pinpoints=[list(grid) for grid in grids],
        image_seq_length=(side // _PATCH) ** 2,
        vision_feature_layer=-1,
    )


def internvl(transformers: Any, vocabulary: Vocabulary) -> Any:
    """InternViT tower, tiles halved on each side."""
    side = vocabulary.side(56)
    tower = {**_crops(side), "image_size": [side, side], "patch_size": [_PATCH, _PATCH]}
    return transformers.InternVLConfig(
        text_config=text_layers(vocabulary, model_type="qwen2"),
        vision_config=tower,
        image_token_id=_id(vocabulary, "internvl3", "image"),
        image_seq_length=(side // _PATCH // 2) ** 2,
    )


def qwen2_audio(transformers: Any, vocabulary: Vocabulary) -> Any:
    """Whisper-like encoder over clips of one width."""
    return transformers.Qwen2AudioConfig(
        text_config=text_layers(vocabulary, model_type="qwen2"),
        audio_config={**_sound(vocabulary, 3000), "model_type": "qwen2_audio_encoder"},
        audio_token_index=_id(vocabulary, "qwen2_audio", "audio"),
    )


def qwen2_5_omni(transformers: Any, vocabulary: Vocabulary) -> Any:
    """The thinker: both towers before mRoPE text layers."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    patch = vocabulary.patch_size or _PATCH
    tower = vision_tower(
        vocabulary,
        _PATCH,
        hidden_size=TOWER,
        out_hidden_size=HIDDEN,
        intermediate_size=2 * TOWER,
        window_size=4 * vocabulary.merge_size * patch,
        fullatt_block_indexes=[LAYERS - 1],
    )
    return Qwen2_5OmniThinkerConfig(
        text_config=text_layers(vocabulary, rope_parameters=rope()),
        vision_config=tower,
        audio_config={**_sound(vocabulary, 30000), "output_dim": HIDDEN},
        image_token_index=_id(vocabulary, "qwen2_5_omni", "image"),
        video_token_index=_id(vocabulary, "qwen2_5_omni", "video"),
        audio_token_index=_id(vocabulary, "qwen2_5_omni", "audio"),
        tie_word_embeddings=False,
    )
