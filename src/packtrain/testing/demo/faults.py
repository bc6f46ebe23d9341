"""Planted faults: samples that must end in the ledger, each with the reason it must carry there.

A run that drops one of them silently, or keeps it, is caught by comparing the ledger with
`faults.json`.
"""

from __future__ import annotations

from typing import Any

from .draws import Draws
from .maths import problem_talk
from .records import record_of
from .talks import Look, Talk, Turn

__all__ = ["COPIES", "REASONS", "cut", "empty_record", "mismatch_record"]

REASONS = ("missing_media", "empty", "over_long", "truncated_media", "placeholder_mismatch")
#: Faults of each reason; each copy is another way to be at fault.
COPIES = 3


def empty_record(d: Draws, copy: int) -> dict[str, Any]:
    """A sample with nothing to learn from: blank answers, a blank question, no turns at all."""
    talk = problem_talk(d)
    if copy == 0:
        talk.turns = [t if t.role == "user" else Turn("assistant", ("",)) for t in talk.turns]
        return record_of(talk, "messages", [])
    if copy == 1:
        talk.turns = [Turn("user", (" \n",)), talk.turns[1]]
        return record_of(talk, "parts", [])
    return {"conversations": []}


def mismatch_record(talk: Talk, paths: list[str], copy: int) -> dict[str, Any]:
    """One picture, but two `<image>` marks; or one mark, but two pictures listed."""
    if copy == 1:
        return record_of(talk, "messages", [*paths, paths[0]])
    first = talk.turns[0]
    doubled = Turn(first.role, (Look(0), *first.parts))
    broken = Talk(talk.kind, [doubled, *talk.turns[1:]])
    return record_of(broken, "sharegpt" if copy else "messages", paths)


def cut(data: bytes) -> bytes:
    """The first two thirds of a picture file: its header still tells the right size."""
    return data[: len(data) * 2 // 3]
