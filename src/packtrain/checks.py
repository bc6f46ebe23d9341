"""Arguments that are whole numbers within limits, or yes or no: one check, one sentence."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from .errors import InputError

__all__ = ["flag", "whole"]


def whole(name: str, value: Any, low: int, high: int | None = None, *, hint: str | None = None) -> int:
    """`value` as an int (numpy's integers too).

    Raises:
        InputError: it is none, or outside low..high.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {value!r}, expected an integer >= {low}", hint=hint)
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f">= {low}" if high is None else f"in {low}..{high}"
        raise InputError(f"{name} is {value!r}, expected an integer {limit}", hint=hint)
    return number


def flag(name: str, value: Any) -> bool:
    """`value`, which has to be True or False: the word "false" would count as True."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, expected True or False")
    return value
