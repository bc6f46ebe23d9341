"""What a raw record says of its sample beside its content, and what of that nobody can train with.

    weight            a finite number >= 0
    channel, source   a text or a finite number
    loss_scale        a list of finite numbers, one for each token

A record that says anything else there is faulty, alone: it goes to the ledger as `malformed_record`. Carried
on, one NaN would turn the weights of its whole step to NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import SampleError

__all__ = ["CARRIED", "carry"]

#: Values of a raw record that travel with its sample, where the template does not make them itself.
CARRIED = ("weight", "channel", "source")


def carry(record: Mapping[str, Any], encoded: dict[str, Any], where: str) -> None:
    """Put what `record` carries into `encoded`.

    Args:
        where: of the record, for messages.

    Raises:
        SampleError: `malformed_record`: a value that cannot be carried.
    """
    weight = record.get("weight")
    if weight is not None and not (_is_finite(weight) and weight >= 0):
        raise _fault(where, "weight", weight, "expected a number >= 0")
    for name in CARRIED:
        value = record.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            raise _fault(where, name, value, "expected a text or a finite number")
        if isinstance(value, str | int | float):
            encoded.setdefault(name, value)
    scale = record.get("loss_scale")
    if scale is None or "loss_scale" in encoded:
        return
    tokens = len(encoded["input_ids"])
    if not isinstance(scale, list) or len(scale) != tokens or not all(map(_is_finite, scale)):
        size = f"a list of {len(scale)}" if isinstance(scale, list) else scale
        raise _fault(where, "loss_scale", size, f"expected {tokens} finite numbers, one for each token")
    encoded["loss_scale"] = np.asarray(scale, dtype=np.float32)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _fault(where: str, name: str, value: Any, expected: str) -> SampleError:
    return SampleError("malformed_record", f"{where}: {name} is {value!r:.80}, {expected}")
