"""Knobs of a medium that its record sets: which stretch of it is used, at which rate and size.

A part of a chat sample carries them beside its ref, under one name each whatever the record calls them:

    image   min_pixels, max_pixels, resized_height, resized_width
    video   start, end (seconds); sample_fps, nframes, min_frames, max_frames (which frames are taken);
            min_pixels, max_pixels, total_pixels, resized_height, resized_width (size of a frame)
    audio   start, end (seconds)

`measure` and `encode` ask the functions here, so they agree: a size is worked out from the header and the
decoded medium is brought to it before the processor sees it; a stretch is cut from the header's frames and
from the decoded samples alike. A list of frames has its rate in `fps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import is_finite
from ..errors import SampleError

STARTS = ("start", "video_start", "audio_start", "begin_time", "start_time", "offset")
ENDS = ("end", "video_end", "audio_end", "end_time")
_SIZE = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_WHOLE = ("nframes", "min_frames", "max_frames", *_SIZE, "total_pixels")

#: Names in a part, by modality.
KNOBS: dict[str, tuple[str, ...]] = {
    "image": _SIZE,
    "video": ("start", "end", "sample_fps", "nframes", "min_frames", "max_frames", *_SIZE, "total_pixels"),
    "audio": ("start", "end"),
}

#: Every key of a record that may set one.
KNOB_KEYS = frozenset((*STARTS, *ENDS, *_WHOLE, "sample_fps", "detail"))

#: Frames that share their tokens: `total_pixels` counts them once, as Qwen's own reader does.
_TOGETHER = 2

#: `detail: low` of OpenAI's API: the model gets a version of 512 x 512 pixels.
_LOW = 512 * 512

#: Limits that Qwen's own reader of videos has where a record sets only some of them.
_FRAMES = (4, 768)


def knobs_of(
    kind: str, holder: Mapping[str, Any], *, listed: bool = False
) -> tuple[dict[str, Any], set[str]]:
    """(knobs under their names in a part, keys of `holder` that they came from).

    Args:
        kind: the modality.
        holder: keys beside a ref; values that are there.
        listed: the ref is a list of frames: `fps` and `sample_fps` are their rate.

    Raises:
        SampleError: malformed_record, for a value that is none; `unread_key` for an unknown `detail`.
    """
    taken: set[str] = set()
    out: dict[str, Any] = {}
    if kind != "image":
        _take_stretch(holder, out, taken)
    for name in KNOBS[kind]:
        if name in ("start", "end", "sample_fps") or holder.get(name) is None:
            continue
        out[name] = _number(name, holder[name], whole=True)
        taken.add(name)
    if kind == "video":
        _take_rate(holder, out, taken, listed)
    if "nframes" in out and "sample_fps" in out:
        raise _bad("nframes and fps of a video are both set: one decides which frames are taken")
    if kind == "image" and holder.get("detail") is not None:
        _take_detail(holder["detail"], out)
        taken.add("detail")
    if ("resized_height" in out) != ("resized_width" in out):
        raise _bad("resized_height and resized_width come together")
    return out, taken


def _take_rate(holder: Mapping[str, Any], out: dict[str, Any], taken: set[str], listed: bool) -> None:
    """`fps` is the rate a video is sampled at, unless it stands with what describes the file."""
    rate = next((name for name in ("sample_fps", "fps") if holder.get(name) is not None), None)
    described = any(holder.get(name) is not None for name in ("frames", "width", "height"))
    if rate == "sample_fps" or (rate == "fps" and (listed or not described)):
        out["fps" if listed else "sample_fps"] = _number(rate, holder[rate])
        taken.update(name for name in ("sample_fps", "fps", "raw_fps") if holder.get(name) is not None)


def _take_detail(detail: Any, out: dict[str, Any]) -> None:
    if detail not in ("auto", "high", "low"):
        raise SampleError(
            "unread_key",
            f"detail {detail!r} of an image is none of auto, high, low",
            hint="set max_pixels, or leave it out: ignore_keys: [detail]",
        )
    if detail == "low":
        out["max_pixels"] = min(out.get("max_pixels", _LOW), _LOW)


def _take_stretch(holder: Mapping[str, Any], out: dict[str, Any], taken: set[str]) -> None:
    starts = [name for name in STARTS if holder.get(name) is not None]
    ends = [name for name in ENDS if holder.get(name) is not None]
    values = {name: _number(name, holder[name], zero=True) for name in (*starts, *ends)}
    if len({values[name] for name in starts}) > 1 or len({values[name] for name in ends}) > 1:
        raise _bad(f"{', '.join((*starts, *ends))} of a medium disagree")
    taken.update(values)
    start = values[starts[0]] if starts else 0.0
    end = values[ends[0]] if ends else None
    if starts and end is None and holder.get("duration") is not None:  # cut at the end of the clip
        end = start + _number("duration", holder["duration"])
        taken.add("duration")
    if end is not None and end <= start:
        raise _bad(f"a medium ends at {end:g} s and starts at {start:g} s")
    if starts:
        out["start"] = start
    if end is not None:
        out["end"] = end


def stretch(part: Mapping[str, Any], frames: int, rate: float | None) -> tuple[int, int]:
    """(first, one past the last) frame of a clip that a part uses.

    Args:
        part: a video or audio part.
        frames: how many the medium has.
        rate: frames (or samples) a second; None for a list of pictures without one.

    Raises:
        SampleError: malformed_record, for a stretch outside of the medium.
    """
    start, end = part.get("start"), part.get("end")
    if start is None and end is None:
        return 0, frames
    if rate is None:
        raise _bad("start and end of a list of frames need their rate", hint="give fps beside it")
    first = round((start or 0.0) * rate)
    last = frames if end is None else min(frames, round(end * rate))
    if first >= last:
        raise _bad(f"the clip has {frames / rate:.3f} s; none of it lies between {start or 0:g} and {end} s")
    return first, last


def chosen_frames(
    part: Mapping[str, Any], first: int, last: int, rate: float | None, temporal: int
) -> NDArray[np.int64] | None:
    """Frame numbers in [first, last) that the knobs of a video choose, evenly spaced; None without knobs.

    `nframes` says how many, else `sample_fps` (2 a second where only limits are set) within `min_frames` and
    `max_frames`; the count is a multiple of `temporal`.

    Raises:
        SampleError: malformed_record, for more frames than there are.
    """
    limits = [part.get("min_frames"), part.get("max_frames")]
    if part.get("nframes") is None and part.get("sample_fps") is None and limits == [None, None]:
        return None
    total = last - first
    if part.get("nframes") is not None:
        count = round(part["nframes"] / temporal) * temporal
    else:
        if rate is None:
            raise _bad("a video without a rate cannot be sampled by one", hint="give fps of its frames")
        least = -(-(limits[0] or _FRAMES[0]) // temporal) * temporal
        most = (limits[1] or _FRAMES[1]) // temporal * temporal
        wanted = total / rate * (part.get("sample_fps") or 2.0)
        count = math.floor(min(max(wanted, least), most, total) / temporal) * temporal
    if not 0 < count <= max(total, temporal):
        raise _bad(f"{count} frames are asked for of a stretch of {total}")
    if total < count:
        return np.concatenate([np.arange(first, last), np.repeat([last - 1], count - total)]).astype(np.int64)
    return np.rint(np.linspace(first, last - 1, count)).astype(np.int64)


def sized(part: Mapping[str, Any], height: int, width: int, factor: int, frames: int = 1) -> tuple[int, int]:
    """(height, width) that a picture or frame is brought to before the processor sees it.

    Args:
        part: an image or video part.
        height, width: as the header says.
        factor: sides become multiples of this.
        frames: how many frames share `total_pixels`.
    """
    if part.get("resized_height") is not None:
        return (
            max(factor, round(part["resized_height"] / factor) * factor),
            max(factor, round(part["resized_width"] / factor) * factor),
        )
    least, most, total = part.get("min_pixels"), part.get("max_pixels"), part.get("total_pixels")
    if total is not None:
        most = min(most or total, max(total * _TOGETHER // max(frames, 1), factor * factor))
    if least is None and most is None:
        return height, width
    if least is not None and most is not None and least > most:
        raise _bad(f"min_pixels {least} of a medium is above max_pixels {most}")
    high, wide = max(factor, round(height / factor) * factor), max(factor, round(width / factor) * factor)
    return within(height, width, factor, high * wide, least or 0, math.inf if most is None else most) or (
        high,
        wide,
    )


def within(
    height: int, width: int, factor: int, area: int, least: float, most: float, frames: int = 1
) -> tuple[int, int] | None:
    """Sides of a picture, multiples of `factor`, that bring its area within limits, as Qwen-VL's processors
    do; None: the area is.

    Args:
        height, width: as they are.
        area: with both sides rounded to the factor, of all frames together.
        least, most: of the area.
        frames: how many have these sides.
    """
    if area > most:
        scale = math.sqrt((frames * height * width) / most)
        high, wide = math.floor(height / scale / factor), math.floor(width / scale / factor)
        return max(factor, high * factor), max(factor, wide * factor)
    if area < least:
        scale = math.sqrt(least / (frames * height * width))
        return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return None


def _number(name: str, value: Any, *, whole: bool = False, zero: bool = False) -> Any:
    """As `number_of`, also where a record gives it as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _bad(f"{name} {value!r} of a medium is not a number") from None
    return number_of(name, value, whole=whole, zero=zero)


def number_of(name: str, value: Any, *, whole: bool, zero: bool = False) -> Any:
    """A number above 0 (or 0 with `zero`) that stands beside a medium.

    Raises:
        SampleError: malformed_record, it is none.
    """
    number = not isinstance(value, bool) and is_finite(value)
    if not number or value < 0 or (value == 0 and not zero) or (whole and value != int(value)):
        raise _bad(f"{name} {value!r} of a medium is not {'a whole number' if whole else 'a number'} above 0")
    return int(value) if whole else float(value)


def _bad(what: str, *, hint: str | None = None) -> SampleError:
    return SampleError("malformed_record", what, hint=hint)
