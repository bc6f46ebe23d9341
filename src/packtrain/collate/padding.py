"""Padding inside segments (context parallelism), and what follows from it.

Context parallelism over N ranks cuts every segment into 2 N equal chunks; rank r computes chunks r and
2 N - 1 - r, so that causal work is even. A segment is therefore padded to a multiple of 2 N *inside
itself*: pad tokens go on in its positions, are not trained and stand after its real tokens, so no real
token attends to them. A plan counts them with `multiple_of=segment_multiple(N)`; a row then never
grows past `pack_length`.

    lengths            padded, they sum to T             cu_seqlens_q_padded
    unpadded           as encoded                        cu_seqlens_q
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..errors import InputError, counted
from .fields import Segment


def segment_multiple(context_parallel: int) -> int:
    """What every segment is padded to a multiple of; give it to `packtrain.plan` as `multiple_of`."""
    return 2 * context_parallel if context_parallel > 1 else 1


def full(length: int, value: int | float) -> torch.Tensor:
    """`length` pad values; an int makes int64, a float float32."""
    return torch.full((length,), value, dtype=torch.float32 if isinstance(value, float) else torch.int64)


def pad_segments(
    segments: Sequence[Segment], multiple: int, token_fields: Mapping[str, int | float]
) -> list[Segment]:
    """Segments of a length divisible by `multiple`; given ones are not changed."""
    if multiple == 1:
        return list(segments)
    return [_padded(segment, -segment.length % multiple, token_fields) for segment in segments]


def _padded(segment: Segment, more: int, token_fields: Mapping[str, int | float]) -> Segment:
    if not more:
        return segment
    positions = segment.positions
    if positions is not None:
        steps = torch.arange(1, more + 1)
        positions = torch.cat([positions, positions[..., -1:] + steps], dim=-1)
    return replace(
        segment,
        length=segment.length + more,
        tokens={
            name: torch.cat([values, full(more, token_fields[name])])
            for name, values in segment.tokens.items()
        },
        positions=positions,
    )


def padding_mask(lengths: Sequence[int], real: Sequence[int]) -> torch.Tensor:
    """bool [1,T], True on padding (Megatron's convention for mixture-of-experts routers).

    Args:
        lengths: tokens of each segment in the row.
        real: how many of them, from the front, are data.
    """
    flags = np.tile([False, True], len(lengths))
    counts = [count for length, own in zip(lengths, real, strict=True) for count in (own, length - own)]
    return torch.from_numpy(np.repeat(flags, counts))[None]


def context_parallel_index(lengths: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """int64 [T / size]: places of the row that `rank` computes, per segment chunks r and 2 N - 1 - r.

    Raises:
        InputError: a segment does not divide into 2 N chunks, or no such rank.
    """
    if not 0 <= rank < size:
        raise InputError(f"rank {rank} of a context-parallel group of {size}")
    if size == 1:
        return torch.arange(sum(lengths))
    parts, start = [], 0
    for length in lengths:
        chunk, left = divmod(length, 2 * size)
        if left:
            raise InputError(
                f"a segment of {length} tokens does not divide into {counted(2 * size, 'chunks')}",
                hint=f"collate with context_parallel={size}",
            )
        for number in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return torch.cat(parts)
