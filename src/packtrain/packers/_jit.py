"""Compiled kernels that are optional: numba is imported at the first call of a kernel, never before.

A kernel is a plain module-level function on numpy arrays and integers. `use_jit(n)` says whether the
compiled form is worth its start-up; every caller has a plain twin that gives the same bytes. The
compiled code is cached on disk by numba; a cache that cannot be written or read only costs time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import numpy as np

from ..world import jit_allowed, plan_threads

logger = logging.getLogger(__name__)

#: Up to this many samples the plain path is used, so that no start-up of the compiler is paid.
PLAIN_LIMIT = 50_000

#: From this many samples on several threads are worth their start.
THREAD_LIMIT = 1_000_000

#: Threads to use; None: as many as `plan_threads` allows.
THREADS: int | None = None

#: Above this capacity classes are sparse: no array of the size of the capacity is made.
DENSE_LIMIT = 1 << 22


#: In a kernel, the position of the single bit of a uint64 `low`: `BIT[(low * DE_BRUIJN) >> SIX_BITS]`.
DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
SIX_BITS = np.uint64(58)
BIT = np.zeros(64, dtype=np.int64)
for _bit in range(64):
    BIT[(int(DE_BRUIJN) << _bit) % (1 << 64) >> 58] = _bit

_samples_in_all: ContextVar[int] = ContextVar("samples_in_all", default=0)


def use_jit(n: int) -> bool:
    """Whether n samples are planned by compiled kernels."""
    return max(n, _samples_in_all.get()) > PLAIN_LIMIT and jit_allowed()


@contextlib.contextmanager
def part_of(n: int) -> Iterator[None]:
    """Within this block parts of n samples are planned one by one: n decides what is worth compiling."""
    token = _samples_in_all.set(max(n, _samples_in_all.get()))
    try:
        yield
    finally:
        _samples_in_all.reset(token)


def threads_for(n: int) -> int:
    """Threads on which n samples are planned; results do not depend on it."""
    return 1 if n < THREAD_LIMIT or not use_jit(n) else max(1, min(THREADS or plan_threads(), n))


def over_blocks(ends: Sequence[int], work: Callable[[int, int], Any]) -> list[Any]:
    """work(low, high) for each block between two ends, in order; a thread each (kernels hold no lock)."""
    blocks = list(pairwise(ends))
    if len(blocks) == 1:
        return [work(*blocks[0])]
    with ThreadPoolExecutor(max(1, len(blocks))) as pool:
        return list(pool.map(work, *zip(*blocks, strict=True)))


class Kernel:
    """A function compiled at its first call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.plain = function
        self._compiled: Callable[..., Any] | None = None
        self._cached = True

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            self._compiled = _compile(self.plain, cache=True)
        try:
            return self._compiled(*args)
        except Exception as error:
            # A cache that is torn, full or of another numba fails in many ways, before the kernel runs.
            # Compiled in memory the kernel either works or raises what is really wrong.
            if not self._cached:
                raise
            self._cached = False
            logger.info(
                "numba cache of %s is not usable (%r); compiling in memory", self.plain.__name__, error
            )
            self._compiled = _compile(self.plain, cache=False)
            return self._compiled(*args)


#: Marks a function as a kernel.
kernel = Kernel


def _compile(function: Callable[..., Any], *, cache: bool) -> Callable[..., Any]:
    import numba

    options = {"nogil": True, "boundscheck": False}
    if cache:
        try:
            return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
        except (RuntimeError, OSError) as error:
            logger.info("no folder for the numba cache of %s: %s", function.__name__, error)
    return numba.njit(**options)(function)  # type: ignore[no-any-return]
