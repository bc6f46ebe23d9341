"""Keywords of streams that stand in states, which are plain JSON: whole numbers as ints, and yes or no."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, TypeVar

from ..errors import InputError

__all__ = ["VEOMNI", "also_named", "flag", "may_drop", "whole"]

#: VeOmni's names of the keys of a token budget -> ours.
VEOMNI = {
    "dyn_bsz_buffer_size": "buffer_size",
    "dyn_bsz_count_mode": "count_mode",
    "dyn_bsz_overflow_ratio": "overflow_ratio",
    "dyn_bsz_physical_overflow_ratio": "overflow_ratio",
    "bsz_warmup_ratio": "warmup_ratio",
    "bsz_warmup_init_mbtoken": "warmup_tokens",
    "pad_packed_to_length": "pad_to_length",
}

F = TypeVar("F", bound=Callable[..., Any])


def also_named(names: Mapping[str, str]) -> Callable[[F], F]:
    """Lets a function take keywords under the names that another system has for them.

    Called with both names of one keyword, it raises `InputError`.
    """

    def wrap(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for theirs in [name for name in options if name in names]:
                ours = names[theirs]
                if ours in options:
                    raise InputError(f"{theirs} and {ours} are one keyword", hint=f"keep {ours}")
                options[ours] = options.pop(theirs)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return wrap


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
