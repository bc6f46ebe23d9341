"""Image tokens of processors that cut images into crops: one square, crops on a grid, or tiles.

`SquareRule` (LLaVA-1.5) takes every image to one size. `AnyresRule` (LLaVA-NeXT, LLaVA-OneVision) fits it
into the best of some grids, cuts the padding away again and adds a token per row and the image as a whole.
`TileRule` (InternVL) chooses the grid of tiles nearest to its shape and adds a thumbnail. The operations
are those of the processors in the same order, so counts agree to the last token; sizes are remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import ConfigError
from .expansion import Expansion

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
