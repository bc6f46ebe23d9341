"""Causal language models with attention layers only.

Every type listed here was checked with a small random model on CPU (fp32, sdpa and eager): logits of
packed samples with restarting positions, without mask and cache, equal those of the samples alone.
"""

from __future__ import annotations

from ._family import FLASH_KWARGS, VARLEN_KWARGS, Family

__all__ = ["FAMILY"]

_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")

FAMILY = Family(
    name="text",
    model_types=("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"),
    boundary_kwargs={**dict.fromkeys(_FLASH, FLASH_KWARGS), "varlen": VARLEN_KWARGS},
    position_backends=("eager", *_FLASH, "flex_attention", "sdpa"),
)
