"""What a header parser answers: the stored size, how the picture is turned, whether the end is there."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Parsed"]


class Parsed(NamedTuple):
    """Header facts before orientation is applied.

    Attributes:
        width: stored width in pixels.
        height: stored height in pixels.
        orientation: EXIF orientation 1..8.
        complete: the structure reaches its end marker. False means *suspicious*, not broken: some
            decoders get by without the marker.
    """

    width: int
    height: int
    orientation: int = 1
    complete: bool = True
