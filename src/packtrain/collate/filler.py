"""The filler pack: what a rank trains on when it must take a step and has no sample left.

It has pack id `FILLER` (-1), one segment of one pad token, label -100 and no sample. Collated it gives a
batch with `filler=True`, empty `sample_ids` and no supervised token, so it adds exactly nothing to the loss
and the gradients, and the ranks stay in step. A filler never stands in a raw plan, and whoever hands one out
logs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .fields import IGNORE

__all__ = ["FILLER", "filler_pack", "is_filler"]

#: The pack id of a filler. No pack of a plan has it.
FILLER = -1


def filler_pack(pad_token_id: int = 0) -> list[dict[str, Any]]:
    """The pack that keeps a rank in step: one segment of one pad token, not trained, no sample."""
    return [{"input_ids": [pad_token_id], "labels": [IGNORE], "filler": True}]


def is_filler(pack: Sequence[Mapping[str, Any]]) -> bool:
    """Does this pack (a list of samples) hold nothing but fillers?"""
    return len(pack) > 0 and all(bool(sample.get("filler")) for sample in pack)
