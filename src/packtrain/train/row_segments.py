"""Segments of a row as attention kernels want them: offsets, the longest one, lengths.

They are read from what reaches a layer: restarting text positions, or offsets that a caller gives.
The first layer of a forward pass pays one device-to-host copy; the result stays with the tensor it
was read from, so that the other layers (and a recomputation for gradient checkpointing, which
brings the same tensor) pay nothing. A tensor changed in place is read again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..errors import IsolationError

__all__ = ["Segments", "of_lengths", "of_offsets", "of_positions"]

_KEPT = "_packtrain_segments"


@dataclass(frozen=True)
class Segments:
    """Attributes:
    lengths: tokens of every segment, in row order.
    cu: int32 [segments + 1] on the device of the tensors: 0, then running sums.
    longest: the longest segment.
    """

    lengths: tuple[int, ...]
    cu: torch.Tensor
    longest: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def of_positions(positions: torch.Tensor) -> Segments:
    """Segments of rows whose text positions [B,T] restart; every row starts a segment.

    Raises:
        IsolationError: `positions` is not [B,T] (mRoPE rows without the text row, for example).
    """
    if positions.ndim != 2:
        raise IsolationError(
            f"position_ids reach the attention as {list(positions.shape)}: samples cannot be told apart",
            hint="give restarting text positions [1,T]; for mRoPE models [4,1,T] with the text row first",
        )
    return _kept(positions, _read_positions)


def of_offsets(offsets: torch.Tensor) -> Segments:
    """Segments of running offsets [n + 1] (`cu_seq_lens`); empty ones are kept."""
    return _kept(offsets, _read_offsets)


def of_lengths(lengths: tuple[int, ...], device: torch.device) -> Segments:
    """Segments of known lengths."""
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return Segments(lengths, cu, max(lengths))


def _read_positions(positions: torch.Tensor) -> Segments:
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = torch.diff(positions, dim=-1) != 1
    edges = [*starts.flatten().nonzero().flatten().tolist(), positions.numel()]
    return of_lengths(tuple(b - a for a, b in itertools.pairwise(edges)), positions.device)


def _read_offsets(offsets: torch.Tensor) -> Segments:
    edges = offsets.tolist()
    lengths = tuple(b - a for a, b in itertools.pairwise(edges))
    if not lengths or edges[0] != 0 or min(lengths) < 0:
        raise IsolationError(
            f"sequence offsets {edges[:4]}… do not start at 0 and grow",
            hint="give int32 offsets 0, l1, l1+l2, …",
        )
    return Segments(lengths, offsets.to(torch.int32), max(lengths))


def _kept(tensor: torch.Tensor, read: object) -> Segments:
    if tensor.is_inference():  # such tensors do not say when they change
        return read(tensor)  # type: ignore[operator, no-any-return]
    kept = getattr(tensor, _KEPT, None)
    if kept is None or kept[0] != tensor._version:
        kept = (tensor._version, read(tensor))  # type: ignore[operator]
        setattr(tensor, _KEPT, kept)
    segments: Segments = kept[1]
    return segments
