"""Video tokens from frames, rate and size: which frames are taken, and what they become.

Which frames: the processor's own sampler is asked (it is plain arithmetic on frame numbers), once per
distinct length and rate. Some samplers (Qwen2-VL's, transformers 5.24) now and then name one frame behind
the last one, on which the processor itself stops with an index error; that frame is left out here, in
measuring and encoding alike. A list of pictures was sampled before and is taken whole.

What they become, per family: `frames` (pixel limits per frame, Qwen2-VL), `clip` (limits for all frames,
times as text, Qwen3-VL), `omni` (as frames; sound may stand between them), `pooled` (LLaVA-OneVision) and
`tiles` (one tile and a line of text per frame, InternVL).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, SampleError
from ..media.knobs import within
from .expansion import Block, Expansion
from .image_tokens import MAX_ASPECT, PixelRule, rule_of, smart_resize

I64 = NDArray[np.int64]

#: Frame rate that Qwen3-VL assumes of frames that come without one.
_ASSUMED_FPS = 24.0


@dataclass(frozen=True)
class Clip:
    """A video as its header tells it; `fps` is None for a list of pictures."""

    frames: int
    fps: float | None
    height: int
    width: int


def facts_of(clip: Clip, taken: Sequence[int]) -> dict[str, Any]:
    """What a processor is told of a video of which it gets the frames `taken`."""
    return {
        "total_num_frames": clip.frames,
        "fps": clip.fps,
        "duration": clip.frames / clip.fps if clip.fps else None,
        "width": clip.width,
        "height": clip.height,
        "frames_indices": list(taken),
    }


def handed_over(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`videos_kwargs` for videos whose frames were chosen before."""
    return {"do_sample_frames": False, "video_metadata": list(facts), "input_data_format": "channels_last"}


