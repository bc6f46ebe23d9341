"""Qwen2-VL: 14-pixel patches, 2x2 merge, three-row mRoPE."""

from __future__ import annotations

from ._family import qwen_vl

FAMILY = qwen_vl(name="qwen2_vl", model_types=("qwen2_vl",), processor_classes=("Qwen2VLProcessor",))
