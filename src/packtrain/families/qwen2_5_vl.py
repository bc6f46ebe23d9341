"""Qwen2.5-VL: the image layout of Qwen2-VL with window attention in the vision tower."""

from __future__ import annotations

from ._qwen_vl import qwen_vl

__all__ = ["FAMILY"]

FAMILY = qwen_vl("qwen2_5_vl", ("qwen2_5_vl",), ("Qwen2_5_VLProcessor",))
