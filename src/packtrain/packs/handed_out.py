"""How far a source was read, and by whom: the one rule for states of every kind of source.

A state comes from who did the work. Packs that this process read itself stand in the source; packs that a
loader's workers read are counted as they leave the loader of the source (`source.loader`). Otherwise
a state would silently be that of the beginning, and is refused.
"""

from __future__ import annotations

import torch
from torch.utils.data import get_worker_info

from ..errors import InputError
from ._sharded_again import is_read_ahead

__all__ = ["HandedOut"]


class HandedOut:
    """Micro steps of a pass that left the source; knows of its copies in other processes (shared memory)."""

    def __init__(self, hint: str) -> None:
        self.hint = hint  # what gives a state where this process did not read
        self._elsewhere = torch.zeros(
            1, dtype=torch.int64
        ).share_memory_()  # reads of copies in other processes
        self._seen = 0
        self._from = 0
        self._given: int | None = None  # None: nobody counts
        self._ahead: str | None = None  # who takes packs before training asks for them

    def restart(self) -> None:
        """This process chose where the source stands: an epoch, a state, a pass of its own."""
        self._seen, self._given, self._ahead = int(self._elsewhere[0]), None, None

    def begin_pass(self) -> None:
        """A pass begins, in whichever process: call it where the packs are asked for."""
        self.read()
        if get_worker_info() is None:
            self.restart()
            self._ahead = "a loader fetches" if is_read_ahead() else None

    def begin(self, step: int) -> None:
        """A loader of the source begins a pass at this micro step and counts what leaves it."""
        self.restart()
        self._from, self._given = step, 0

    def add(self, steps: int, last: int | None = None) -> None:
        """So many micro steps left the loader; none behind `last`."""
        given = (self._given or 0) + steps
        self._given = given if last is None else min(given, last - self._from)

    def read(self) -> None:
        """Packs are read by this process; says so to the others where it is a loader's worker."""
        if get_worker_info() is not None:
            self._elsewhere += 1

    def deal(self) -> None:
        """Packs of all ranks are dealt out by another loader, which runs ahead of training."""
        self._ahead = "another loader deals out"

    def step(self, own: int) -> int:
        """The micro step behind what was handed out.

        Args:
            own: the one that this process came to itself.

        Raises:
            InputError: other processes read, or a loader fetched ahead, and nobody counted.
        """
        if self._given is not None:
            return self._from + self._given
        elsewhere = get_worker_info() is None and int(self._elsewhere[0]) != self._seen
        if self._ahead or elsewhere:
            who = self._ahead or "the workers of a loader read"
            raise InputError(
                f"{who} the packs: this process does not know how far they were used", hint=self.hint
            )
        return own
