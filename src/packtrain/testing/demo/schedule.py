"""Which kind of sample each id is, and how long samples are built up to a length.

Kinds have fixed shares; planted faults and the long tail have fixed counts. Their order is a
seeded shuffle, so neighbours in the file are of different kinds, as in a mixed data set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .draws import Draws
from .faults import COPIES, REASONS
from .formulas import formula_chat, formula_talk
from .maths import problem, problem_talk
from .scenes import compare_talk, scene_chat, scene_talk
from .talks import Talk

__all__ = ["FEWEST", "PACK_LENGTH", "Job", "lesson", "make_talk", "schedule", "tokens_of"]

#: The pack length the set is made for: its tail ends just below, its over-long samples above.
PACK_LENGTH = 1024
#: Fewest samples of a set: the faults, the tail, and some of every kind.
FEWEST = 60

_MAKERS: dict[str, tuple[Callable[[Draws], Talk], int]] = {
    "formula": (formula_talk, 16),
    "scene": (scene_talk, 9),
    "scene_chat": (scene_chat, 4),
    "compare": (compare_talk, 3),
    "formula_chat": (formula_chat, 2),
    "maths": (problem_talk, 6),
}
_KINDS = tuple(name for name, (_, share) in _MAKERS.items() for _ in range(share))
_TURN = 5  # tokens of a turn beside its text: marks, role, newlines
_PICTURE = (6, 66)  # least and most tokens of a picture, with its two marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one id becomes.

    Attributes:
        kind: a kind of talk, or `lesson`.
        tokens: of a lesson: the length it is built up to.
        reason: of a planted fault: the reason the ledger must give; else "".
        copy: which of the ways to be at fault.
    """

    kind: str
    tokens: int = 0
    reason: str = ""
    copy: int = 0


def schedule(seed: str, samples: int) -> list[Job]:
    """One job per sample id."""
    jobs = []
    for reason in REASONS:
        for copy in range(COPIES):
            long = reason == "over_long"
            tokens = PACK_LENGTH * (5 + copy) // 4 if long else 0  # 1280, 1536, 1792
            jobs.append(Job(kind="lesson" if long else "formula", tokens=tokens, reason=reason, copy=copy))
    tail = max(4, samples // 32)
    for k in range(tail):
        jobs.append(Job(kind="lesson", tokens=PACK_LENGTH * (45 + k * 50 // (tail - 1)) // 100))
    plain = samples - len(jobs)
    jobs += [Job(kind=_KINDS[k * len(_KINDS) // plain]) for k in range(plain)]
    return Draws(f"{seed}/schedule").shuffled(jobs)


def make_talk(d: Draws, kind: str = "") -> Talk:
    """A talk of a kind, or of a drawn one."""
    return _MAKERS[kind or d.choice(_KINDS)][0](d)


def lesson(d: Draws, tokens: int, count: Callable[[str], int], over: bool = False) -> Talk:
    """A long chat of word problems, with a picture now and then.

    Args:
        tokens: the length it is built up to; it stays at or below it, or with `over` passes it.
        count: tokens of a text.
    """
    talk = Talk("lesson")
    talk.system("You are a patient teacher. Work every problem out step by step.")
    while True:
        step = make_talk(d, d.choice(("formula", "scene"))) if d.chance(0.15) else Talk("step")
        if not step.turns:
            question, worked = problem(d)
            step.ask(question)
            step.answer(worked)
        fits = tokens_of(talk, count, most=not over) + tokens_of(step, count, most=not over) <= tokens
        if fits or over:
            talk.extend(step)
        if not fits:
            return talk


def tokens_of(talk: Talk, count: Callable[[str], int], *, most: bool) -> int:
    """A talk's length with every picture at its most tokens, or at its least."""
    return sum(count(turn.text) + _TURN for turn in talk.turns) + _PICTURE[most] * len(talk.pictures)
