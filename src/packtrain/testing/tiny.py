"""tiny:… models: small random networks of the real transformers classes.

They have every part of the real model (rotary positions, mRoPE, window attention in the tower, deep
stacked visual features), two layers of it, and the vocabulary and special ids of the tokenizer they
are built for. Made for proofs, tests and the demo: the code paths are real, the weights are not.

Weights depend on (name, sizes, seed) alone: float32, drawn from a generator state of their own, so
the caller's random state does not move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ConfigError, UnknownNameError
from ..families import family_of
from ..template import ensure_torchvision

# --------------------------------------------------------------------------------------------
# Parts that configs of tiny models share: vocabulary and special ids, text layers, a vision tower
# --------------------------------------------------------------------------------------------
HIDDEN, _HEADS, _HEAD_DIM, LAYERS = 64, 4, 16, 2
TOWER, _PATCH = 32, 14

#: Vocabulary without a tokenizer, and the special ids at its end.
_VOCABULARY = 512
_SPECIAL = ("audio", "<|vision_start|>", "<|vision_end|>", "image", "video")
_SAME = {"<|image_pad|>": "image", "<|video_pad|>": "video"}

#: Large enough for samples that read each other to differ visibly.
_RANGE = 0.08


class Vocabulary:
    """Sizes and ids a config needs, from a processor, a tokenizer, or the defaults."""

    def __init__(self, source: Any, name: str) -> None:
        self.name, self.source = name, source
        self.tokenizer = getattr(source, "tokenizer", source)
        self.images = getattr(source, "image_processor", None)
        self.patch_size = getattr(self.images, "patch_size", None)
        self.merge_size = int(getattr(self.images, "merge_size", 2))
        self.temporal = int(getattr(self.images, "temporal_patch_size", 2))

    @property
    def size(self) -> int:
        if self.tokenizer is None:
            return _VOCABULARY
        return int(max(len(self.tokenizer) - 1, *self.tokenizer.get_vocab().values())) + 1

    def id_of(self, token: str, kind: str | None = None) -> int:
        """Id of a special token; `kind` ("image", "video", "audio") is what it stands for."""
        if self.tokenizer is None:
            return _VOCABULARY - len(_SPECIAL) + _SPECIAL.index(kind or _SAME.get(token, token))
        found = self.tokenizer.get_vocab().get(token)
        if found is None:
            raise ConfigError(
                f"the tokenizer has no {token} token, which {self.name} needs",
                hint="use a processor of that family as template.processor",
            )
        return int(found)

    def vision_ids(self) -> dict[str, int]:
        return {
            "vision_start_token_id": self.id_of("<|vision_start|>"),
            "vision_end_token_id": self.id_of("<|vision_end|>"),
            "image_token_id": self.id_of("<|image_pad|>"),
            "video_token_id": self.id_of("<|video_pad|>"),
        }

    def side(self, default: int, name: str = "size") -> int:
        """Side in pixels of a crop or tile; `name` is the image processor's setting."""
        size = getattr(self.images, name, None)
        return default if size is None else int(size["height"])

    def grids(self, side: int, *default: tuple[int, int]) -> list[list[int]]:
        """Sizes in pixels that crops of an image fill; `default` counts crops of `side`."""
        own = [(side * high, side * wide) for high, wide in default]
        return [list(grid) for grid in getattr(self.images, "image_grid_pinpoints", own)]

    def mel(self, default: int) -> tuple[int, int]:
        """Mel bins and the most frames of a clip."""
        sound = getattr(self.source, "feature_extractor", None)
        if sound is None:
            return 128, default
        return int(sound.feature_size), int(sound.nb_max_frames)


def _text_layers(vocabulary: Vocabulary, **more: Any) -> dict[str, Any]:
    """Two decoder layers over the vocabulary."""
    import transformers

    if transformers.__version__.startswith("4.") and "rope_parameters" in more:  # as configs said it then
        kept = {key: value for key, value in more.pop("rope_parameters").items() if key != "rope_theta"}
        more = {**more, "rope_scaling": kept, "rope_theta": 1e6}
    return {
        "vocab_size": vocabulary.size,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS // 2,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 1 << 17,
        "initializer_range": _RANGE,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "tie_word_embeddings": False,
        "use_cache": False,
        **more,
    }


def rope(**more: Any) -> dict[str, Any]:
    """Rotary settings with mRoPE sections."""
    sections = [2, 3, 3]  # t, h, w; they sum to half a head
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, **more}


