"""An epoch that also reaches loader workers which run already.

`persistent_workers` keep the copy of the dataset that they were started with, so a plain attribute set in the
main process never gets there and every epoch would have the order of the first. Two numbers in shared memory
do.
"""

from __future__ import annotations

import torch

__all__ = ["SharedEpoch"]


class SharedEpoch:
    """The last epoch that was chosen, in whichever process. Survives being sent to a worker."""

    def __init__(self) -> None:
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()  # epoch, times it was chosen
        self._seen = 0

    def choose(self, epoch: int) -> None:
        self._shared[0] = epoch
        self._shared[1] += 1
        self._seen = int(self._shared[1])

    @property
    def is_missed(self) -> bool:
        """Did another process choose an epoch since this one last knew?"""
        return int(self._shared[1]) != self._seen

    def news(self) -> int | None:
        """The epoch that another process chose since this one last knew; None: no other."""
        if not self.is_missed:
            return None
        self._seen = int(self._shared[1])
        return int(self._shared[0])
