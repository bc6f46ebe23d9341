"""Short videos that tests make."""

from __future__ import annotations

import io
from functools import cache

import av
import numpy as np


@cache
def video(container: str, codec: str, turn: int = 0, frames: int = 30, rate: int = 10) -> bytes:
    """A video whose left half is dark, so that turns can be told from its pixels."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        if turn:
            stream.set_display_rotation(turn)
        file.start_encoding()
        for number in range(frames):
            pixels = np.full((48, 64, 3), 200, np.uint8)
            pixels[:, :32] = number % 60
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        if frames:
            file.mux(stream.encode(None))
    return out.getvalue()
