"""What the makers of demo samples hand over: a talk with pictures, before it has a record shape.

A talk knows nothing of files. The writer of `make.py` writes its pictures and gives it one of the record
shapes that data sets in the field have.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from PIL.Image import Image


# --------------------------------------------------------------------------------------------
# Seeded choices that stay the same on every machine and Python version
# --------------------------------------------------------------------------------------------
# Only `random.Random.random()` is promised by Python to repeat for a seed, so every choice here is
# made from it, and each sample draws from its own stream: adding a sample never changes another.
T = TypeVar("T")


class Draws:
    """One stream of choices, named by its key.

    >>> Draws("0/train/7").integer(1, 6) == Draws("0/train/7").integer(1, 6)
    True
    """

    def __init__(self, key: str) -> None:
        self._uniform = random.Random(key).random

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._uniform() < probability

    def integer(self, low: int, high: int) -> int:
        """An integer in low..high, both included."""
        return low + int(self._uniform() * (high - low + 1))

    def choice(self, items: Sequence[T]) -> T:
        return items[int(self._uniform() * len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """A shuffled copy (Fisher-Yates)."""
        out = list(items)
        for last in range(len(out) - 1, 0, -1):
            other = self.integer(0, last)
            out[last], out[other] = out[other], out[last]
        return out

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in drawn order."""
        return self.shuffled(items)[:count]


# --------------------------------------------------------------------------------------------
# Record shapes of the field: a talk as LLaMA-Factory, OpenAI, Hugging Face, sharegpt or alpaca JSON
# --------------------------------------------------------------------------------------------
Record = dict[str, Any]

SHAPES = ("messages", "parts", "sharegpt", "openai", "alpaca")
_SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system"}


def shape_of(sample: int, talk: Talk) -> str:
    """The shape a sample gets: all of them in turn, alpaca only where it can hold the talk."""
    if not talk.pictures and len(talk.turns) == 2 and sample % 3 == 0:
        return "alpaca"
    return ("messages", "parts", "sharegpt", "messages", "openai")[sample % 5]


def record_of(talk: Talk, shape: str, paths: Sequence[str]) -> Record:
    """The talk as one JSON record. `paths[k]` is the file of picture k, relative to the JSONL."""
    if shape == "alpaca":
        user, assistant = talk.turns
        return {"instruction": user.text, "input": "", "output": assistant.text}
    if shape == "sharegpt":
        turns = [{"from": _SHAREGPT[turn.role], "value": _marked(turn)} for turn in talk.turns]
        return _with_images({"conversations": turns}, paths)
    if shape == "messages":
        turns = [{"role": turn.role, "content": _marked(turn)} for turn in talk.turns]
        return _with_images({"messages": turns}, paths)
    return {"messages": [{"role": turn.role, "content": _parts(turn, shape, paths)} for turn in talk.turns]}


def _with_images(record: Record, paths: Sequence[str]) -> Record:
    return {**record, "images": list(paths)} if paths else record


def _marked(turn: Turn) -> str:
    """Text with `<image>` where a picture stands."""
    return "".join(part if isinstance(part, str) else "<image>" for part in turn.parts)


def _parts(turn: Turn, shape: str, paths: Sequence[str]) -> list[Record] | str:
    if all(isinstance(part, str) for part in turn.parts) and shape == "openai":
        return turn.text
    return [_part(part, shape, paths) for part in turn.parts]


def _part(part: str | Look, shape: str, paths: Sequence[str]) -> Record:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    path = paths[part.picture]
    if shape == "openai":
        return {"type": "image_url", "image_url": {"url": path}}
    return {"type": "image", "image": path}


# --------------------------------------------------------------------------------------------
# What the makers of demo samples hand over: a talk with pictures, before it has a record shape
# --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Look:
    """The place of a picture in a turn: index into `Talk.pictures`."""

    picture: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `parts` are texts and pictures in reading order."""

    role: str
    parts: tuple[str | Look, ...]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(slots=True)
class Talk:
    """One sample in the making: turns, and the pictures (RGB) that they look at."""

    kind: str
    turns: list[Turn] = field(default_factory=list)
    pictures: list[Image] = field(default_factory=list)

    def ask(self, *parts: str | Image) -> None:
        """Add a user turn of texts and pictures."""
        placed: list[str | Look] = []
        for part in parts:
            if isinstance(part, str):
                placed.append(part)
            else:
                placed.append(Look(len(self.pictures)))
                self.pictures.append(part)
        self.turns.append(Turn("user", tuple(placed)))

    def answer(self, text: str) -> None:
        """Add an assistant turn."""
        self.turns.append(Turn("assistant", (text,)))

    def system(self, text: str) -> None:
        """Put a system turn first."""
        self.turns.insert(0, Turn("system", (text,)))

    def extend(self, other: Talk) -> None:
        """Go on with the turns of another talk (its system turn is left out)."""
        shift = len(self.pictures)
        self.pictures.extend(other.pictures)
        for turn in other.turns:
            if turn.role != "system":
                parts = tuple(Look(p.picture + shift) if isinstance(p, Look) else p for p in turn.parts)
                self.turns.append(Turn(turn.role, parts))
