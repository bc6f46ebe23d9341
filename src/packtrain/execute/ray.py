"""Ordered map over shards as tasks of a Ray cluster, or of Ray on this machine.

The work and what all shards share (source and template) are put into Ray's object store once and unpickled
once per worker process. Each shard is a task; a task whose worker or node dies is run again elsewhere
(`RETRIES` times), so nothing is lost; an error that the work itself raises is not retried and comes back
with its type. Results come in shard order, with a bounded number in flight, and equal those of the local
executor: who runs a pure function does not matter.

Every node must have packtrain installed and see the source, its media and the index under the same paths
(a shared file system). A cluster that is connected to already is used and left as it is; one that is started
here is stopped when the map ends. Needs the extra `ray`.
"""

from __future__ import annotations

import pickle
import socket
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from ..checks import whole
from ..errors import InputError, described, one_line, optional
from .local import shard_name
from .pool import AHEAD, Work, answer, in_order, packed, value_of

#: How often a shard is tried again after the worker that had it died.
RETRIES = 3

#: Shards per worker that may be submitted.
_QUEUED = 2

#: In a worker process: the work and context of the job it served last.
_loaded: dict[str, tuple[Work, Any]] = {}


def map_shards(
    work: Work,
    shards: Iterable[Any],
    *,
    workers: int | None = None,
    context: Any = None,
    address: str | None = None,
) -> Iterator[Any]:
    """Yield `work(context, shard)` for each shard, in order.

    Args:
        work: a module-level function; pure, so that it may run twice.
        shards: small picklable values, for example (start, stop) ranges of ids.
        workers: tasks that run at a time, one CPU each; None = one per CPU of the cluster.
        context: what all shards share; stored once.
        address: of a Ray cluster (`auto`, `host:port`, `ray://…`); None = the connected one, the one that
            `RAY_ADDRESS` names, else Ray is started on this machine.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: `work` or `context` cannot be pickled, `workers` < 1, the cluster cannot be reached, or
            a shard failed `RETRIES` + 1 times because its worker died.
        Exception: whatever `work` raised, with its type; shard and traceback are in its notes.
    """
    if workers is not None:
        whole("workers", workers, 1)
    ray = optional("ray", "ray", "ray")
    return _mapped(ray, packed(work, context), list(shards), workers, address)


def _mapped(
    ray: Any, payload: bytes, shards: Sequence[Any], workers: int | None, address: str | None
) -> Iterator[Any]:
    started = _connect(ray, address)
    references: dict[Future[bytes], Any] = {}  # of what is not handed out
    try:
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        slots = threading.Semaphore(count if workers else _QUEUED * count)
        task = ray.remote(num_cpus=1, max_retries=RETRIES, retry_exceptions=False)(_serve)
        job, held = uuid.uuid4().hex, ray.put(payload)

        def submit(shard: Any) -> Future[bytes]:
            slots.acquire()
            # in a list, so that the worker fetches the payload only when it has not unpickled it
            reference = task.remote(job, [held], shard)
            future: Future[bytes] = reference.future()
            references[future] = reference
            future.add_done_callback(lambda _: slots.release())
            return future

        for shard, future in in_order(shards, submit, AHEAD * count):
            yield _received(ray, future, shard)
            del references[future]
    finally:
        if ray.is_initialized():  # else asking Ray for anything would start it again
            for reference in references.values():
                ray.cancel(reference, force=True)
            if started:
                ray.shutdown()


def _connect(ray: Any, address: str | None) -> bool:
    """Be connected to a cluster; True when it was done here."""
    if ray.is_initialized():
        return False
    try:
        _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise InputError(
            f"no Ray cluster at {address or 'this machine'}: {one_line(error, 200)}",
            hint="start one with `ray start --head`, or leave the address out",
        ) from None
    return True


def _reach(address: str | None) -> None:
    """A cluster that nobody serves is said at once: Ray itself would try for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _received(ray: Any, future: Future[bytes], shard: Any) -> Any:
    """What came of a task, or the error that stands for it."""
    try:
        made = future.result()
    except ray.exceptions.RayError as error:
        raise InputError(
            f"{shard_name(shard)} failed {RETRIES + 1} times, because its worker died: "
            f"{described(error, 300)}",
            hint="most likely out of memory: use fewer workers, or executor='local' and workers=1",
        ) from None
    return value_of(made, shard_name(shard))


def _serve(job: str, held: list[Any], shard: Any) -> bytes:
    """Task: one shard. The work is unpickled when this process sees the job for the first time."""

    def work() -> Any:
        if job not in _loaded:
            import ray

            _loaded.clear()
            _loaded[job] = pickle.loads(ray.get(held[0]))
        work, context = _loaded[job]
        return work(context, shard)

    return answer(work)
