"""Qwen3-VL (dense and mixture of experts): 16-pixel patches, 2x2 merge, interleaved mRoPE.

A video is a row of frames, each between its own marks and behind its time as text (`<1.5 seconds>`);
the limit of pixels is for all its frames together.
"""

from __future__ import annotations

from ._family import qwen_vl

FAMILY = qwen_vl(
    name="qwen3_vl",
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    processor_classes=("Qwen3VLProcessor",),
    video_rule="clip",
)
