"""What the LLaVA-like families share: one-row positions, a language model that takes them as they are.

Their vision part turns each crop into a fixed number of features, so packing touches only the
language model, which isolates samples like any text model. Measured (fp32, CPU, transformers 5.24,
small random models): logits of packed samples equal those of the samples alone on sdpa and eager.
Flash and varlen keywords are not sent: the classes forward every keyword to the vision tower too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._family import Family


def llava_like(
    name: str,
    model_types: tuple[str, ...],
    processor_classes: tuple[str, ...],
    *,
    modalities: tuple[str, ...],
    media_keys: Mapping[str, str],
    **rules: Any,
) -> Family:
    """A family of one-row positions whose boundaries are the restarting text positions."""
    return Family(
        name=name,
        model_types=model_types,
        processor_classes=processor_classes,
        modalities=modalities,
        media_keys=media_keys,
        position_backends=("eager", "sdpa"),
        refused={
            backend: "only sdpa and eager are proven for it"
            for backend in (
                "flash_attention_2",
                "flash_attention_3",
                "flash_attention_4",
                "flex_attention",
                "varlen",
            )
        },
        **rules,
    )
