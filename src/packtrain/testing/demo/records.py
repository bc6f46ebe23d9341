"""Record shapes of the field: a talk as LLaMA-Factory, OpenAI, Hugging Face, sharegpt or alpaca JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .talks import Look, Talk, Turn

__all__ = ["SHAPES", "record_of", "shape_of"]

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
