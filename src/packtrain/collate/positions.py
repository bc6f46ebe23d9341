"""Positions of a row: those of each sample alone, laid end to end.

sdpa and eager derive their block mask from the text row alone: a step other than 1 begins a segment.
So the text row must step by 1 inside every segment and by anything else at every boundary; this is
asserted on the whole row at once.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InputError
from .fields import IGNORE, Segment

__all__ = ["check_labels", "check_starts", "join_positions"]


def join_positions(segments: Sequence[Segment], mrope: bool, tail: int) -> torch.Tensor:
    """int64 [1,T], or with mRoPE [4,1,T]: text row, then t, h, w. A tail counts 0, 1, 2, … in all rows.

    Raises:
        InputError: a sample's text positions do not step by 1, or run on from the sample before.
    """
    lengths = [segment.length for segment in segments] + ([tail] if tail else [])
    if not mrope and all(segment.positions is None for segment in segments):
        return torch.from_numpy(_counted(lengths))[None]
    count = torch.arange(max(lengths))
    given = [segment.positions for segment in segments] + ([None] if tail else [])
    if not mrope and all(own is not None and own.ndim == 1 for own in given[: len(segments)]):
        row = torch.cat(
            [count[:length] if own is None else own for own, length in zip(given, lengths, strict=True)]
        )
        _check_steps(row, lengths, segments)
        return row[None]
    text = [
        count[:length] if own is None or (own.ndim == 2 and own.shape[0] == 3) else own.reshape(-1, length)[0]
        for own, length in zip(given, lengths, strict=True)
    ]
    row = torch.cat(text)
    _check_steps(row, lengths, segments)
    if not mrope:
        return row[None]
    axes = [
        part.expand(3, -1) if own is None or own.ndim == 1 else own[-3:]
        for own, part in zip(given, text, strict=True)
    ]
    return torch.cat([row[None], torch.cat(axes, dim=1)])[:, None]


def _counted(lengths: Sequence[int]) -> NDArray[np.int64]:
    """0, 1, 2, … anew in every segment: what `_check_steps` asks for, by construction."""
    sizes = np.array(lengths, dtype=np.int64)
    ends = sizes.cumsum()
    return np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)


def check_starts(positions: torch.Tensor, starts: NDArray[np.int32], segments: Sequence[Segment]) -> None:
    """Every segment begins at the same position: for models that get no `cu_seq_lens_q`.

    The flash path of transformers then takes each place with the smallest position of the row for a
    boundary, so a segment that begins higher is joined to the one before it.

    Raises:
        InputError: two segments of the row begin at different positions.
    """
    first = positions.reshape(-1, positions.shape[-1])[0].numpy()[starts]
    other = first != first[0]
    if not other.any():
        return
    at = int(other.argmax())
    where = segments[at].where if at < len(segments) else "the pad tail"
    raise InputError(
        f"positions of {where} start at {int(first[at])}, those of {segments[0].where} at {int(first[0])}",
        hint="begin every sample at 0: this model is told its boundaries by positions alone",
    )


def check_labels(labels: torch.Tensor, lengths: Sequence[int], segments: Sequence[Segment]) -> None:
    """A label is a token id or -100; another negative one ends a GPU run with an assertion of the device.

    Raises:
        InputError: names the sample, the token and the label.
    """
    array = labels.numpy()
    wrong = (array < 0) & (array != IGNORE)
    if not wrong.any():
        return
    at = int(wrong.argmax())
    ends = list(itertools.accumulate(lengths))
    index = bisect.bisect_right(ends, at)
    place = at - ends[index] + lengths[index]
    raise InputError(
        f"{segments[index].where}: the label of token {place} is {int(labels[at])}",
        hint=f"a token that is not trained has the label {IGNORE}",
    )


def _check_steps(row: torch.Tensor, lengths: list[int], segments: Sequence[Segment]) -> None:
    ends = list(itertools.accumulate(lengths))
    breaks: list[int] = ((row[1:] - row[:-1] != 1).nonzero().flatten() + 1).tolist()
    if breaks == ends[:-1]:
        return
    at = min(set(breaks) ^ set(ends[:-1]))
    index = bisect.bisect_right(ends, at)
    start = ends[index - 1] if index else 0
    before, here = int(row[at - 1]), int(row[at])
    where = segments[index].where if index < len(segments) else "the pad tail"
    if at == start:
        raise InputError(
            f"positions of {where} start at {here}, right after those of {segments[index - 1].where}",
            hint="positions restart in every sample; otherwise transformers joins the two samples",
        )
    raise InputError(
        f"{where}: text positions go from {before} to {here} at token {at - start}",
        hint="an already packed row loses its boundaries here; hand over its samples one by one",
    )
