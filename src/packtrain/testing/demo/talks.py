"""What the makers of demo samples hand over: a talk with pictures, before it has a record shape.

A talk knows nothing of files. `records.py` writes its pictures and gives it one of the record
shapes that data sets in the field have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Look", "Talk", "Turn"]


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
