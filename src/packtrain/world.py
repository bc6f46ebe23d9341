"""Rank, world size and the few environment variables packtrain reads: the only file that does.

Resolution order: explicit argument, then the launcher's environment, then an initialised
torch.distributed group (only when torch is already imported: this file never imports it).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .checks import whole
from .errors import InputError, counted


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers: 0 <= rank < size."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if whole("rank", self.rank, 0) >= whole("world size", self.size, 1):
            raise InputError(
                f"rank {self.rank} of world size {self.size} is not a position", hint="0 <= rank < world size"
            )

    @property
    def is_writer(self) -> bool:
        return self.rank == 0


def world(rank: int | None = None, size: int | None = None) -> World:
    """The position of this process; see the module docstring for the order of sources."""
    if rank is None and "RANK" in os.environ:
        rank = _integer("RANK")
    if size is None and "WORLD_SIZE" in os.environ:
        size = _integer("WORLD_SIZE")
    torch = sys.modules.get("torch")
    if torch is not None and (rank is None or size is None):
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            rank = distributed.get_rank() if rank is None else rank
            size = distributed.get_world_size() if size is None else size
    return World(rank=0 if rank is None else rank, size=1 if size is None else size)


@dataclass(frozen=True, slots=True)
class Node:
    """This process among those of its machine, as its launcher says.

    Attributes:
        rank: position on the machine; 0 polls for all.
        size: processes on the machine; 1 where the launcher does not say, and each polls for itself.
        index: number of the machine.
        launch: names the launch, the same on every rank (address and port where ranks meet).
    """

    rank: int = 0
    size: int = 1
    index: int = 0
    launch: str = ""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise InputError(f"local rank {self.rank} of {counted(self.size, 'processes')} is not a position")


def node(place: World) -> Node:
    """Where the launcher put this process on its machine, from LOCAL_RANK and its companions."""
    if "LOCAL_RANK" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ or place.size == 1:
        return Node(index=place.rank)
    size = _integer("LOCAL_WORLD_SIZE")
    index = _integer("GROUP_RANK") if "GROUP_RANK" in os.environ else place.rank // max(1, size)
    launch = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return Node(_integer("LOCAL_RANK"), size, index, launch)


def cache_dir() -> Path:
    """Folder for indexes, digests and derived files of sources (`PACKTRAIN_CACHE`)."""
    chosen = os.environ.get("PACKTRAIN_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "packtrain"


def copies_limit(folder: str) -> float:
    """Bytes that copies of remote files may take: `PACKTRAIN_REMOTE_GB`, else half of the folder's disk."""
    text = os.environ.get("PACKTRAIN_REMOTE_GB")
    if text:
        try:
            if (limit := float(text)) > 0:
                return limit * 1e9
        except ValueError:
            pass
        raise InputError(f"environment variable PACKTRAIN_REMOTE_GB={text!r} is no number above 0")
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).total / 2


def jit_allowed() -> bool:
    """False when `PACKTRAIN_JIT=0`: every kernel then runs as plain Python (same bytes, slower)."""
    return os.environ.get("PACKTRAIN_JIT", "1") != "0"


def plan_threads() -> int:
    """Threads that planning may use: `PACKTRAIN_THREADS`, else the CPUs of this process, at most 8."""
    if os.environ.get("PACKTRAIN_THREADS"):
        return whole("environment variable PACKTRAIN_THREADS", _integer("PACKTRAIN_THREADS"), 1)
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(8, count or 1)


def _integer(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise InputError(f"environment variable {name}={text!r} is not an integer") from None


def offline_packing() -> dict[str, str | None]:
    """OFFLINE_PACKED_DATA, OFFLINE_PACKING_VQA and OFFLINE_PACKING_BMR, which other trainers read."""
    names = ("OFFLINE_PACKED_DATA", "OFFLINE_PACKING_VQA", "OFFLINE_PACKING_BMR")
    return {name: os.environ.get(name) or None for name in names}


def environment() -> dict[str, str]:
    """All variables of this process."""
    return dict(os.environ)


def take_environment(variables: Mapping[str, str]) -> None:
    """Let this process have these variables alone: a worker that was forked before its parent set some."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@contextlib.contextmanager
def environment_for_children(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for the processes started meanwhile, besides those of this one."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
