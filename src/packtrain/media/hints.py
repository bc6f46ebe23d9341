"""Sizes and durations that the data give beside a medium: used instead of its header only when asked to.

A part of a chat sample may carry hints next to its ref:

    {"type": "image", "image": ref, "width": 640, "height": 480}
    {"type": "video", "video": ref, "frames": 250, "fps": 25.0, "width": 640, "height": 360}
    {"type": "audio", "audio": ref, "frames": 93680, "sample_rate": 16000, "channels": 1}
    {"type": "audio", "audio": ref, "duration": 5.855, "sample_rate": 16000}

Numbers in data lie (stored before EXIF rotation, of another copy), so a template uses `header_of` with
`trust=True` only after `differences` was empty for a sample of the parts. Without trust, and where hints
are missing or too few, the header of the medium is read. A duration alone gives frames by rounding, which
may be one off: such a hint is exact only with `frames`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import audio, image, video
from .audio import AudioHeader
from .image import ImageHeader
from .knobs import number_of
from .video import VideoHeader

#: Hint names of each modality; whole numbers but `duration` and `fps`.
HINTS: dict[str, tuple[str, ...]] = {
    "image": ("width", "height"),
    "video": ("width", "height", "duration", "frames", "fps"),
    "audio": ("duration", "frames", "sample_rate", "channels"),
}
_REAL = ("duration", "fps")

Header = ImageHeader | VideoHeader | AudioHeader


def checked(name: str, value: Any) -> int | float:
    """A hint as a number.

    Raises:
        SampleError: malformed_record when it is none that is positive and finite (or not whole).
    """
    found: int | float = number_of(name, value, whole=name not in _REAL)
    return found


def hinted(part: Mapping[str, Any]) -> Header | None:
    """The header that the hints of a part amount to, or None where they are too few."""
    kind = part.get("type")
    given = {name: part[name] for name in HINTS.get(str(kind), ()) if part.get(name) is not None}
    if kind == "image" and {"width", "height"} <= given.keys():
        return ImageHeader(given["width"], given["height"], 1, "hint", True)
    if kind == "video" and {"width", "height"} <= given.keys():
        return _video(given)
    if kind == "audio":
        rate, frames, seconds = given.get("sample_rate"), given.get("frames"), given.get("duration")
        if rate is None and frames is not None and seconds is not None:
            rate = round(frames / seconds)
        if frames is None and rate is not None and seconds is not None:
            frames = round(seconds * rate)
        if frames and rate:
            return AudioHeader(frames, rate, given.get("channels", 1), "hint")
    return None


def header_of(part: Mapping[str, Any], *, trust: bool = False) -> Header:
    """The header of a part's medium: from its hints when they are trusted and enough, else read.

    Raises:
        SampleError: the reasons of the modality's `read_header`.
    """
    found = hinted(part) if trust else None
    if found is not None:
        return found
    kind = part["type"]
    module: Any = {"image": image, "video": video, "audio": audio}[kind]
    header: Header = module.read_header(part[kind])
    return header


def differences(part: Mapping[str, Any]) -> list[str]:
    """What the hints of a part say other than its medium: one line each; empty when they can be trusted.

    `duration` and `fps` count as equal within one frame.

    Raises:
        SampleError: the medium cannot be read.
    """
    names = [name for name in HINTS.get(str(part.get("type")), ()) if part.get(name) is not None]
    if not names:
        return []
    header = header_of(part)
    out: list[str] = []
    for name in names:
        real = getattr(header, name)
        given = part[name]
        if real is None:
            continue
        if name in _REAL:
            rate = float(getattr(header, "fps", None) or getattr(header, "sample_rate", None) or 1)
            slack = 1 / rate if name == "duration" else real / max(1, getattr(header, "frames", 1))
            same = abs(given - real) <= slack + 1e-9
        else:
            same = given == real
        if not same:
            out.append(f"{name} is {given} in the data and {real} in the medium")
    return out


def _video(given: Mapping[str, Any]) -> VideoHeader | None:
    fps, frames, seconds = given.get("fps"), given.get("frames"), given.get("duration")
    if frames is None and fps is not None and seconds is not None:
        frames = round(seconds * fps)
    if fps is None and frames is not None and seconds is not None:
        fps = frames / seconds
    if not frames or fps is None:
        return None
    return VideoHeader(frames, fps, given["width"], given["height"], frames / fps, 0, "hint")
