"""A source that a process without torch can read: it writes down who begins it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Counted:
    """Samples in another order in every epoch.

    Args:
        fails: the sample that cannot be read.
        pause: seconds that a sample takes.
        kilobytes: that a sample holds beside its tokens.
    """

    def __init__(
        self, folder: Path, samples: int, *, fails: int = -1, pause: float = 0.0, kilobytes: int = 0
    ) -> None:
        self.folder, self.samples, self.epoch = folder, samples, 0
        self.fails, self.pause, self.kilobytes = fails, pause, kilobytes

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with (self.folder / "passes").open("a") as out:
            out.write(f"{os.getpid()} {self.epoch}\n")
        for i in range(self.samples):
            if i == self.fails:
                raise ValueError("no more")
            if self.pause:
                time.sleep(self.pause)
            more = {"more": bytes(self.kilobytes << 10)} if self.kilobytes else {}
            yield {"input_ids": [i] * (1 + (i * 7 + self.epoch * 3) % 31), **more}


class Waiting(Counted):
    """Nothing comes any more after some samples, as from a queue that nobody fills."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from super().__iter__()
        time.sleep(1000)


class Various(Counted):
    """Samples of values that are pickled in another way by each process."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch

        for sample in super().__iter__():
            tokens = torch.tensor(sample["input_ids"])
            views = {"half": tokens.to(torch.bfloat16), "none": tokens[:0], "bits": tokens > 3}
            more = {"of": [tokens[::2]], "tags": {f"{tokens[0]} {k}" for k in range(9)}, **views}
            yield {"input_ids": tokens, "one": tokens.sum(), "kind": frozenset(["a", "b", "c"]), **more}


class Named(Counted):
    """Its samples say its name, but for the first ones; it counts how often it was begun."""

    begun = 0

    def __init__(self, folder: Path, samples: int, name: str) -> None:
        super().__init__(folder, samples)
        self.name, self.tags = name, {"a", "b", "c"}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.begun += 1
        for place, sample in enumerate(super().__iter__()):
            yield {**sample, "name": self.name if place >= 8 else "head"}


class Fragile:
    """Pickled, but not read again."""

    def __setstate__(self, state: Any) -> None:
        raise TypeError("not here")

    def __init__(self) -> None:
        self.value = 1


class Later(Counted):
    """Some samples in, they cannot be unpickled any more."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for place, sample in enumerate(super().__iter__()):
            yield {**sample, "more": Fragile()} if place >= 20 else sample


class OfRank(Counted):
    """Other samples in every process, against the contract."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in super().__iter__():
            yield {**sample, "process": os.getpid()}


class Changing(Counted):
    """Unpickled it cannot be read."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError("made for one process")


def passes(folder: Path) -> list[tuple[int, int]]:
    """(process, epoch) of every time that the source was begun."""
    if not (folder / "passes").exists():
        return []
    lines = (folder / "passes").read_text().splitlines()
    return [(int(pid), int(epoch)) for pid, epoch in map(str.split, lines)]
