"""Image tokens from sizes alone: the resize arithmetic of the Qwen-VL image processors, and those that cut.

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
from functools import lru_cache
from typing import Any

from ..errors import ConfigError, SampleError
from ..media.knobs import within
from .expansion import Expansion

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


# --------------------------------------------------------------------------------------------
# Processors that cut images into crops: one square, crops on a grid, or tiles
# --------------------------------------------------------------------------------------------
# `SquareRule` (LLaVA-1.5) takes every image to one size. `AnyresRule` (LLaVA-NeXT, LLaVA-OneVision) fits it
# into the best of some grids, cuts the padding away again and adds a token per row and the image as a whole.
# `TileRule` (InternVL) chooses the grid of tiles nearest to its shape and adds a thumbnail. The operations
# are those of the processors in the same order, so counts agree to the last token; sizes are remembered.
_REMEMBERED = 65_536  # sizes


@dataclass(frozen=True, kw_only=True)
class SquareRule:
    """All images take `count` tokens."""

    token: str
    count: int

    def expand(self, height: int, width: int, together: int = 1) -> Expansion:
        """One image; `together` is how many its sample has."""
        return Expansion(self.token, (self.count,), {"images": 1, "patches": 1})


@dataclass(frozen=True, kw_only=True)
class AnyresRule:
    """An image on the best of some grids.

    Attributes:
        token: the image token.
        grids: (height, width) in pixels of the possible grids, in the processor's order.
        crop: side of a crop in pixels.
        side: features along each side of a crop.
        base: features of the image as a whole.
        minus: 1 where one feature is left out (`default` selection strategy).
        most: crops that features may fill before they are pooled (`anyres_max_9`: 9), or None.
        alone: True where only a single image of a sample is cut (LLaVA-OneVision).
    """

    token: str
    grids: tuple[tuple[int, int], ...]
    crop: int
    side: int
    base: int
    minus: int = 0
    most: int | None = None
    alone: bool = False

    def expand(self, height: int, width: int, together: int = 1) -> Expansion:
        """One image; `together` is how many its sample has."""
        return _anyres(self, height, width, self.alone and together > 1)

    def best(self, height: int, width: int) -> tuple[int, int]:
        """The grid that keeps most of the image, and among those the one that wastes least."""
        chosen, most, least = self.grids[0], 0, math.inf
        for high, wide in self.grids:
            scale = min(wide / width, high / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            wasted = wide * high - kept
            if kept > most or (kept == most and wasted < least):
                chosen, most, least = (high, wide), kept, wasted
        return chosen


@lru_cache(maxsize=_REMEMBERED)
def _anyres(rule: AnyresRule, height: int, width: int, plain: bool) -> Expansion:
    if plain:
        return Expansion(rule.token, (rule.base + 1 - rule.minus,), {"images": 1, "patches": 1})
    high, wide = rule.best(height, width)
    rows, columns = high // rule.crop, wide // rule.crop
    h, w = rule.side * rows, rule.side * columns
    if width / height > w / h:
        h -= (h - int(round(height * (w / width), 7))) // 2 * 2
    else:
        w -= (w - int(round(width * (h / height), 7))) // 2 * 2
    features, newlines = h * w, h
    if rule.most is not None:
        ratio = math.sqrt(h * w / (rule.most * rule.side**2))
        if ratio > 1.1:
            newlines = int(h // ratio)
            features = newlines * int(w // ratio)
    count = features + newlines + rule.base - rule.minus
    return Expansion(rule.token, (count,), {"images": 1, "patches": 1 + rows * columns})


@dataclass(frozen=True, kw_only=True)
class TileRule:
    """An image as tiles of one size.

    Attributes:
        token: the image token; `marks` stand around its run.
        tile: (height, width) of a tile in pixels.
        least, most: how many tiles there may be.
        count: tokens of a tile.
        crop: False where the processor takes the whole image as one tile.
    """

    token: str
    marks: tuple[str, str]
    tile: tuple[int, int]
    least: int
    most: int
    count: int
    crop: bool = True

    def expand(self, height: int, width: int, together: int = 1) -> Expansion:
        """One image; `together` is how many its sample has."""
        return _tiled(self, height, width)

    def tiles(self, height: int, width: int) -> int:
        """Tiles of an image, with its thumbnail."""
        if not self.crop or self.most <= 1:
            return 1
        aspect, area = width / height, width * height
        nearest, chosen = math.inf, (1, 1)
        for across, down in _arrangements(self.least, self.most):
            away = abs(aspect - across / down)
            if away < nearest:
                nearest, chosen = away, (across, down)
            elif away == nearest and area > 0.5 * self.tile[0] * self.tile[1] * across * down:
                chosen = (across, down)
        number = chosen[0] * chosen[1]
        return number + 1 if number > 1 else 1


@lru_cache(maxsize=64)
def _arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """(tiles across, tiles down), fewest tiles first."""
    sides = range(1, most + 1)
    found = [(across, down) for across in sides for down in sides if least <= across * down <= most]
    return tuple(sorted(found, key=lambda pair: pair[0] * pair[1]))


@lru_cache(maxsize=_REMEMBERED)
def _tiled(rule: TileRule, height: int, width: int) -> Expansion:
    number = rule.tiles(height, width)
    begin, end = rule.marks
    return Expansion(f"{begin}{rule.token}{end}", (number * rule.count,), {"images": 1, "patches": number})


# ----------------------------------------------------------------------------------------------
def crop_rule(
    processor: Any, kind: str, token: str, options: dict[str, Any]
) -> SquareRule | AnyresRule | TileRule:
    """Read a rule from a processor.

    Args:
        processor: a loaded processor.
        kind: the family's `image_rule`.
        token: its image token.
        options: what the processor itself hands to its image processor (`images_kwargs`).

    Raises:
        ConfigError: it has no such settings.
    """
    try:
        if kind == "square":
            return _square(processor, token)
        return _anyres_rule(processor, token) if kind == "anyres" else _tile_rule(processor, token, options)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{type(processor).__name__} has no settings of an image rule {kind!r}",
            hint="use the processor that belongs to the model family",
        ) from None


def _square(processor: Any, token: str) -> SquareRule:
    high, wide = _output_size(processor.image_processor, fixed=True)
    patch = int(processor.patch_size)
    count = (high // patch) * (wide // patch) + int(processor.num_additional_image_tokens)
    return SquareRule(token=token, count=count - _minus(processor))


def _anyres_rule(processor: Any, token: str) -> AnyresRule:
    image = processor.image_processor
    high, wide = _output_size(image, fixed=False)
    if high != wide:
        raise ValueError
    grids = tuple((int(h), int(w)) for h, w in image.image_grid_pinpoints)
    if hasattr(processor, "vision_aspect_ratio"):  # features per crop are given, and pooled
        base = int(processor.num_image_tokens)
        side = int(math.sqrt(base))
        most: int | None = int(processor.vision_aspect_ratio.removeprefix("anyres_max_"))
    else:
        side = high // int(processor.patch_size)
        base, most = side * side + int(processor.num_additional_image_tokens), None
    return AnyresRule(
        token=token,
        grids=grids,
        crop=high,
        side=side,
        base=base,
        minus=_minus(processor),
        most=most,
        alone=most is not None,
    )


def _tile_rule(processor: Any, token: str, options: dict[str, Any]) -> TileRule:
    image = processor.image_processor
    size = dict(image.size)
    return TileRule(
        token=token,
        marks=(str(processor.start_image_token), str(processor.end_image_token)),
        tile=(int(size["height"]), int(size["width"])),
        least=int(image.min_patches),
        most=int(image.max_patches),
        count=int(processor.image_seq_length),
        crop=bool(options.get("crop_to_patches", image.crop_to_patches)),
    )


def _output_size(image: Any, *, fixed: bool) -> tuple[int, int]:
    """(height, width) of the crops that an image processor puts out."""
    size = dict(image.size or {})
    if getattr(image, "do_center_crop", None):
        size = dict(image.crop_size)
    if size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    if fixed:  # without a crop the output keeps the shape of the image
        raise ValueError
    return int(size["shortest_edge"]), int(size["shortest_edge"])


def _minus(processor: Any) -> int:
    return int(processor.vision_feature_select_strategy == "default")
