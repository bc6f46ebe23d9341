"""What one input may cost, and inputs without end: Hypothesis in rounds until the time is over."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning

from packtrain.planning.window import WindowPacker

#: Seconds of each reader; `make fuzz` sets 600.
SECONDS = float(os.environ.get("PACKTRAIN_FUZZ_SECONDS", "1.4"))
CPU_SECONDS = 4.0  # of one input of at most a megabyte, on a slow machine
MEMORY = 1 << 29  # bytes that one input may add to the peak of the process
_MOST = 1 << 20

ODD_NUMBERS = [
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\0\0",
    b"\0\0\0\x80",
    b"9" * 30,
]


class TooMuch(BaseException):
    """One input took more than its share; no `except Exception` may hide it."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """CPU time and memory of what runs inside are bounded."""

    late: list[TooMuch] = []

    def stop(*_: object) -> None:
        late.append(TooMuch(f"more than {CPU_SECONDS} s of one input"))
        raise late[0]

    old = signal.signal(signal.SIGPROF, stop)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    if late:
        raise late[0]  # a callback of native code may have hidden it
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    if grown * (1 if sys.platform == "darwin" else 1024) > MEMORY:
        raise TooMuch(f"one input took {grown // 1024} MiB")


@st.composite
def damaged(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A whole file with some bytes changed, cut, put in, or repeated very often."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.integers(0, 6))
        if kind == 0 and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == 1 and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 2:
            odd = draw(st.sampled_from(ODD_NUMBERS))
            data[at : at + len(odd)] = odd
        elif kind == 3:
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == 4:
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == 5:
            size = draw(st.integers(1, 64))
            piece = bytes(data[at : at + size])
            data[at:at] = piece * min(draw(st.sampled_from([1, 2, 50, 20000])), _MOST // size)
        elif draw(st.integers(0, 3)) == 0:
            del data[at:]
    return bytes(data[: 2 * _MOST])


def rounds(check: Callable[..., None], inputs: st.SearchStrategy[Any], seconds: float = SECONDS) -> int:
    """Runs `check` on drawn inputs until the time is over; the number of inputs. The first round is fixed."""
    ran = 0

    def one(value: Any) -> None:
        nonlocal ran
        ran += 1
        WindowPacker.seen = 0  # kernels are compiled in long runs, which no input is
        try:
            with bounded():
                check(value)
        except TooMuch as error:  # which Hypothesis lets through as it is
            error.add_note(f"of {value!r}"[:4000])
            raise

    end = time.monotonic() + seconds
    number = 0
    laws = settings(
        max_examples=40,
        deadline=None,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if SECONDS >= 60 else [])],
        suppress_health_check=list(HealthCheck),
    )
    while number == 0 or time.monotonic() < end:
        seed = number if seconds < 60 else int.from_bytes(os.urandom(6), "big")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HypothesisWarning)  # of large inputs that fail
            hypothesis.seed(seed)(laws(given(inputs)(one)))()
        number += 1
    return ran
