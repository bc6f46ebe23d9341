"""InternVL3 (and InternVL2.5 in its Hugging Face form): square tiles plus a thumbnail; videos as frames.

Image tiles and video frames share `pixel_values`, in the order in which they stand in the text.
"""

from __future__ import annotations

from ._family import llava_like

FAMILY = llava_like(
    name="internvl3",
    model_types=("internvl",),
    processor_classes=("InternVLProcessor",),
    modalities=("image", "video"),
    media_keys={"pixel_values": "cat0"},
    image_token="<IMG_CONTEXT>",
    video_token="<video>",
    image_rule="tiles",
    video_rule="tiles",
    grounding=("<ref>{}</ref>", "<box>[{list}]</box>", "thousandths"),
)
