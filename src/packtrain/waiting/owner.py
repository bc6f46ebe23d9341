"""Who holds a claim, and whether that process can be shown to be dead.

Only a process of the same boot of the same machine and the same process-id namespace can be looked up: of
any other host or container nothing can be shown, and its heartbeat has to tell. A process id that was given
to another process since is told by the start time that the kernel keeps.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Owner", "disk_of", "is_local_disk"]

_PROC = Path("/proc")

#: File systems that no other host can have mounted at the same time.
_LOCAL_DISKS = (
    *("apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "overlay", "ramfs"),
    *("tmpfs", "ufs", "xfs", "zfs"),
)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process. `nonce` is drawn once per claim, so two claims of one process differ.

    Attributes:
        machine: boot id of the kernel and process-id namespace; empty where the system has none.
        started: start time of the process in kernel ticks since boot; 0 where unknown.
    """

    nonce: str
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> Owner:
        """This process, with a new nonce."""
        pid = os.getpid()
        return cls(os.urandom(8).hex(), platform.node(), _machine(), pid, _started(pid)[1])

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Owner | None:
        """An owner as `to_dict` wrote it; None for anything else."""
        try:
            return cls(
                str(values["nonce"]),
                str(values["host"]),
                str(values["machine"]),
                int(values["pid"]),
                int(values["started"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def can_be_looked_up(self) -> bool:
        """Does this process see the owner's process ids?"""
        return bool(self.machine) and self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """True only when the process is shown to be gone."""
        if not self.can_be_looked_up:
            return False
        state, started = _started(self.pid)
        return state in ("", "Z", "X") or started != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _machine() -> str:
    """Names this boot and its process-id namespace; empty outside Linux."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> tuple[str, int]:
    """(state letter, start time in ticks) of a process; ("", 0) when there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def disk_of(folder: str | Path) -> str:
    """Type of the file system that holds `folder` (`ext4`, `nfs4`, …); empty when the system does not say."""
    try:
        lines = (_PROC / "self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    path = os.path.realpath(folder)
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


def is_local_disk(folder: str | Path) -> bool:
    """True when no other host can share this folder, by the type of its file system."""
    return disk_of(folder) in _LOCAL_DISKS
