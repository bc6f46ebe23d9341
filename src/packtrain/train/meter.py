"""What a run consumed between two log rows: aggregate figures only, summed over all ranks.

`packs`, `tokens_per_s` (real tokens), `slots_per_s` (what the packs would take when filled),
`samples_per_pack`, `step_s` (seconds of an optimizer step), `data_wait_s` (seconds of a step in which a rank
waits for its packs, mean of the ranks), and of the packs that were judged `token_acc` (share of supervised
targets that were the likeliest token). Time between a row and the next step (evaluation, checkpoints) does
not count. Looking for the likeliest token reads all logits once more, so only the packs of the step
that is logged are judged. Nothing is kept per sample or per source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..collate import IGNORE, PackBatch
from .consumed import Consumed

__all__ = ["Meter", "supervised"]

Reduce = Callable[[torch.Tensor], torch.Tensor]


class Meter:
    """Sums since the last `row`.

    Args:
        pack_length: as of `Consumed`.
        reduce: sums a float64 tensor over the ranks (a collective: every rank calls `row` together).
        clock: seconds, monotonic.

    Attributes:
        consumed: counts of the whole run.
    """

    def __init__(self, pack_length: int, reduce: Reduce, clock: Callable[[], float] = time.monotonic) -> None:
        self.consumed = Consumed(pack_length)
        self._correct: list[torch.Tensor] = []
        self._judged = 0
        self._reduce = reduce
        self._clock = clock
        self._since, self._between = clock(), True
        self._steps, self._waited = 0, 0.0
        self._sums = [0, 0, 0, 0]

    def fetched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one optimizer step; the time that each takes to come is waited for data."""
        start = self._clock()
        if self._between:
            self._since, self._between = start, False
        self._steps += 1
        while True:
            start = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._waited += self._clock() - start
            yield batch

    def add(self, batches: Sequence[PackBatch]) -> None:
        """Packs that are consumed now. Fillers and pad tails are neither tokens nor packs."""
        for batch in batches:
            if batch.filler:
                continue
            tokens = sum(batch.lengths) - batch.tail
            slots = self.consumed.add(tokens, len(batch.sample_ids))
            values = (tokens, slots, 1, len(batch.sample_ids))
            self._sums = [a + b for a, b in zip(self._sums, values, strict=True)]

    def judge(self, hits: Sequence[torch.Tensor], batch: Any) -> None:
        """How many targets of a batch were the likeliest token: 0-d tensors, left on their device."""
        self._correct += hits
        self._judged += supervised(batch)

    def row(self) -> dict[str, float]:
        """The figures since the last call, the same on every rank; starts anew."""
        correct = int(torch.stack(self._correct).sum()) if self._correct else 0
        mine = [*self._sums, self._judged, correct, self._waited, 1]
        summed = self._reduce(torch.tensor(mine, dtype=torch.float64))
        tokens, slots, packs, samples, judged, hits, waited, ranks = summed.tolist()
        seconds = max(self._clock() - self._since, 1e-9)
        steps = max(1, self._steps)
        self._correct.clear()
        self._sums, self._judged, self._steps, self._waited = [0, 0, 0, 0], 0, 0, 0.0
        self._since, self._between = self._clock(), True
        accuracy = {"token_acc": hits / judged} if judged else {}
        return {
            **accuracy,
            "packs": packs,
            "tokens_per_s": tokens / seconds,
            "slots_per_s": slots / seconds,
            "samples_per_pack": samples / max(1.0, packs),
            "step_s": seconds / steps,
            "data_wait_s": waited / ranks / steps,
        }


def supervised(batch: Any) -> int:
    """Targets of a batch: labels that are trained (the first label of every segment never is)."""
    return int((batch["labels"] != IGNORE).sum())
