"""Ordered map over shards in this process or in worker processes, see `Pool`.

Trade-off: the server of workers starts in some seconds, so one worker means this very process, without any
start-up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

from ..checks import whole
from .pool import Pool, Work


def available_cpus() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_shards(
    work: Work, shards: Iterable[Any], *, workers: int | None = None, context: Any = None
) -> Iterator[Any]:
    """Yield `work(context, shard)` for each shard, in order.

    Args:
        work: a module-level function; pure, so that it does not matter who runs it.
        shards: small picklable values, for example (start, stop) ranges of ids.
        workers: processes; 1 = this process, None = one per CPU.
        context: what all shards share (source and template); sent to each worker once.

    Raises:
        InputError: as `Pool`, or `workers` < 1.
        Exception: whatever `work` raised, see `Pool.map`.
    """
    todo = list(shards)
    count = whole("workers", available_cpus() if workers is None else workers, 1)
    return _mapped(Pool(work, context, 0 if min(count, len(todo)) <= 1 else count, name=shard_name), todo)


def _mapped(pool: Pool, shards: Iterable[Any]) -> Iterator[Any]:
    with closing(pool):
        yield from pool.map(shards)


def shard_name(shard: Any) -> str:
    """What to call a shard in messages."""
    if isinstance(shard, tuple) and len(shard) == 2 and all(isinstance(edge, int) for edge in shard):
        return f"ids {shard[0]} to {shard[1] - 1}"
    return f"shard {shard!r}"
