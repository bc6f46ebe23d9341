"""Qwen2-VL: 14-pixel patches, 2x2 merge, three-row mRoPE."""

from __future__ import annotations

from ._qwen_vl import qwen_vl

FAMILY = qwen_vl("qwen2_vl", ("qwen2_vl",), ("Qwen2VLProcessor",))
