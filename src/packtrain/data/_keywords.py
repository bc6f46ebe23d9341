"""Whole-number keywords of streams, as plain ints: they stand in states, which are plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from ..errors import InputError

__all__ = ["may_drop", "whole"]


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


def may_drop(long_samples: Any) -> bool:
    """Does a long-sample policy, one for all limits or by limit, leave samples out?"""
    policies = long_samples.values() if isinstance(long_samples, Mapping) else [long_samples]
    return "drop" in policies
