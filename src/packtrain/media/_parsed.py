"""What a header parser answers: the stored size, how the picture is turned, whether the end is there."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Parsed", "ParsedAudio"]


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


class ParsedAudio(NamedTuple):
    """Header facts of a sound file.

    Attributes:
        frames: samples per channel that a decoder gives.
        sample_rate: Hz.
        channels: 1 or more.
        complete: the file holds all the samples its header speaks of.
    """

    frames: int
    sample_rate: int
    channels: int
    complete: bool = True
