"""LLaVA-OneVision: one image of a sample is cut into crops, several are one square each.

Images of a sample go to the processor as one list per sample, as its chat template does: a flat list
would count every image as if it were alone. Crops come without padding (see LLaVA-NeXT). A video is
[1, frames, 3, height, width]: the model takes several videos in a row only if they have equally many
frames, so a sample with unlike videos is refused, and so is a row of them (by the collator).
"""

from __future__ import annotations

from ._family import llava_like

FAMILY = llava_like(
    name="llava_onevision",
    model_types=("llava_onevision",),
    processor_classes=("LlavaOnevisionProcessor",),
    modalities=("image", "video"),
    media_keys={
        "pixel_values": "cat0",
        "image_sizes": "cat0",
        "batch_num_images": "cat0",
        "pixel_values_videos": "cat0",
    },
    image_token="<image>",
    video_token="<video>",
    image_rule="anyres",
    video_rule="pooled",
)
