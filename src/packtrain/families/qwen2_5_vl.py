"""Qwen2.5-VL: the layout of Qwen2-VL with window attention in the vision tower, and videos on a clock.

The time row of a video counts `tokens_per_second` positions a second. That number stands in the model's
config, not in its processor: 2 in the published checkpoints (a template takes another one).
"""

from __future__ import annotations

from ._family import GROUNDING, qwen_vl

FAMILY = qwen_vl(
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    processor_classes=("Qwen2_5_VLProcessor",),
    grounding=(*GROUNDING[:2], "pixels"),
    time_unit="seconds",
    tokens_per_second=2.0,
)