@dataclass(frozen=True, kw_only=True)
class VideoRule:
    """Settings of a video processor that decide how many tokens a video takes.

    Attributes:
        kind: see the module.
        token: what one run of it is made of (the video token; InternVL: the image token).
        pixels: limits of the area, of one frame or (`clip`) of all of them.
        temporal: frames merged into one.
        cap: the processor's `cap_pixels_per_frame`.
        cap_tokens: the processor's `max_video_tokens`.
        per_frame: tokens of a frame where the size does not matter (`pooled`, `tiles`).
        marks: tokens around each frame, where the family has them.
        clock: positions a second of a video's time row, or None: one per merged frame.
        seconds: seconds per merged frame where they are fixed (`omni`).
        chunk: seconds of video and sound that stand together (`omni`).
    """

    kind: str
    token: str
    pixels: PixelRule | None = None
    temporal: int = 1
    cap: bool = False
    cap_tokens: int = 0
    per_frame: int = 0
    marks: tuple[str, str] = ("", "")
    clock: float | None = None
    seconds: float | None = None
    chunk: float = 0.0

    @property
    def timed(self) -> bool:
        """Whether the rate of a video's frames changes what the model sees."""
        return self.kind == "clip" or (self.clock is not None and self.seconds is None)

    # ------------------------------------------------------------------------------------------
    def grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Patches along time, height and width of `frames` frames that are given to the processor.

        Raises:
            SampleError: `unsupported_media`, for a shape it refuses.
            ConfigError: the processor's limits are none; only told where there is a video.
        """
        assert self.pixels is not None
        pixels, factor = self.pixels.check("video"), self.pixels.factor
        if self.kind == "clip":
            high, wide = self._resize_clip(frames, height, width)
        else:
            if self.cap:
                budget = int(self.cap_tokens * factor * factor * 0.9) * self.temporal // frames
                most = max(min(pixels.maximum, budget), int(pixels.minimum * 1.05))
                pixels = replace(pixels, maximum=most)
            high, wide = smart_resize(height, width, pixels)
        return -(-frames // self.temporal), high // pixels.patch, wide // pixels.patch

    def _resize_clip(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width under limits that hold for all frames together."""
        assert self.pixels is not None
        rule, factor = self.pixels, self.pixels.factor
        if not rule.resize:
            return smart_resize(height, width, rule)
        if frames < self.temporal:
            raise _refused(f"a video of {frames} frames; the processor takes at least {self.temporal}")
        most = rule.maximum
        if self.cap:
            share = min(self.cap_tokens * factor * factor, most // frames)
            most = max(share, int(rule.minimum * 1.05)) * frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > MAX_ASPECT:
            raise _refused(f"a video of {width}x{height} pixels has an aspect ratio above {MAX_ASPECT}")
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        total = round(frames / self.temporal) * self.temporal
        fitted = within(height, width, factor, total * high * wide, rule.minimum, most, frames)
        return fitted or (high, wide)

    # ------------------------------------------------------------------------------------------
    def expand(self, clip: Clip, indices: I64) -> Expansion:
        """One video of which the frames `indices` are taken.

        Raises:
            SampleError: `unsupported_media`, for a video the processor refuses.
        """
        count = len(indices)
        if count < 1:
            raise _refused(f"a video of {clip.frames} frames is too short: none would be taken")
        if clip.height < 1 or clip.width < 1:
            raise _refused(f"a video of {clip.width}x{clip.height} pixels is empty")
        if self.pixels is None:
            costs = {"video_frames": count, "patches": count}
            if self.kind == "pooled":
                return Expansion(self.token, (count * self.per_frame + 1,), costs)
            begin, end = self.marks
            lines = (f"Frame{k + 1}: {begin}{self.token}{end}" for k in range(count))
            return Expansion("\n".join(lines), (self.per_frame,) * count, costs)
        time, high, wide = self.grid(count, clip.height, clip.width)
        costs = {"video_frames": count, "patches": time * high * wide}
        high, wide = high // self.pixels.merge, wide // self.pixels.merge
        if self.kind == "clip":
            return self._timed(indices, clip.fps, (time, high, wide), costs)
        block = Block(time, high, wide, step=self._step(clip, count))
        grid = (time, high * self.pixels.merge, wide * self.pixels.merge)
        return Expansion(self.token, (time * high * wide,), costs, (block,), grid)

    def expand_with_sound(self, clip: Clip, indices: I64, sound: Expansion) -> Expansion:
        """A video whose sound stands between its frames, in chunks of equal time (`omni`).

        Args:
            clip, indices: the video.
            sound: its sound as a clip of its own: one run of the audio token.
        """
        seen = self.expand(clip, indices)
        block = seen.blocks[0]
        if self.kind != "omni" or block is None:
            raise _refused("a video with sound; this model takes them apart")
        per_chunk = int((self.clock or 0) * self.chunk)
        per_frame = block.height * block.width
        frames = chunk_bounds(tuple(np.repeat(np.arange(block.time) * block.step, per_frame)), per_chunk)
        heard = chunk_bounds(tuple(range(sound.widths[0])), per_chunk)
        runs: list[tuple[str, int, Block]] = []
        for k in range(max(len(frames), len(heard))):
            for which, bounds in ((seen, frames), (sound, heard)):
                if k < len(bounds) and bounds[k][1] > bounds[k][0]:
                    first, last = bounds[k]
                    place = replace(
                        block, start=first, anchor=len(runs), sound=which is sound, opens=not runs
                    )
                    runs.append((which.text, last - first, place))
        runs[-1] = (*runs[-1][:2], replace(runs[-1][2], closes=True))
        begin, end = self.marks
        return Expansion(
            begin + "".join(text for text, _, _ in runs) + end,
            tuple(width for _, width, _ in runs),
            {**seen.costs, **sound.costs},
            tuple(place for _, _, place in runs),
            seen.grid,
        )

    def _timed(
        self, indices: I64, fps: float | None, grid: tuple[int, int, int], costs: dict[str, int]
    ) -> Expansion:
        """Each merged frame behind its time in seconds and between its marks."""
        time, high, wide = grid
        rate = _ASSUMED_FPS if fps is None else fps
        stamps = [index / rate for index in indices.tolist()]
        stamps += [stamps[-1]] * (-len(stamps) % self.temporal)
        begin, end = self.marks
        pieces = []
        for k in range(0, len(stamps), self.temporal):
            middle = (stamps[k] + stamps[k + self.temporal - 1]) / 2
            pieces.append(f"<{middle:.1f} seconds>{begin}{self.token}{end}")
        return Expansion("".join(pieces), (high * wide,) * time, costs, (Block(1, high, wide),) * time)

    def _step(self, clip: Clip, count: int) -> float:
        """Positions from one merged frame to the next."""
        if self.clock is None:
            return 1.0
        if self.seconds is not None:
            return self.clock * self.seconds
        rate = _ASSUMED_FPS if clip.fps is None else count / clip.frames * clip.fps
        return self.clock * (self.temporal / rate)


@lru_cache(maxsize=1024)
def chunk_bounds(values: tuple[float, ...], size: int) -> tuple[tuple[int, int], ...]:
    """Cut ascending values where they reach the next multiple of `size`; one cut per value at most."""
    bounds, first, chunk = [], 0, 1
    for place, value in enumerate(values):
        if value >= chunk * size:
            bounds.append((first, place))
            first, chunk = place, chunk + 1
    return (*bounds, (first, len(values)))


def video_rule(processor: Any, kind: str, tokens: dict[str, str], options: dict[str, Any]) -> VideoRule:
    """Read the rule from a processor.

    Args:
        processor: a loaded processor.
        kind: the family's `video_rule`.
        tokens: placeholders by kind (`video`, `image`).
        options: what the processor itself hands to its video processor (`videos_kwargs`): it has
            precedence over the attributes of that.

    Raises:
        ConfigError: it has no such settings.
    """
    video = getattr(processor, "video_processor", None)
    token = tokens["video"]
    try:
        if kind == "pooled":
            side = math.ceil(int(math.sqrt(processor.num_image_tokens)) / 2)
            return VideoRule(kind=kind, token=token, per_frame=side * side)
        if kind == "tiles":
            marks = (str(processor.start_image_token), str(processor.end_image_token))
            per_frame = int(processor.image_seq_length)
            return VideoRule(kind=kind, token=tokens["image"], per_frame=per_frame, marks=marks)
        marks, chunk = ("", ""), 0.0
        if kind == "clip":
            marks = (str(processor.vision_start_token), str(processor.vision_end_token))
        seconds = clock = None
        if kind == "omni":
            rate = options.get("fps")
            seconds = int(video.temporal_patch_size) / float(2.0 if rate is None else rate)  # type: ignore[union-attr]
            marks = (str(processor.audio_bos_token), str(processor.audio_eos_token))
            chunk = float(getattr(processor, "seconds_per_chunk", 2.0))
            clock = float(getattr(processor, "position_id_per_seconds", 25))
        return VideoRule(
            kind=kind,
            token=token,
            pixels=rule_of(video, size=options.get("size")),
            temporal=int(video.temporal_patch_size),  # type: ignore[union-attr]
            cap=bool(getattr(video, "cap_pixels_per_frame", False)),
            cap_tokens=int(getattr(video, "max_video_tokens", 0) or 0),
            marks=marks,
            clock=clock,
            seconds=seconds,
            chunk=chunk,
        )
    except (AttributeError, TypeError):
        raise ConfigError(
            f"{type(processor).__name__} has no settings of a video rule {kind!r}",
            hint="use the processor that belongs to the model family",
        ) from None


def _refused(problem: str) -> SampleError:
    return SampleError("unsupported_media", problem, hint="cut, resample or drop the video")
