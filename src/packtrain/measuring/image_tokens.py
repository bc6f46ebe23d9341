"""Image tokens from sizes alone: the resize arithmetic of the Qwen-VL image processors.

An image of height x width is scaled so that both sides are multiples of `factor = patch * merge`
and the area lies within the processor's limits; the tower sees (H / patch) * (W / patch) patches and
the language model one token per merge * merge of them. The arithmetic is the processor's own, bit for
bit; tests compare both.

Trade-off: only this rule is known here. A processor whose real counts differ (a limit it accepts but
does not read, a subclass with its own rule) is found by `verify_limits`, not by this arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, SampleError
from ..media.knobs import within

#: The processors refuse images whose longer side is more than this many times the shorter one.
MAX_ASPECT = 200

#: Area of the largest image `verify_limits` runs through the real processor.
_PROBE_PIXELS = 4_000_000


@dataclass(frozen=True, kw_only=True)
class PixelRule:
    """The effective settings of an image processor that decide how many tokens an image takes.

    Attributes:
        patch: side of a patch in pixels.
        merge: patches per token along each side.
        minimum, maximum: limits of the area in pixels after scaling.
        resize: False when the processor leaves sizes alone.
    """

    patch: int
    merge: int
    minimum: int
    maximum: int
    resize: bool = True

    @property
    def factor(self) -> int:
        return self.patch * self.merge

    def check(self, kind: str) -> PixelRule:
        """This rule, where there are pictures inside of its limits; ConfigError otherwise."""
        if self.patch < 1 or self.merge < 1 or not 0 < self.minimum <= self.maximum:
            raise ConfigError(
                f"{kind} processor settings are impossible: {self}", hint="check its size settings"
            )
        return self


def rule_of(image_processor: Any, *, size: Any = None) -> PixelRule:
    """Read the effective settings from the processor object that will be used.

    Args:
        image_processor: an image or video processor.
        size: limits that have precedence over its own.

    Raises:
        ConfigError: the object has no such settings, so it follows another rule.
    """
    size = size or getattr(image_processor, "size", None)
    try:
        size = dict(size or {})
        return PixelRule(
            patch=int(image_processor.patch_size),
            merge=int(image_processor.merge_size),
            minimum=int(size["shortest_edge"]),
            maximum=int(size["longest_edge"]),
            resize=bool(getattr(image_processor, "do_resize", True)),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{type(image_processor).__name__} has no patch_size, merge_size and pixel limits",
            hint="use the image processor that belongs to the model family",
        ) from None


def smart_resize(height: int, width: int, rule: PixelRule) -> tuple[int, int]:
    """Height and width in pixels after scaling.

    Raises:
        SampleError: `unsupported_media`, for an empty image or one longer than 200 times its width.
    """
    problem = _refusal(height, width, rule)
    if problem is not None:
        raise SampleError("unsupported_media", problem, hint="crop or drop the image")
    if not rule.resize:
        return height, width
    factor = rule.factor
    high = round(height / factor) * factor
    wide = round(width / factor) * factor
    return within(height, width, factor, high * wide, rule.minimum, rule.maximum) or (high, wide)


def _refusal(height: int, width: int, rule: PixelRule) -> str | None:
    """Why the processor cannot take an image of this size, or None."""
    if height < 1 or width < 1:
        return f"image of {width}x{height} pixels is empty"
    if rule.resize:
        if max(height, width) / min(height, width) > MAX_ASPECT:
            return f"image of {width}x{height} pixels has an aspect ratio above {MAX_ASPECT}"
    elif height % rule.factor or width % rule.factor:
        return (
            f"image of {width}x{height} pixels is not a multiple of {rule.factor} and the processor does "
            "not resize"
        )
    return None


def verify_limits(
    real_tokens: Callable[[int, int], int],
    rule: PixelRule,
    *,
    probes: Sequence[tuple[int, int]] | None = None,
) -> dict[tuple[int, int], int]:
    """Check on probe images that the limits we count with are those the processor really applies.

    Args:
        real_tokens: (height, width) -> tokens after running the real processor on such an image.
        rule: what the lengths are computed with.
        probes: sizes to try; by default one image under the lower limit, one between the limits and
            one over the upper limit (at most 4 megapixels, so that start-up stays fast).

    Returns:
        size -> tokens of each probe.

    Raises:
        ConfigError: a count differs; the message names the limit that is in effect.
    """
    seen: dict[tuple[int, int], int] = {}
    for height, width in _default_probes(rule) if probes is None else probes:
        high, wide = smart_resize(height, width, rule)
        expected = high * wide // rule.factor**2
        real = int(real_tokens(height, width))
        if real != expected:
            raise ConfigError(
                f"pixel limits are not in effect: an image of {width}x{height} takes {real} tokens "
                f"(about {real * rule.factor**2} pixels), {expected} were expected under "
                f"{rule.minimum}..{rule.maximum} pixels",
                hint="set the limits with load_processor(..., max_pixels=...) or in processor_config.json",
            )
        seen[height, width] = real
    return seen


def _default_probes(rule: PixelRule) -> list[tuple[int, int]]:
    def shape(pixels: float) -> tuple[int, int]:
        height = max(1, int(math.sqrt(pixels * 3 / 4)))
        return height, max(1, int(pixels / height))

    if not rule.resize:
        return [(rule.factor, 2 * rule.factor)]
    middle = min(math.sqrt(rule.minimum * rule.maximum), 1_000_000)
    return [shape(rule.minimum / 3), shape(middle), shape(min(rule.maximum * 1.7, _PROBE_PIXELS))]
