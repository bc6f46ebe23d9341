"""Smallest samples of each kind of media, made by the real processor: what `dummy_media` takes.

Only the run of media tokens with its marks is kept, so the row grows by as little as the family allows.
"""

from __future__ import annotations

import io
import wave
from typing import Any

from ..errors import InputError
from .processor import HFTemplate


def dummy_samples(template: HFTemplate) -> list[dict[str, Any]]:
    """One encoded sample per tower of the template's family: a small grey image, a moment of silence.

    Raises:
        InputError: the family has no media.
    """
    makers = {"vision": ("image", _image), "audio": ("audio", _silence)}
    made = []
    for tower in template.family.towers:
        kind, make = makers[tower]
        part = {"type": kind, kind: make()}
        turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a"}]
        made.append(_cut(template.encode({"messages": turns}), template))
    if not made:
        raise InputError(f"family {template.family.name} has no media", hint="leave dummy_media off")
    return made


def _cut(encoded: dict[str, Any], template: HFTemplate) -> dict[str, Any]:
    """The media tokens and one token on each side; positions begin at 0 again."""
    import torch

    media = torch.isin(encoded["input_ids"], torch.tensor(list(template.media_ids)))
    places = media.nonzero().flatten()
    part = slice(max(0, int(places[0]) - 1), int(places[-1]) + 2)
    positions = encoded["position_ids"][..., part]
    return {
        **encoded,
        "input_ids": encoded["input_ids"][part],
        "labels": torch.full_like(encoded["labels"][part], -100),
        "position_ids": positions - positions[..., :1],
    }


def _image() -> bytes:
    from PIL import Image

    held = io.BytesIO()
    Image.new("RGB", (32, 32), (127, 127, 127)).save(held, "PNG")
    return held.getvalue()


def _silence() -> bytes:
    held = io.BytesIO()
    with wave.Wave_write(held) as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(bytes(2 * 1600))
    return held.getvalue()
