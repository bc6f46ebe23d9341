"""Loss flags of messages: is an answer trained, and with which weight?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ._content import fault
from .keys import LOSS

__all__ = ["loss_of"]


def loss_of(message: Mapping[str, Any], flags: Iterable[str], role: str, what: str) -> float | None:
    """The weight that flags of a message ask for; None for the default.

    Args:
        message: the message.
        flags: names of the flags it has.
        role: its role; only an assistant's messages can be trained.
        what: the message, for errors.

    Raises:
        SampleError: malformed_record, for a flag that is none, flags that disagree, or a turn of another role
            that asks to be trained.
    """
    weight: float | None = None
    first = ""
    for flag in flags:
        value = message[flag]
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            value = value.strip().lower() == "true"
        number = isinstance(value, (bool, int, float))
        if not number or not math.isfinite(value) or value < 0:
            raise fault(f"{what} has {flag} {value!r}", hint="true, false, or a weight >= 0")
        asked = float(value)
        if not LOSS[flag]:
            if asked not in (0.0, 1.0):
                raise fault(
                    f"{what} has {flag} {value!r}", hint="true masks a message; loss_weight takes weights"
                )
            asked = 1.0 - asked
        if weight is not None and weight != asked:
            raise fault(f"{what} has {first} and {flag}, which disagree")
        weight, first = asked, flag
    if role != "assistant":
        if weight:
            raise fault(
                f"{what} ({role}) asks for {first} {message[first]!r}",
                hint="only assistant messages are trained on",
            )
        return None
    return None if weight == 1.0 else weight
