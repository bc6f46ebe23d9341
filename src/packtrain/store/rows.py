"""Values of the samples of a pack as one value of its row: joined along an axis, or a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def joined(name: str, values: list[Any], lengths: Sequence[int]) -> Any:
    """One value of a row.

    Args:
        name: of the field.
        values: one per sample, None where a sample lacks it.
        lengths: tokens of each sample.

    Returns:
        Arrays or tensors joined along the tokens (a value per token, and `position_ids` [3,T]) or along their
        first axis (media); `values` as they are where they do not join.
    """
    given = [value for value in values if value is not None]
    shaped = bool(given) and all(hasattr(value, "shape") and len(value.shape) for value in given)
    if not shaped or len({type(value) for value in given}) > 1 or len({v.dtype for v in given}) > 1:
        return values
    per_token = len(given) == len(values) and all(
        value.shape[-1] == length for value, length in zip(values, lengths, strict=True)
    )
    axis = -1 if per_token and (name == "position_ids" or given[0].ndim == 1) else 0
    rest = {value.shape[:-1] if axis == -1 else value.shape[1:] for value in given}
    if len(rest) > 1:
        return values
    if isinstance(given[0], np.ndarray):
        return np.concatenate(given, axis=axis)
    import torch

    return torch.cat(given, dim=axis)
