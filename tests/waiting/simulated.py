"""Virtual time and other hosts, in one thread: a wait of hours takes no time and never races."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packtrain import files
from packtrain.waiting import claim as claim_module
from packtrain.waiting.claim import Claim, Owner


class Simulation:
    """A clock whose sleep runs what is due meanwhile. `late` counts from the beginning, in seconds."""

    def __init__(self, start: float = 1000.0) -> None:
        self.start = self.time = start
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.sleeps: list[float] = []

    @property
    def late(self) -> float:
        return self.time - self.start

    def now(self) -> float:
        return self.time

    def at(self, late: float, do: Callable[[], None]) -> None:
        self._due.append((self.start + late, len(self._due), do))
        self._due.sort()

    def every(self, seconds: float, until: float, do: Callable[[], None]) -> None:
        late = seconds
        while late <= until:
            self.at(late, do)
            late += seconds

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.sleeps.append(seconds)
        stop = self.time + seconds
        while self._due and self._due[0][0] <= stop:
            self.time, _, do = self._due.pop(0)
            do()
        self.time = stop


def elsewhere(host: str = "node7", pid: int = 4242) -> Owner:
    """A process of another machine: nothing can be shown about it."""
    return Owner(os.urandom(8).hex(), host, f"boot-of-{host}/pid:[1]", pid, 1)


def claim_from(owner: Owner, folder: Path) -> Claim:
    """The claim of another process, beating only when its `pulse` is called."""
    held = claim_module.look(folder)
    number = 1 if held is None else held.number + 1
    assert claim_module._put(folder, number, owner)
    return Claim(folder, number, owner, threaded=False)


def leave_behind(folder: Path, owner: Owner, **beat: Any) -> None:
    """What a process that is gone left in `folder`."""
    number = len(list(folder.glob("claim.*"))) + 1
    files.publish_new(folder / f"claim.{number:06d}", json.dumps(owner.to_dict()))
    files.publish_json(folder / "beat.json", {**owner.to_dict(), "beat": 3, "answers": [], **beat})


def dead_here() -> Owner:
    """A process of this machine that is gone: its id may run, its start time does not fit."""
    here = Owner.here()
    return Owner(os.urandom(8).hex(), here.host, here.machine, here.pid, here.started - 1)
