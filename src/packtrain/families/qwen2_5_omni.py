"""Qwen2.5-Omni (its thinker): images and videos as Qwen2-VL, audio as Qwen2-Audio up to 300 seconds.

A video part may carry its sound as `"audio": ref`: then video and audio tokens alternate in chunks of
two seconds, as the model expects them. Positions advance past the time row of a video (25 per
second), unlike those of Qwen2.5-VL.
"""

from __future__ import annotations

from ._family import qwen_vl

FAMILY = qwen_vl(
    name="qwen2_5_omni",
    model_types=("qwen2_5_omni_thinker",),
    processor_classes=("Qwen2_5OmniProcessor",),
    modalities=("image", "video", "audio"),
    media_keys={**qwen_vl.keywords["media_keys"], "input_features": "cat0", "feature_attention_mask": "cat0"},
    image_token="<|IMAGE|>",
    video_token="<|VIDEO|>",
    audio_token="<|AUDIO|>",
    video_rule="omni",
    grounding=None,  # none is published for it: records with boxes are refused
    audio_rule="whisper",
    time_unit="omni",
)
