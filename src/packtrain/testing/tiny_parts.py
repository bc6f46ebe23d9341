"""Parts that configs of tiny models share: vocabulary and special ids, text layers, a vision tower."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError

__all__ = ["HIDDEN", "LAYERS", "TOWER", "Vocabulary", "rope", "text_layers", "vision_tower"]

HIDDEN, _HEADS, _HEAD_DIM, LAYERS = 64, 4, 16, 2
TOWER = 32

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
        images = getattr(source, "image_processor", None)
        self.patch_size = getattr(images, "patch_size", None)
        self.merge_size = int(getattr(images, "merge_size", 2))
        self.temporal = int(getattr(images, "temporal_patch_size", 2))

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
        size = getattr(getattr(self.source, "image_processor", None), name, None)
        return default if size is None else int(size["height"])

    def mel(self, default: int) -> tuple[int, int]:
        """Mel bins and the most frames of a clip."""
        sound = getattr(self.source, "feature_extractor", None)
        if sound is None:
            return 128, default
        return int(sound.feature_size), int(sound.nb_max_frames)


def text_layers(vocabulary: Vocabulary, **more: Any) -> dict[str, Any]:
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
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "use_cache": False,
        **more,
    }


def rope(**more: Any) -> dict[str, Any]:
    """Rotary settings with mRoPE sections."""
    sections = [2, 3, 3]  # t, h, w; they sum to half a head
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, **more}


def vision_tower(vocabulary: Vocabulary, patch_size: int, **more: Any) -> dict[str, Any]:
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
