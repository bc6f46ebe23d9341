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
from ..template import ensure_torchvision

__all__ = ["TINY_MODELS", "is_tiny", "tiny_model"]

_PREFIX = "tiny:"
_HIDDEN, _HEADS, _HEAD_DIM, _LAYERS = 64, 4, 16, 2
_TOWER = 32

#: Vocabulary without a tokenizer, and the special ids at its end.
_VOCABULARY = 512
_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

#: Large enough for samples that read each other to differ visibly.
_RANGE = 0.08


def is_tiny(name: str) -> bool:
    """True for names such as `tiny:qwen3`."""
    return name.startswith(_PREFIX)


def tiny_model(name: str, tokenizer_or_processor: Any = None, seed: int = 0, *, attn: str = "sdpa") -> Any:
    """A small random model in float32, evaluation mode, `use_cache` off.

    Args:
        name: `tiny:qwen3`, `tiny:qwen2_vl`, `tiny:qwen2_5_vl` or `tiny:qwen3_vl`.
        tokenizer_or_processor: gives vocabulary size, special ids and patch sizes; None: 512 ids, the
            last four are vision start, vision end, image and video placeholder.
        seed: seed of the weights.
        attn: attention implementation.

    Raises:
        UnknownNameError: no such tiny model.
        ConfigError: the tokenizer lacks a special token the family needs.
    """
    key = name.removeprefix(_PREFIX)
    if key not in TINY_MODELS:
        raise UnknownNameError("tiny model", name, [_PREFIX + known for known in TINY_MODELS])
    ensure_torchvision()
    import transformers

    class_name, build = TINY_MODELS[key]
    config = build(transformers, _Vocabulary(tokenizer_or_processor, name))
    config._attn_implementation = attn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, class_name)(config)
    model.config.use_cache = False
    model.config.get_text_config().use_cache = False
    return model.float().eval()


class _Vocabulary:
    """Sizes and ids a config needs, from a processor, a tokenizer, or the defaults."""

    def __init__(self, source: Any, name: str) -> None:
        self.name = name
        self.tokenizer = getattr(source, "tokenizer", source)
        images = getattr(source, "image_processor", None)
        self.patch_size = None if images is None else int(images.patch_size)
        self.merge_size = 2 if images is None else int(images.merge_size)
        self.temporal = 2 if images is None else int(images.temporal_patch_size)

    @property
    def size(self) -> int:
        if self.tokenizer is None:
            return _VOCABULARY
        return int(max(len(self.tokenizer) - 1, *self.tokenizer.get_vocab().values())) + 1

    def id_of(self, token: str) -> int:
        if self.tokenizer is None:
            return _VOCABULARY - len(_SPECIAL) + _SPECIAL.index(token)
        found = self.tokenizer.get_vocab().get(token)
        if found is None:
            raise ConfigError(
                f"the tokenizer has no {token} token, which {self.name} needs",
                hint="use a processor of that family as template.processor",
            )
        return int(found)

    def vision_ids(self) -> dict[str, int]:
        start, end, image, video = (self.id_of(token) for token in _SPECIAL)
        return {
            "vision_start_token_id": start,
            "vision_end_token_id": end,
            "image_token_id": image,
            "video_token_id": video,
        }


def _text(vocabulary: _Vocabulary, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary.size,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
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


def _rope(**more: Any) -> dict[str, Any]:
    sections = [2, 3, 3]  # t, h, w; they sum to half a head
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, **more}


def _tower(vocabulary: _Vocabulary, patch_size: int, **more: Any) -> dict[str, Any]:
    return {
        "depth": _LAYERS,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": vocabulary.patch_size or patch_size,
        "spatial_merge_size": vocabulary.merge_size,
        "temporal_patch_size": vocabulary.temporal,
        "initializer_range": _RANGE,
        **more,
    }


def _qwen3(transformers: Any, vocabulary: _Vocabulary) -> Any:
    return transformers.Qwen3Config(**_text(vocabulary))


def _qwen2_vl(transformers: Any, vocabulary: _Vocabulary) -> Any:
    return transformers.Qwen2VLConfig(
        text_config=_text(vocabulary, rope_parameters=_rope()),
        vision_config=_tower(vocabulary, 14, embed_dim=_TOWER, hidden_size=_HIDDEN, mlp_ratio=2),
        tie_word_embeddings=False,
        **vocabulary.vision_ids(),
    )


def _qwen2_5_vl(transformers: Any, vocabulary: _Vocabulary) -> Any:
    patch = vocabulary.patch_size or 14
    tower = _tower(
        vocabulary,
        14,
        hidden_size=_TOWER,
        out_hidden_size=_HIDDEN,
        intermediate_size=2 * _TOWER,
        window_size=4 * vocabulary.merge_size * patch,
        fullatt_block_indexes=[_LAYERS - 1],
    )
    return transformers.Qwen2_5_VLConfig(
        text_config=_text(vocabulary, rope_parameters=_rope()),
        vision_config=tower,
        tie_word_embeddings=False,
        **vocabulary.vision_ids(),
    )


def _qwen3_vl(transformers: Any, vocabulary: _Vocabulary) -> Any:
    tower = _tower(
        vocabulary,
        16,
        hidden_size=_TOWER,
        out_hidden_size=_HIDDEN,
        intermediate_size=2 * _TOWER,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    )
    return transformers.Qwen3VLConfig(
        text_config=_text(vocabulary, rope_parameters=_rope(mrope_interleaved=True)),
        vision_config=tower,
        tie_word_embeddings=False,
        **vocabulary.vision_ids(),
    )


#: Name -> (transformers class, config builder).
TINY_MODELS: dict[str, tuple[str, Callable[[Any, _Vocabulary], Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", _qwen2_vl),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", _qwen3_vl),
}
