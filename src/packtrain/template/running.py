"""Run the real processor on decoded media (sound resampled), and hold its answer against what was measured.

Frames of videos are chosen here, by the processor's own sampler, so that only those are kept in memory;
the processor gets them with their numbers and rate and is told not to sample again. Several images of a
sample go in as one list per sample where that decides the count (LLaVA-OneVision), as chat templates do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DriftError
from ..families import Family
from ..measuring.expansion import Expansion
from ..measuring.media import MediaRules, Part
from ..measuring.video_tokens import Clip, facts_of, handed_over
from ..media.audio import open_audio
from ..media.image import open_image
from ..media.knobs import stretch
from ..media.video import read_frames, read_header
from .layout import Layout, aligned

# --------------------------------------------------------------------------------------------
# Sound at another rate: a windowed-sinc low-pass filter, one tap row per output phase
# --------------------------------------------------------------------------------------------
# The output has `ceil(frames * new / old)` samples, the number that measuring counts with.
F32 = NDArray[np.float32]

_ZEROS = 16  # zero crossings of the sinc on each side
_ROLLOFF = 0.97


def mono(samples: F32) -> F32:
    """Mean over channels: float32[frames, channels] -> float32[frames]."""
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)


def resample(samples: F32, old: int, new: int) -> F32:
    """float32[frames] at `old` Hz -> float32[ceil(frames * new / old)] at `new` Hz."""
    if old == new or not len(samples):
        return samples
    import torch

    shared = math.gcd(old, new)
    down, up = old // shared, new // shared
    cutoff = min(down, up) * _ROLLOFF
    reach = math.ceil(_ZEROS * down / cutoff)
    taps = torch.arange(-reach, reach + down, dtype=torch.float64)[None] / down
    time = (taps - torch.arange(up, dtype=torch.float64)[:, None] / up) * cutoff
    window = torch.cos(time.clamp(-_ZEROS, _ZEROS) * math.pi / _ZEROS / 2) ** 2
    kernel = (torch.sinc(time) * window * (cutoff / down)).float()[:, None]
    wanted = -(-len(samples) * new // old)
    padded = torch.nn.functional.pad(torch.from_numpy(samples)[None, None], (reach, reach + down))
    out = torch.nn.functional.conv1d(padded, kernel, stride=down)[0]
    found: F32 = out.T.reshape(-1)[:wanted].contiguous().numpy()
    return found


# --------------------------------------------------------------------------------------------
# Run the real processor on decoded media (sound resampled), and hold its answer against what was measured
# --------------------------------------------------------------------------------------------
I64 = NDArray[np.int64]


def processor_inputs(parts: Sequence[Part], rules: MediaRules, family: Family) -> dict[str, Any]:
    """Decoded media of a sample as keyword arguments of its processor.

    Raises:
        SampleError: a medium cannot be decoded.
    """
    images: list[Any] = []
    frames: list[Any] = []
    metadata: list[dict[str, Any]] = []
    sounds: list[Any] = []
    owners: list[int | None] = []  # video a sound belongs to
    for part in parts:
        if part["type"] == "image":
            images.append(_image(part, rules))
        elif part["type"] == "audio":
            sounds.append(_sound(part["audio"], rules, part))
            owners.append(None)
        else:
            array, facts = _video(part, rules)
            if part.get("audio") is not None and rules.audio is not None:
                sounds.append(_sound(part["audio"], rules, part))
                owners.append(len(frames))
            frames.append(array)
            metadata.append(facts)
    inputs: dict[str, Any] = {}
    if images:
        nested = family.image_rule == "anyres" or (rules.oracle is not None and rules.oracle.nested)
        inputs["images"] = [images] if nested else images
    if frames:
        inputs["videos"] = frames
        inputs["videos_kwargs"] = handed_over(metadata)
    if sounds:
        inputs["audio"] = sounds
        inputs["sampling_rate"] = rules.rate
        if any(owner is not None for owner in owners):
            inputs["audio_from_video_indices"] = owners
            inputs["load_audio_from_video"] = True
    return inputs


def _video(part: Part, rules: MediaRules) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    header = read_header(part["video"])
    taken, frames, fps = rules.taken_of(part, header)
    once, again = np.unique(taken, return_inverse=True)
    array = read_frames(part["video"], once.tolist())[again]
    height, width = rules.size_of(part, header.height, header.width, len(taken))
    if (height, width) != array.shape[1:3]:
        from PIL import Image

        array = np.stack([np.asarray(_resized(Image.fromarray(frame), height, width)) for frame in array])
    facts = facts_of(Clip(frames, fps, height, width), taken.tolist())
    if frames == header.frames or not fps:
        facts["duration"] = header.duration
    return array, facts


def _image(part: Part, rules: MediaRules) -> Any:
    opened = open_image(part["image"])
    return _resized(opened, *rules.size_of(part, opened.height, opened.width))


def _resized(image: Any, height: int, width: int) -> Any:
    """A picture at the size that its knobs ask for."""
    from PIL import Image

    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)


def _sound(reference: Any, rules: MediaRules, part: Part) -> NDArray[np.float32]:
    samples, rate = open_audio(reference)
    first, last = stretch(part, len(samples), rate)
    return resample(mono(samples[first:last]), rate, rules.rate)


def run_processor(
    template: Any, rendered: Any, layout: Layout, expansions: Mapping[str, Sequence[Expansion]]
) -> tuple[Layout, dict[str, Any]]:
    """Layout and media tensors of a sample, after checking the processor's tokens and grids against ours.

    Args:
        template: an `HFTemplate` with media.
        rendered: its rendering of the sample.
        layout: the tokens that were measured.
        expansions: what each medium was measured as.

    Raises:
        DriftError: the processor's tokens or grids are not those.
        SampleError: a medium cannot be decoded.
    """
    processor, rules, family = template.processor, template.media, template.family
    inputs = processor_inputs(rendered.media, rules, family)
    if not template.adds_special_tokens(rendered.text):
        inputs["add_special_tokens"] = False
    batch = processor(text=[rendered.text], return_tensors="pt", **inputs)
    theirs = batch["input_ids"][0].numpy()
    if rules.oracle is not None:
        if rules.oracle.mode == "encode" and rendered.media:
            layout = aligned(layout, theirs)
        return layout, _as_it_is(batch, layout.total, type(processor).__name__)
    expected = layout.expand(layout.ids)
    if not np.array_equal(theirs, expected):
        widths = {kind: [item.widths for item in items] for kind, items in expansions.items() if items}
        raise DriftError(
            f"{type(processor).__name__} gives {len(theirs)} tokens, measuring gives {len(expected)} "
            f"(runs of media tokens {str(widths)[:200]})",
            hint="the processor follows another rule than its family; run template.verify_limits()",
        )
    media = {key: batch[key] for key in family.media_keys if key in batch}
    for key, kind in (("image_grid_thw", "image"), ("video_grid_thw", "video")):
        if key in media and all(item.grid is not None for item in expansions.get(kind, ())):
            grid = media[key].tolist()
            measured = [list(item.grid or ()) for item in expansions[kind]]
            if grid != measured:
                raise DriftError(f"{kind} grids are {grid}, the headers say {measured}")
    if "image_sizes" in media and media["pixel_values"].dim() == 5:
        _drop_padding(media, expansions["image"])
    return layout, media


def _as_it_is(batch: Mapping[str, Any], expected: int, name: str) -> dict[str, Any]:
    """All that an unknown processor gives besides its mask; its tokens under `input_ids`."""
    if len(batch["input_ids"][0]) != expected:
        raise DriftError(
            f"{name} gives {len(batch['input_ids'][0])} tokens, measuring gives {expected}",
            hint="its counts depend on more than the size of a medium; describe it by a family",
        )
    left = ("attention_mask", "token_type_ids", "mm_token_type_ids")
    return {
        **{key: value for key, value in batch.items() if key not in left and hasattr(value, "shape")},
        "input_ids": batch["input_ids"][0],
    }


def _drop_padding(media: dict[str, Any], images: Sequence[Expansion]) -> None:
    """Crops of all images in one tensor [crops, 3, height, width], without the empty ones."""
    import torch

    pixels = media["pixel_values"]
    media["pixel_values"] = torch.cat(
        [crops[: item.costs["patches"]] for crops, item in zip(pixels, images, strict=True)]
    )
