"""Qwen2-Audio: clips of at most 30 seconds; what is longer is cut by its feature extractor.

The cut is counted in the cost `audio_cut` (clips) and logged, never silent.
"""

from __future__ import annotations

from ._family import llava_like

FAMILY = llava_like(
    name="qwen2_audio",
    model_types=("qwen2_audio",),
    processor_classes=("Qwen2AudioProcessor",),
    modalities=("audio",),
    media_keys={"input_features": "cat0", "feature_attention_mask": "cat0"},
    audio_token="<|AUDIO|>",
    audio_rule="whisper",
)
