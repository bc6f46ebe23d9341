"""LLaVA-1.5: every image is cropped to one square, so all images take the same number of tokens."""

from __future__ import annotations

from ._family import llava_like

FAMILY = llava_like(
    name="llava_1_5",
    model_types=("llava",),
    processor_classes=("LlavaProcessor",),
    modalities=("image",),
    media_keys={"pixel_values": "cat0"},
    image_token="<image>",
    image_rule="square",
)
