"""Media of chat samples as expansions, from their headers: one object per processor, many samples a call.

It holds the rules of a family, bound to one processor, and asks the oracle for whatever the family has no
rule for. A sample with a medium that cannot be used gets its `SampleError`; the others are not touched by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SampleError
from ..media.hints import header_of
from ..media.knobs import chosen_frames, sized, stretch
from .audio_tokens import AudioRule
from .encoding import tried
from .expansion import Block, Expansion
from .image_tokens import AnyresRule, PixelRule, SquareRule, TileRule, smart_resize
from .video_tokens import Clip, VideoRule

I64 = NDArray[np.int64]
Part = Mapping[str, Any]
Expansions = dict[str, list[Expansion]]

_REMEMBERED = 65_536  # sizes, and lengths of videos

#: Frames, rate -> the frame numbers that are taken.
Sampler = Callable[[int, float | None], I64]


@lru_cache(_REMEMBERED)
def _grid(token: str, high: int, wide: int, merge: int) -> Expansion:
    """One image of so many patches."""
    rows, columns = high // merge, wide // merge
    costs = {"images": 1, "patches": high * wide}
    return Expansion(token, (rows * columns,), costs, (Block(1, rows, columns),), (1, high, wide))


class MediaRules:
    """How the media of one processor become tokens.

    Args:
        tokens: kind (`image`, `video`, `audio`) -> placeholder in the rendered text.
        image, video, audio: the rules; None where there is none.
        sampler: which frames of a video are taken.
        sampling: `fps` and `max_frames` of every video that does not say its own.
        max_aspect_ratio: longer side of a picture or frame by its shorter one, at most; None: what the
            processor takes.
        oracle: answers for kinds without a rule: `oracle.expand(kind, header)`.
        trust_hints: take sizes from the parts where they have them (see `media.hints`).
        unequal_videos: False where all videos of a sample need the same number of frames.
    """

    def __init__(
        self,
        tokens: Mapping[str, str],
        *,
        image: PixelRule | SquareRule | AnyresRule | TileRule | None = None,
        video: VideoRule | None = None,
        audio: AudioRule | None = None,
        sampler: Sampler | None = None,
        sampling: Mapping[str, Any] | None = None,
        max_aspect_ratio: float | None = None,
        oracle: Any = None,
        trust_hints: bool = False,
        unequal_videos: bool = True,
    ) -> None:
        self.tokens, self.oracle = dict(tokens), oracle
        self.image, self.video, self.audio = image, video, audio
        self.trust_hints, self.max_aspect_ratio = trust_hints, max_aspect_ratio
        self._sampler, self._unequal_videos = sampler, unequal_videos
        names = {"fps": "sample_fps"}
        self._knobs = {names.get(name, name): value for name, value in (sampling or {}).items()}
        self._sampled: dict[tuple[int, float | None], I64] = {}

    @property
    def rate(self) -> int:
        """Hz that the processor takes audio in."""
        if self.audio is not None:
            return self.audio.rate
        return 16_000 if self.oracle is None else int(self.oracle.rate)

    def frames_of(self, frames: int, fps: float | None) -> I64:
        """Frame numbers that are taken of a video; all of a list of pictures (fps None).

        Raises:
            SampleError: `unsupported_media`, where the sampler finds none.
        """
        if fps is None or self._sampler is None:
            return np.arange(frames, dtype=np.int64)
        key = (frames, fps)
        if key not in self._sampled:
            if len(self._sampled) > _REMEMBERED:
                self._sampled.clear()
            self._sampled[key] = self._sampler(frames, fps)
        return self._sampled[key]

    def expand(
        self, samples: Mapping[int, Sequence[Part]], *, trusted: bool = True
    ) -> dict[int, Expansions | SampleError]:
        """Expansions of each sample's media by kind, in order of appearance, or its `SampleError`.

        Args:
            samples: any key -> the media parts of one sample.
            trusted: False looks at the media even where hints are trusted.
        """
        trust = self.trust_hints and trusted
        return {place: tried(self._expansions, parts, trust) for place, parts in samples.items()}

    def _expansions(self, parts: Sequence[Part], trust: bool) -> Expansions:
        """Those of one sample."""
        found: Expansions = {kind: [] for kind in self.tokens}
        sizes: list[tuple[int, int]] = []
        for part in parts:
            self._one(part, found, sizes, trust)
        counts = {item.costs.get("video_frames") for item in found.get("video", ())}
        if len(counts) > 1 and not self._unequal_videos:
            raise SampleError(
                "unsupported_media",
                f"the videos of the sample have {sorted(c or 0 for c in counts)} frames",
                hint="this processor takes several videos in a sample only with equally many frames each",
            )
        if sizes:
            found["image"] = [self._image(height, width, len(sizes)) for height, width in sizes]
        return found

    def _one(self, part: Part, found: Expansions, sizes: list[tuple[int, int]], trust: bool) -> None:
        kind = part["type"]
        header: Any = header_of(part, trust=trust)
        if kind == "image":
            sizes.append(self.size_of(part, header.height, header.width))
        elif kind == "audio":
            first, last = stretch(part, header.frames, header.sample_rate)
            if self.audio is not None:
                found[kind].append(self.audio.expand(last - first, header.sample_rate))
            else:
                found[kind].append(self.oracle.audio(header._replace(frames=last - first)))
        else:
            found[kind].append(self._video(part, header))

    def size_of(self, part: Part, height: int, width: int, frames: int = 1) -> tuple[int, int]:
        """(height, width) that a picture, or each of so many frames, has when the processor gets it.

        Raises:
            SampleError: `unsupported_media`: it is longer or narrower than `max_aspect_ratio`.
        """
        most = self.max_aspect_ratio
        if most is not None and max(height, width) > most * min(height, width):
            raise SampleError(
                "unsupported_media",
                f"a picture of {width}x{height} pixels has an aspect ratio above max_aspect_ratio {most:g}",
                hint="crop or drop it, or raise template.max_aspect_ratio",
            )
        rule: Any = self.image if part["type"] == "image" else getattr(self.video, "pixels", None)
        return sized(part, height, width, rule.factor if isinstance(rule, PixelRule) else 1, frames)

    def taken_of(self, part: Part, header: Any) -> tuple[I64, int, float | None]:
        """(numbers of the frames that are taken, frames of the stretch they are taken from, its rate).

        Raises:
            SampleError: a stretch or number of frames that the video does not have; a list of frames without
                a rate, where the model counts time.
        """
        rate = header.fps if header.fps is not None else part.get("fps")
        rule = self.video
        if rate is None and rule is not None and rule.timed:
            raise SampleError(
                "unsupported_media",
                "a list of frames has no rate, and the model counts time",
                hint='give "fps" beside the list, or frame_rate for all of them',
            )
        rate = None if rate is None else float(rate)
        if self._knobs and header.fps is not None:
            part = {**self._knobs, **part}
        first, last = stretch(part, header.frames, rate)
        temporal = 1 if rule is None else rule.temporal
        taken = chosen_frames(part, first, last, rate, temporal)
        if taken is None:
            taken = self.frames_of(last - first, header.fps) + first
        if rule is not None and rule.kind == "clip" and 0 < len(taken) < temporal:
            taken = np.concatenate([taken, np.repeat(taken[-1:], temporal - len(taken))])
        return taken, last - first, rate

    def _video(self, part: Part, header: Any) -> Expansion:
        taken, frames, fps = self.taken_of(part, header)
        clip = Clip(frames, fps, *self.size_of(part, header.height, header.width, len(taken)))
        if self.video is None:
            item: Expansion = self.oracle.video(clip, taken)
            return item
        sound = part.get("audio")
        if sound is None or self.audio is None:
            return self.video.expand(clip, taken)
        heard: Any = header_of({"type": "audio", "audio": sound})
        first, last = stretch(part, heard.frames, heard.sample_rate)
        return self.video.expand_with_sound(clip, taken, self.audio.expand(last - first, heard.sample_rate))

    def _image(self, height: int, width: int, together: int) -> Expansion:
        """One image; `together` is how many its sample has."""
        rule = self.image
        if isinstance(rule, PixelRule):
            high, wide = smart_resize(height, width, rule)
            return _grid(self.tokens["image"], high // rule.patch, wide // rule.patch, rule.merge)
        if height < 1 or width < 1:
            raise SampleError("unsupported_media", f"image of {width}x{height} pixels is empty")
        return self.oracle.image(height, width) if rule is None else rule.expand(height, width, together)

    def to_dict(self) -> dict[str, Any]:
        """The rules as plain JSON values."""
        rules = {"image": self.image, "video": self.video, "audio": self.audio}
        told = {kind: None if rule is None else asdict(rule) for kind, rule in rules.items()}
        plain: dict[str, Any] = json.loads(json.dumps(told))  # lists for tuples
        return plain if self.oracle is None else {**plain, "oracle": self.oracle.mode}
