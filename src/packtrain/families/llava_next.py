"""LLaVA-NeXT: an image is cut into crops on the best of some grids; padding rows are left out again.

The processor pads all images of a call to the same number of crops. Encoded samples carry the crops
without that padding, [crops, 3, height, width], which the model takes as well and which joins by rows.
"""

from __future__ import annotations

from ._family import llava_like

FAMILY = llava_like(
    name="llava_next",
    model_types=("llava_next",),
    processor_classes=("LlavaNextProcessor",),
    modalities=("image",),
    media_keys={"pixel_values": "cat0", "image_sizes": "cat0"},
    image_token="<image>",
    image_rule="anyres",
)
