"""Templates are made once; chats are made by one small function."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from packtrain.template import HFTemplate

VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="session")
def template(processor: Callable[[str], Any]) -> Callable[[str], HFTemplate]:
    return lru_cache(maxsize=None)(lambda name: HFTemplate(processor(name)))


@pytest.fixture(scope="session")
def chat() -> Callable[..., dict[str, Any]]:
    """chat("question", "answer", …): turns alternate; a Path or bytes is an image part."""

    def make(*turns: Any, **extra: Any) -> dict[str, Any]:
        messages = []
        for place, turn in enumerate(turns):
            parts = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image", "image": _ref(part)}
                for part in (turn if isinstance(turn, (list, tuple)) else [turn])
            ]
            messages.append({"role": ("user", "assistant")[place % 2], "content": parts})
        return {"messages": messages, **extra}

    return make


def _ref(part: Any) -> Any:
    return part if isinstance(part, bytes) else str(part)
