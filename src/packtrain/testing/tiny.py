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

from ..errors import UnknownNameError
from ..template import ensure_torchvision
from .tiny_media import internvl, llava_1_5, llava_next, llava_onevision, qwen2_5_omni, qwen2_audio
from .tiny_parts import HIDDEN, LAYERS, TOWER, Vocabulary, rope, text_layers, vision_tower

__all__ = ["TINY_MODELS", "is_tiny", "tiny_config", "tiny_model"]

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
    return transformers.Qwen3Config(**text_layers(vocabulary))


def _mistral(transformers: Any, vocabulary: Vocabulary) -> Any:
    return transformers.MistralConfig(**text_layers(vocabulary, sliding_window=4))


def _gemma3(transformers: Any, vocabulary: Vocabulary) -> Any:
    kinds = ["sliding_attention", "full_attention"]
    return transformers.Gemma3TextConfig(**text_layers(vocabulary, sliding_window=4, layer_types=kinds))


def _qwen2_vl(transformers: Any, vocabulary: Vocabulary) -> Any:
    return transformers.Qwen2VLConfig(
        text_config=text_layers(vocabulary, rope_parameters=rope()),
        vision_config=vision_tower(vocabulary, 14, embed_dim=TOWER, hidden_size=HIDDEN, mlp_ratio=2),
        tie_word_embeddings=False,
        **vocabulary.vision_ids(),
    )


def _qwen2_5_vl(transformers: Any, vocabulary: Vocabulary) -> Any:
    patch = vocabulary.patch_size or 14
    tower = vision_tower(
        vocabulary,
        14,
        hidden_size=TOWER,
        out_hidden_size=HIDDEN,
        intermediate_size=2 * TOWER,
        window_size=4 * vocabulary.merge_size * patch,
        fullatt_block_indexes=[LAYERS - 1],
    )
    return transformers.Qwen2_5_VLConfig(
        text_config=text_layers(vocabulary, rope_parameters=rope()),
        vision_config=tower,
        tie_word_embeddings=False,
        **vocabulary.vision_ids(),
    )


def _qwen3_vl(transformers: Any, vocabulary: Vocabulary) -> Any:
    tower = vision_tower(
        vocabulary,
        16,
        hidden_size=TOWER,
        out_hidden_size=HIDDEN,
        intermediate_size=2 * TOWER,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
    )
    return transformers.Qwen3VLConfig(
        text_config=text_layers(vocabulary, rope_parameters=rope(mrope_interleaved=True)),
        vision_config=tower,
        tie_word_embeddings=False,
        **vocabulary.vision_ids(),
    )


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
