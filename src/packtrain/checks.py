"""Arguments that are numbers within limits, names out of few, or yes or no: one check, one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from .errors import InputError, PacktrainError, UnknownNameError


def whole(
    name: str,
    value: Any,
    low: int,
    high: int | None = None,
    *,
    hint: str | None = None,
    error: type[PacktrainError] = InputError,
) -> int:
    """`value` as an int (numpy's integers too).

    Raises:
        InputError: it is none, or outside low..high. Another class where `error` says so.
    """
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or number < low or (high is not None and number > high):
        limit = f">= {low}" if high is None or number is None else f"in {low}..{high}"
        raise error(f"{name} is {value!r}, expected an integer {limit}", hint=hint)
    return number


def number(
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    without: tuple[float, ...] = (),
    hint: str | None = None,
    error: type[PacktrainError] = InputError,
) -> float:
    """`value`, a finite number in low..high, but none of `without`.

    Raises:
        InputError: it is none of them. Another class where `error` says so.
    """
    if isinstance(value, bool) or not is_finite(value) or not low <= value <= high or value in without:
        least = f"{'above' if low in without else '>='} {low:g}"
        limit = f"in {low:g}..{high:g}" if high < math.inf else least
        raise error(f"{name} is {value!r}, expected a number {limit}", hint=hint)
    return value  # type: ignore[no-any-return]


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float holds: JSON has integers of any size."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def flag(name: str, value: Any, *, error: type[PacktrainError] = InputError) -> bool:
    """`value`, which has to be True or False: the word "false" would count as True."""
    if not isinstance(value, bool):
        raise error(f"{name} is {value!r}, expected True or False")
    return value


def one_of(what: str, value: Any, known: Iterable[str]) -> str:
    """`value`; UnknownNameError, with the nearest name, where it is none of `known`."""
    names = list(known)
    if value not in names:
        raise UnknownNameError(what, str(value), names)
    return str(value)


def divisors(number: int) -> list[int]:
    """What divides a number >= 1, ascending; work with its root."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def check_shard(number: int, of: int) -> None:
    """Shards of an array job are numbered from 0.

    Raises:
        InputError: there is no such shard.
    """
    if not 0 <= number < of:
        most = of if of > 0 else 8
        raise InputError(
            f"shard {number}/{of} does not exist", hint=f"number them 0/{most} to {most - 1}/{most}"
        )
