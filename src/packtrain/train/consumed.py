"""What a run consumed in all: packs, samples and tokens that were handed to the model, on all ranks.

Checkpoints hold it (`found.json`) with how many comparisons the isolation proof made, so that a run that goes
on, or that had ended, still tells the whole. A pack that is repeated to fill ranks counts each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..checks import whole

__all__ = ["FOUND", "Consumed", "found_of", "read_found"]

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