def _vision_tower(vocabulary: Vocabulary, patch_size: int, **more: Any) -> dict[str, Any]:
    """The tower of a Qwen-VL model."""
    return {
        "depth": LAYERS,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": vocabulary.patch_size or patch_size,
        "spatial_merge_size": vocabulary.merge_size,
        "temporal_patch_size": vocabulary.temporal,
        "initializer_range": _RANGE,
        **more,
    }


def _merging_tower(vocabulary: Vocabulary, patch_size: int, **more: Any) -> dict[str, Any]:
    """The tower of a Qwen-VL model from 2.5 on, which merges patches to the width of the text."""
    sizes = {"hidden_size": TOWER, "out_hidden_size": HIDDEN, "intermediate_size": 2 * TOWER}
    return _vision_tower(vocabulary, patch_size, **sizes, **more)


def _windowed_tower(vocabulary: Vocabulary) -> dict[str, Any]:
    """Window attention in all of its layers but the last."""
    window = 4 * vocabulary.merge_size * (vocabulary.patch_size or _PATCH)
    return _merging_tower(vocabulary, _PATCH, window_size=window, fullatt_block_indexes=[LAYERS - 1])


# --------------------------------------------------------------------------------------------
# Configs of tiny models beyond Qwen-VL: crops, tiles and sound, each with its real tower class
# --------------------------------------------------------------------------------------------
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
    return transformers.LlavaOnevisionConfig(
        text_config=_text_layers(vocabulary, model_type="qwen2"),
        vision_config={**_crops(side), "model_type": "siglip_vision_model", "vision_use_head": False},
        image_grid_pinpoints=vocabulary.grids(side, (1, 1), (1, 2), (2, 1)),
        image_token_index=_id(vocabulary, "llava_onevision", "image"),
        video_token_index=_id(vocabulary, "llava_onevision", "video"),
    )


