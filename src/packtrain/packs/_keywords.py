"""Keywords of streams that stand in states, which are plain JSON: whole numbers as ints, and yes or no."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from ..errors import InputError

__all__ = ["flag", "may_drop", "whole"]


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int (numpy's integers too).

    Raises:
        InputError: it is none, or outside low..high.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} is {value!r}, expected an integer >= {low}")
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f">= {low}" if high is None else f"in {low}..{high}"
        raise InputError(f"{name} is {value!r}, expected an integer {limit}")
    return number


def flag(name: str, value: Any) -> bool:
    """`value`, which has to be True or False: the word "false" would count as True."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, expected True or False")
    return value


def may_drop(long_samples: Any) -> bool:
    """Does a long-sample policy, one for all limits or by limit, leave samples out?"""
    policies = long_samples.values() if isinstance(long_samples, Mapping) else [long_samples]
    return "drop" in policies
