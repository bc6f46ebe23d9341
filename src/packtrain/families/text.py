"""Causal language models with attention layers only.

Every type listed here was checked with a small random model on CPU (transformers 5.24, fp32, on
sdpa and eager where its class has them): logits of packed samples with restarting positions, without
mask and cache, equal those of the samples alone; plain positions leak for each of them, so the check
bites.
"""

from __future__ import annotations

from ._family import FLASH_KWARGS, VARLEN_KWARGS, Family

_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")

_TYPES = """
    apertus arcee bitnet codegen cohere cohere2 diffllama ernie4_5 exaone4 falcon gemma gemma2 gemma3_text
    gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gptj granite granitemoe helium hunyuan_v1_dense
    llama llama4_text ministral mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe
    qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
"""

FAMILY = Family(
    name="text",
    model_types=tuple(_TYPES.split()),
    boundary_kwargs={**dict.fromkeys(_FLASH, FLASH_KWARGS), "varlen": VARLEN_KWARGS},
    position_backends=("eager", *_FLASH, "flex_attention", "sdpa"),
)