def _with_clip(kind: Any, vocabulary: Vocabulary, family: str, side: int, **more: Any) -> Any:
    """CLIP tower over squares of `side` pixels."""
    return kind(
        text_config=_text_layers(vocabulary, model_type="qwen2"),
        vision_config={**_crops(side), "model_type": "clip_vision_model", "projection_dim": TOWER},
        image_token_index=_id(vocabulary, family, "image"),
        image_seq_length=(side // _PATCH) ** 2,
        vision_feature_layer=-1,
        **more,
    )


def llava_1_5(transformers: Any, vocabulary: Vocabulary) -> Any:
    """One square an image."""
    return _with_clip(transformers.LlavaConfig, vocabulary, "llava_1_5", vocabulary.side(56, "crop_size"))


def llava_next(transformers: Any, vocabulary: Vocabulary) -> Any:
    """Crops on the processor's grids."""
    side = vocabulary.side(56, "crop_size")
    grids = vocabulary.grids(side, (1, 2), (2, 1))
    kind = transformers.LlavaNextConfig
    return _with_clip(kind, vocabulary, "llava_next", side, image_grid_pinpoints=grids)


def internvl(transformers: Any, vocabulary: Vocabulary) -> Any:
    """InternViT tower, tiles halved on each side."""
    side = vocabulary.side(56)
    return transformers.InternVLConfig(
        text_config=_text_layers(vocabulary, model_type="qwen2"),
        vision_config={**_crops(side), "image_size": [side, side], "patch_size": [_PATCH, _PATCH]},
        image_token_id=_id(vocabulary, "internvl3", "image"),
        image_seq_length=(side // _PATCH // 2) ** 2,
    )


def qwen2_audio(transformers: Any, vocabulary: Vocabulary) -> Any:
    """Whisper-like encoder over clips of one width."""
    return transformers.Qwen2AudioConfig(
        text_config=_text_layers(vocabulary, model_type="qwen2"),
        audio_config={**_sound(vocabulary, 3000), "model_type": "qwen2_audio_encoder"},
        audio_token_index=_id(vocabulary, "qwen2_audio", "audio"),
    )


def qwen2_5_omni(transformers: Any, vocabulary: Vocabulary) -> Any:
    """The thinker: both towers before mRoPE text layers."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    return Qwen2_5OmniThinkerConfig(
        text_config=_text_layers(vocabulary, rope_parameters=rope()),
        vision_config=_windowed_tower(vocabulary),
        audio_config={**_sound(vocabulary, 30000), "output_dim": HIDDEN},
        image_token_index=_id(vocabulary, "qwen2_5_omni", "image"),
        video_token_index=_id(vocabulary, "qwen2_5_omni", "video"),
        audio_token_index=_id(vocabulary, "qwen2_5_omni", "audio"),
        tie_word_embeddings=False,
    )


# --------------------------------------------------------------------------------------------
# tiny:… models: small random networks of the real transformers classes
# --------------------------------------------------------------------------------------------
_PREFIX = "tiny:"


def is_tiny(name: str) -> bool:
    """True for names such as `tiny:qwen3`."""
    return name.startswith(_PREFIX)


def tiny_model(name: str, tokenizer_or_processor: Any = None, seed: int = 0, *, attn: str = "sdpa") -> Any:
    """A small random model in float32, evaluation mode, `use_cache` off.

    Args:
        name: one of `TINY_MODELS` behind `tiny:`, such as `tiny:qwen3` or `tiny:qwen2_audio`.
        tokenizer_or_processor: gives vocabulary size, special ids and sizes of media; None: 512 ids, the
            last five are audio placeholder, vision start, vision end, image and video placeholder.
        seed: seed of the weights.
        attn: attention implementation.

    Raises:
        UnknownNameError: no such tiny model.
        ConfigError: the tokenizer lacks a special token the family needs.
    """
    config = tiny_config(name, tokenizer_or_processor)
    import transformers

    class_name = TINY_MODELS[name.removeprefix(_PREFIX)][0]
    config._attn_implementation = attn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, class_name)(config)
    model.config.use_cache = False
    model.config.get_text_config().use_cache = False
    return model.float().eval()


def tiny_config(name: str, tokenizer_or_processor: Any = None) -> Any:
    """The config of a tiny model; arguments and errors as `tiny_model`."""
    key = name.removeprefix(_PREFIX)
    if key not in TINY_MODELS:
        raise UnknownNameError("tiny model", name, [_PREFIX + known for known in TINY_MODELS])
    ensure_torchvision()
    import transformers

    return TINY_MODELS[key][1](transformers, Vocabulary(tokenizer_or_processor, name))


def _qwen3(transformers: Any, vocabulary: Vocabulary) -> Any:
    return transformers.Qwen3Config(**_text_layers(vocabulary))


def _mistral(transformers: Any, vocabulary: Vocabulary) -> Any:
    return transformers.MistralConfig(**_text_layers(vocabulary, sliding_window=4))


def _gemma3(transformers: Any, vocabulary: Vocabulary) -> Any:
    kinds = ["sliding_attention", "full_attention"]
    return transformers.Gemma3TextConfig(**_text_layers(vocabulary, sliding_window=4, layer_types=kinds))


def _qwen_vl(kind: Any, vocabulary: Vocabulary, tower: dict[str, Any], **positions: Any) -> Any:
    return kind(
        text_config=_text_layers(vocabulary, rope_parameters=rope(**positions)),
        vision_config=tower,
        tie_word_embeddings=False,
        **vocabulary.vision_ids(),
    )


def _qwen2_vl(transformers: Any, vocabulary: Vocabulary) -> Any:
    tower = _vision_tower(vocabulary, _PATCH, embed_dim=TOWER, hidden_size=HIDDEN, mlp_ratio=2)
    return _qwen_vl(transformers.Qwen2VLConfig, vocabulary, tower)


def _qwen2_5_vl(transformers: Any, vocabulary: Vocabulary) -> Any:
    return _qwen_vl(transformers.Qwen2_5_VLConfig, vocabulary, _windowed_tower(vocabulary))


def _qwen3_vl(transformers: Any, vocabulary: Vocabulary) -> Any:
    tower = _merging_tower(vocabulary, 16, num_position_embeddings=64, deepstack_visual_indexes=[0])
    return _qwen_vl(transformers.Qwen3VLConfig, vocabulary, tower, mrope_interleaved=True)


#: Name -> (transformers class, config builder).
TINY_MODELS: dict[str, tuple[str, Callable[[Any, Vocabulary], Any]]] = {
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "internvl3": ("InternVLForConditionalGeneration", internvl),
    "llava_1_5": ("LlavaForConditionalGeneration", llava_1_5),
    "llava_next": ("LlavaNextForConditionalGeneration", llava_next),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", llava_onevision),
    "mistral": ("MistralForCausalLM", _mistral),
    "qwen2_5_omni": ("Qwen2_5OmniThinkerForConditionalGeneration", qwen2_5_omni),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", qwen2_audio),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", _qwen2_vl),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", _qwen3_vl),
}
