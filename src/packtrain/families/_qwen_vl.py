"""What the Qwen vision-language families share.

Measured (fp32, CPU, transformers 5.24): with four-row positions, no mask and no cache they isolate
on sdpa and eager; three rows without the text row leak on every backend; flash keywords raise in
the vision tower ("multiple values"); their classes refuse flex attention.
"""

from __future__ import annotations

from functools import partial

from ._family import VARLEN_KWARGS, Family

#: Names and boxes between the family's own tokens, coordinates in thousandths.
GROUNDING = ("<|object_ref_start|>{}<|object_ref_end|>", "<|box_start|>{points}<|box_end|>", "thousandths")


#: A Qwen vision-language family; the members differ in names, not in layout.
qwen_vl = partial(
    Family,
    modalities=("image", "video"),
    position_rows=3,
    media_keys=dict.fromkeys(
        ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"), "cat0"
    ),
    image_token="<|image_pad|>",
    video_token="<|video_pad|>",
    image_rule="pixels",
    video_rule="frames",
    grounding=GROUNDING,
    boundary_kwargs={"varlen": VARLEN_KWARGS},
    position_backends=("eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa"),
    refused={"flex_attention": "its model classes do not support flex attention"},
)
