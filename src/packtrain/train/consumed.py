"""What a run consumed: in all, between two rows of its log, and in an evaluation, by exact sums.

Checkpoints hold it (`found.json`) with how many comparisons the isolation proof made, so that a run that goes
on, or that had ended, still tells the whole. A pack that is repeated to fill ranks counts each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..checks import whole
from ..collate import IGNORE, PackBatch
from ..data import PackSampler
from ..planning.align import AlignedPlan

# --------------------------------------------------------------------------------------------
# What a run consumed between two log rows: aggregate figures only, summed over all ranks
# --------------------------------------------------------------------------------------------
# `packs`, `tokens_per_s` (real tokens), `slots_per_s` (what the packs would take when filled),
# `samples_per_pack`, `step_s` (seconds of an optimizer step), `data_wait_s` (seconds of a step in which a
# rank waits for its packs, mean of the ranks), and of the packs that were judged `token_acc` (share of
# supervised targets that were the likeliest token). Time between a row and the next step (evaluation,
# checkpoints) does not count. Looking for the likeliest token reads all logits once more, so only the packs
# of the step that is logged are judged. Nothing is kept per sample or per source.
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
        known = getattr(batch, "trained", None)
        self._judged += supervised(batch) if known is None else known

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


# --------------------------------------------------------------------------------------------
# What a run consumed: in all (packs, samples, tokens on all ranks), and between two rows of its log
# --------------------------------------------------------------------------------------------
#: File of a checkpoint that says what the run found up to there.
FOUND = "found.json"

_COUNTS = ("packs", "samples", "tokens", "slots", "over_long_packs", "longest_pack")
_MOST = 1 << 62
_VERSION = 1


class Consumed:
    """Counts of this rank since training began, and of the run before.

    Args:
        pack_length: slots of a pack; a longer single sample has as many as it takes.
    """

    def __init__(self, pack_length: int) -> None:
        self.pack_length = pack_length
        self.begin({})

    def begin(self, before: Mapping[str, int] | None) -> None:
        """Count from here on.

        Args:
            before: figures of the run up to here; None: they are not known.
        """
        self._before = before
        self._mine = [0] * len(_COUNTS)

    @property
    def samples(self) -> int:
        """Of this rank, since training began."""
        return self._mine[1]

    def add(self, tokens: int, samples: int) -> int:
        """Count a pack; its slots."""
        slots = max(self.pack_length, tokens)
        more = (1, samples, tokens, slots, int(tokens > self.pack_length))
        self._mine[:5] = [held + one for held, one in zip(self._mine, more, strict=False)]
        self._mine[5] = max(self._mine[5], tokens)
        return slots

    def figures(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any] | None:
        """Of the whole run on all ranks, plain JSON; None: what came before is not known.

        Args:
            gather: rows of all ranks (a collective).
        """
        rows = gather(torch.tensor([self._mine], dtype=torch.int64)).cpu().reshape(-1, len(_COUNTS))
        if self._before is None:
            return None
        before = [int(self._before.get(name, 0)) for name in _COUNTS]
        summed = (rows.sum(0) + torch.tensor(before)).tolist()
        summed[5] = max(before[5], *rows[:, 5].tolist())
        found: dict[str, Any] = dict(zip(_COUNTS, summed, strict=True))
        return {
            **found,
            "pack_length": self.pack_length,
            "efficiency": found["tokens"] / max(1, found["slots"]),
            "samples_per_pack": found["samples"] / max(1, found["packs"]),
        }


def found_of(consumed: Mapping[str, Any] | None, proof: int | None) -> dict[str, Any]:
    """What stands in `found.json`.

    Args:
        consumed: figures of a `Consumed`.
        proof: comparisons of the isolation proof.
    """
    return {"version": _VERSION, "consumed": consumed, "proof": proof}


def read_found(checkpoint: str | None) -> tuple[dict[str, int] | None, int | None]:
    """What a run had consumed and proven up to a checkpoint; one of another version does not know.

    Raises:
        FormatError: the file was edited.
    """
    if checkpoint is None:
        return {}, None
    path = Path(checkpoint) / FOUND
    if not path.is_file():
        return None, None
    told = files.read_json(path)
    with files.reading(path, "what a run found", "resume from another checkpoint"):
        if told["version"] != _VERSION:
            return None, None
        counts, proof = told["consumed"], told["proof"]
        before = None if counts is None else {name: whole(name, counts[name], 0, _MOST) for name in _COUNTS}
        return before, None if proof is None else whole("proof", proof, 0, _MOST)


# --------------------------------------------------------------------------------------------
# Evaluation by exact sums: weighted losses and weights are added up over packs and ranks, and divided once.
# --------------------------------------------------------------------------------------------
# A mean of the packs' means would weigh a short pack like a full one. Packs that an aligned plan repeats, and
# fillers, have no weight, so every sample counts once on any number of ranks.
class ExactSums:
    """What the packs of one validation plan add up to on one rank, in plan order.

    Args:
        aligned: the validation plan.
        rank: this rank.
    """

    def __init__(self, aligned: AlignedPlan, rank: int) -> None:
        self._kept = aligned.kept
        self._places = iter(PackSampler(aligned, rank, shuffle=False))
        self._sums = torch.zeros(6, dtype=torch.float64)
        self._judged = False

    def counts(self, batch: Any) -> bool:
        """Does the next pack count? Call it once for each: one that is repeated, or a filler, does not."""
        return next(self._places) < self._kept and not getattr(batch, "filler", False)

    def add(self, batch: Any, loss: float, weight: float, hits: float | None = None) -> None:
        """Add a pack.

        Args:
            loss: sum of its weighted token losses.
            weight: sum of the weights.
            hits: tokens that were predicted; None: not looked at.
        """
        self._judged |= hits is not None
        found = [loss, weight, supervised(batch), 1, len(batch.sample_ids), hits or 0]
        self._sums += torch.tensor(found, dtype=torch.float64)

    def metrics(self, prefix: str, summed: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """`<prefix>_loss`, `_tokens` (supervised), `_packs`, `_samples`, `_token_acc` where hits were told.

        Args:
            summed: sums a tensor over the ranks (a collective).
        """
        loss, weights, tokens, packs, samples, hits = summed(self._sums).tolist()
        found: dict[str, float] = {f"{prefix}_loss": loss / weights if weights else 0.0}
        if self._judged:
            found[f"{prefix}_token_acc"] = hits / max(1.0, tokens)
        counts = {"tokens": tokens, "packs": packs, "samples": samples}
        return found | {f"{prefix}_{name}": int(value) for name, value in counts.items()}
