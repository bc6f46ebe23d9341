"""Packs that come as one row and still know their samples (`packs.Pack`): the collator takes those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["members_of"]


def members_of(packs: Sequence[Any]) -> Sequence[Any]:
    """The packs of a call, rows with `members()` replaced by their samples; all else as it is.

    A row without members (a plain mapping with `cu_seq_lens`) stays, and is refused as one sample with
    undeclared fields: boundaries are never guessed.
    """
    if isinstance(packs, Mapping):
        return [packs.members()] if hasattr(packs, "members") else packs
    if not isinstance(packs, Sequence) or not any(hasattr(pack, "members") for pack in packs):
        return packs
    return [pack.members() if hasattr(pack, "members") else pack for pack in packs]
