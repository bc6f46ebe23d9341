"""Token counts of media for processors that no family describes: asked from the processor itself.

Three ways, the cheapest that is exact:

    api      its own `_get_num_multimodal_tokens`, used only after its answers for some images equalled
             those of real runs (up to one constant, the marks around a medium)
    probe    one real run per distinct size or length, on an empty picture or silence, then remembered
    encode   a full encoding of every sample, where a medium's tokens depend on more than its size: on the
             text around it or on other media of the sample. Slow, and said so in a warning.

What a medium adds is measured against the same text without it, in several surroundings, before anything is
counted with it. Trade-off: a probe runs on an even picture, so a processor whose count depends on what is
in the picture is found by the audit only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError, SampleError, one_line
from .expansion import Expansion
from .video_tokens import Clip, facts_of, handed_over

logger = logging.getLogger(__name__)

#: Sizes (height, width) with which the library's count is compared.
PROBES = ((64, 48), (37, 411), (640, 480), (480, 1000), (333, 334), (1200, 200))

_TOGETHER = 5  # media of one sample that are tried at most
_SURROUNDINGS = (("", ""), ("a ", " b"), ("\n", "\n"), ("word", "word"), (" ", "\n\n"))
_NAMES = {"image": "images", "video": "videos", "audio": "audio"}


class Oracle:
    """Counts of one processor.

    Args:
        processor: a loaded processor.
        tokenizer: its tokenizer.
        tokens: kind -> placeholder in the rendered text.

    Attributes:
        mode: `api`, `probe` or `encode`.
    """

    def __init__(self, processor: Any, tokenizer: Any, tokens: Mapping[str, str]) -> None:
        self.processor, self.tokenizer, self.tokens = processor, tokenizer, dict(tokens)
        self.nested, self._constant = False, 0
        self._known: dict[tuple[Any, ...], int] = {}
        self.mode = self._choose()
        name = type(processor).__name__
        if self.mode == "encode":
            logger.warning(
                "%s: tokens of a medium depend on more than its size, so every sample is encoded to be "
                "measured; this is slow",
                name,
            )
        else:
            logger.warning("no family describes %s; its media are counted by asking it (%s)", name, self.mode)

    # ------------------------------------------------------------------------------------------
    def image(self, height: int, width: int) -> Expansion:
        """One image."""
        return self._expansion("image", (height, width), {"images": 1})

    def video(self, clip: Clip, taken: Any) -> Expansion:
        """One video of which the frames `taken` go to the processor."""
        shape = (clip.height, clip.width, clip.frames, clip.fps, tuple(taken.tolist()))
        return self._expansion("video", shape, {"video_frames": len(taken)})

    def audio(self, header: Any) -> Expansion:
        """One clip, told by its header."""
        samples = -(-header.frames * self.rate // header.sample_rate)
        return self._expansion("audio", (samples,), {"audio_samples": samples})

    @property
    def rate(self) -> int:
        """Hz the processor takes audio in."""
        return int(getattr(getattr(self.processor, "feature_extractor", None), "sampling_rate", 16_000))

    def _expansion(self, kind: str, shape: tuple[Any, ...], costs: dict[str, int]) -> Expansion:
        key = (kind, *shape)
        if self.mode == "api" and kind == "image" and key not in self._known:
            self._known[key] = self._asked(*shape) + self._constant
        count = 1 if self.mode == "encode" else self._probed(kind, shape)
        return Expansion(self.tokens[kind], (count,), costs)

    # ------------------------------------------------------------------------------------------
    def _choose(self) -> str:
        kinds = [kind for kind in self.tokens if kind != "video"] or list(self.tokens)
        for kind in kinds:
            if not self._additive(kind):
                return "encode"
        if "image" not in self.tokens or not hasattr(self.processor, "_get_num_multimodal_tokens"):
            return "probe"
        try:
            differences = {self._probed("image", size) - self._asked(*size) for size in PROBES}
        except Exception:
            return "probe"
        if len(differences) != 1:
            logger.warning(
                "%s._get_num_multimodal_tokens does not agree with the processor; it is not used",
                type(self.processor).__name__,
            )
            return "probe"
        self._constant = differences.pop()
        return "api"

    def _additive(self, kind: str) -> bool:
        """Whether a medium adds as many tokens in any surroundings, and beside one to four others."""
        token = self.tokens[kind]
        found = self.tokenizer.convert_tokens_to_ids(token)
        if not isinstance(found, int) or found == self.tokenizer.unk_token_id:
            return False
        one, other = ((150, 200), (330, 90)) if kind == "image" else ((24_000,), (40_000,))
        try:
            alone = self._probed(kind, one)
        except Exception:
            self.nested = True
            alone = self._probed(kind, one)
        for before, after in _SURROUNDINGS:
            if self._added(f"{before}{token}{after}", kind, [one]) != alone:
                return False
        try:
            return self._adds_up(kind, (one, other))
        except SampleError:  # it takes no media of unlike sizes together
            return self._adds_up(kind, (one, one))

    def _adds_up(self, kind: str, pair: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
        """Whether up to `_TOGETHER` media, in turn of two shapes, add what they add alone."""
        for number in range(2, _TOGETHER + 1):
            shapes = [pair[place % 2] for place in range(number)]
            together = self._added(" and ".join([self.tokens[kind]] * number), kind, shapes)
            if together != sum(self._probed(kind, shape) for shape in shapes):
                return False
        return True

    def _asked(self, height: int, width: int) -> int:
        data = self.processor._get_num_multimodal_tokens(image_sizes=[[height, width]])
        return int(data["num_image_tokens"][0])

    def _probed(self, kind: str, shape: tuple[Any, ...]) -> int:
        key = (kind, *shape)
        if key not in self._known:
            self._known[key] = self._added(self.tokens[kind], kind, [shape])
        return self._known[key]

    def _added(self, text: str, kind: str, shapes: Sequence[tuple[Any, ...]]) -> int:
        """Tokens of a text with media, less those of the same text with bare placeholders, plus these."""
        inputs: dict[str, Any] = {_NAMES[kind]: [_empty(kind, shape) for shape in shapes]}
        if kind == "image" and self.nested:
            inputs["images"] = [inputs["images"]]
        if kind == "video":
            clips = ((Clip(frames, fps, high, wide), taken) for high, wide, frames, fps, taken in shapes)
            inputs["videos_kwargs"] = handed_over([facts_of(*one) for one in clips])
        if kind == "audio":
            inputs["sampling_rate"] = self.rate
        try:
            batch = self.processor(text=[text], add_special_tokens=False, return_tensors="np", **inputs)
        except (ValueError, IndexError, ZeroDivisionError, RuntimeError) as error:
            raise SampleError(
                "unsupported_media",
                f"{type(self.processor).__name__} refuses {kind}s of {shapes}: {one_line(error, 200)}",
                hint="crop, resample or drop it",
            ) from error
        except TypeError as error:
            raise ConfigError(
                f"{type(self.processor).__name__} cannot be called with text and {_NAMES[kind]}: {error}",
                hint="describe it by a family, or measure with a template of your own",
            ) from error
        bare = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return len(batch["input_ids"][0]) - len(bare) + len(shapes)


def _empty(kind: str, shape: tuple[Any, ...]) -> Any:
    if kind == "audio":
        return np.zeros(shape[0], dtype=np.float32)
    if kind == "video":
        return np.zeros((len(shape[4]), shape[0], shape[1], 3), dtype=np.uint8)
    from PIL import Image

    return Image.new("RGB", (shape[1], shape[0]), (127, 127, 127))
