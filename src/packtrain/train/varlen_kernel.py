"""One attention over segments: torch's variable-length kernel, or every segment by itself.

    kernel        CUDA (8.0 and later), bfloat16 or float16, head size a multiple of 8 up to 256:
                  `torch.nn.attention.varlen`, one launch, no mask, work of sum(l^2)
    per segment   everything else (CPU, float32, float64): scaled_dot_product_attention once for each
                  segment. Exact and differentiable anywhere; slow for many segments on a GPU

The kernel's signature differs between torch versions (2.11: grouped heads without a flag; 2.13 asks
for `enable_gqa`); it is read from the function, not guessed from the version.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch
from torch.nn import functional

from .segments import Segments

__all__ = ["attend", "kernel_available", "kernel_takes"]

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float | None,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention inside every segment.

    Args:
        query: [T, heads, size].
        key: [T, kv heads, size].
        value: [T, kv heads, value size].
        segments: of the T tokens.
        causal: a token sees itself and what is before it; else its whole segment.
        scale: of the scores; None: 1 / sqrt(size).
        window: a token sees this many tokens, itself included (causal only).
        dropout: of the attention weights; 0 for the kernel.

    Returns:
        [T, heads, value size].
    """
    window = None if window is None or window >= segments.longest else window
    if dropout == 0.0 and kernel_takes(query, value):
        return kernel(
            query, key, value, segments.cu, segments.longest, causal=causal, scale=scale, window=window
        )
    if query.is_cuda:
        _tell_once(str(query.dtype), int(query.shape[-1]))
    parts = [
        _alone(q, k, v, causal=causal, scale=scale, window=window, dropout=dropout)
        for q, k, v in zip(
            *(tensor.split([n for n in segments.lengths if n]) for tensor in (query, key, value)),
            strict=True,
        )
    ]
    return torch.cat(parts)


#: torch's function, whether it has `enable_gqa`, and whether a GPU here runs it; read once.
_FUNCTION: Any = None
_HAS_GQA = False
_AVAILABLE: bool | None = None


def kernel_available() -> bool:
    """Has this torch a variable-length kernel, and this machine a GPU that runs it?"""
    global _FUNCTION, _HAS_GQA, _AVAILABLE
    if _AVAILABLE is None:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            names: Any = ()
        else:
            names = inspect.signature(varlen_attn).parameters
            _FUNCTION, _HAS_GQA = varlen_attn, "enable_gqa" in names
        known = "window_size" in names and "scale" in names
        _AVAILABLE = known and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return _AVAILABLE


def kernel_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Will `attend` use the kernel for these tensors?"""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _HALF
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= _LARGEST_HEAD
        and kernel_available()
    )


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu: torch.Tensor,
    longest: int,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """torch's kernel for segments of offsets `cu` int32 [segments + 1], none longer than `longest`."""
    left = -1 if window is None else window - 1
    more = {"enable_gqa": True} if _HAS_GQA and query.shape[1] != key.shape[1] else {}
    out: torch.Tensor = _FUNCTION(
        query,
        key,
        value,
        cu,
        cu,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0) if causal else (-1, -1),
        **more,
    )
    return out


def _alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    """One segment [l, heads, size], as torch's scaled_dot_product_attention computes it."""
    length = query.shape[0]
    mask = None
    if causal and window is not None and length > window:
        places = torch.arange(length, device=query.device)
        gap = places[:, None] - places[None, :]
        mask = (gap >= 0) & (gap < window)
    made = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None and length > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return made[0].transpose(0, 1)


@functools.lru_cache(maxsize=8)
def _tell_once(dtype: str, size: int) -> None:
    logger.warning("varlen runs segment by segment here: no kernel for %s with heads of %d", dtype, size)
