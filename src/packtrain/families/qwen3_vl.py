"""Qwen3-VL (dense and mixture of experts): 16-pixel patches, 2x2 merge, interleaved mRoPE."""

from __future__ import annotations

from ._qwen_vl import qwen_vl

__all__ = ["FAMILY"]

FAMILY = qwen_vl("qwen3_vl", ("qwen3_vl", "qwen3_vl_moe"), ("Qwen3VLProcessor",))
