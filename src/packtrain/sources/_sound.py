"""Decoded sound as a WAVE file in memory: float32 samples, as they are."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ..errors import SampleError


def wave_of(array: Any, rate: Any, what: str) -> bytes:
    """A WAVE file of samples.

    Args:
        array: [frames], [channels, frames] or [frames, channels] numbers; the longer axis is time.
        rate: Hz.
        what: the medium, for errors.

    Raises:
        SampleError: malformed_record.
    """
    try:
        samples = np.asarray(array, dtype="<f4")
        hertz = int(rate)
    except (TypeError, ValueError):
        raise SampleError("malformed_record", f"{what} has an array that is no sound") from None
    if samples.ndim not in (1, 2) or not samples.size or hertz < 1:
        raise SampleError("malformed_record", f"{what} has sound of shape {list(samples.shape)} at {rate} Hz")
    samples = samples[:, None] if samples.ndim == 1 else samples
    if samples.shape[1] > samples.shape[0]:
        samples = samples.T
    data = np.ascontiguousarray(samples).tobytes()
    channels = samples.shape[1]
    form = struct.pack("<HHIIHH", 3, channels, hertz, hertz * channels * 4, channels * 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body
