"""Sound at another rate: a windowed-sinc low-pass filter, one tap row per output phase.

The output has `ceil(frames * new / old)` samples, the number that measuring counts with.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["mono", "resample"]

F32 = NDArray[np.float32]

_ZEROS = 16  # zero crossings of the sinc on each side
_ROLLOFF = 0.97


def mono(samples: F32) -> F32:
    """Mean over channels: float32[frames, channels] -> float32[frames]."""
    return samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)


def resample(samples: F32, old: int, new: int) -> F32:
    """float32[frames] at `old` Hz -> float32[ceil(frames * new / old)] at `new` Hz."""
    if old == new or not len(samples):
        return samples
    import torch

    shared = math.gcd(old, new)
    down, up = old // shared, new // shared
    cutoff = min(down, up) * _ROLLOFF
    reach = math.ceil(_ZEROS * down / cutoff)
    taps = torch.arange(-reach, reach + down, dtype=torch.float64)[None] / down
    time = (taps - torch.arange(up, dtype=torch.float64)[:, None] / up) * cutoff
    window = torch.cos(time.clamp(-_ZEROS, _ZEROS) * math.pi / _ZEROS / 2) ** 2
    kernel = (torch.sinc(time) * window * (cutoff / down)).float()[:, None]
    wanted = -(-len(samples) * new // old)
    padded = torch.nn.functional.pad(torch.from_numpy(samples)[None, None], (reach, reach + down))
    out = torch.nn.functional.conv1d(padded, kernel, stride=down)[0]
    found: F32 = out.T.reshape(-1)[:wanted].contiguous().numpy()
    return found
