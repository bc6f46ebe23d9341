"""Control tokens inside of a text: `<|im_end|>` in what a user wrote would end the turn there.

A tokenizer reads such a text as the token, wherever it stands. A sample that holds one is refused. Control
tokens are special tokens that the chat template writes itself or that the tokenizer begins, ends and pads
with; tokens that only data use (`<|box_start|>` and others of grounding, `<think>`, `<tool_call>`) stay
what they are. Placeholders of media are counted elsewhere (`placeholder_mismatch`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import SampleError

__all__ = ["check_control", "control_tokens"]

_NAMED = ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token")


def control_tokens(tokenizer: Any, templates: Iterable[str], media: Any) -> re.Pattern[str] | None:
    """What matches the control tokens of a tokenizer under a chat template; None: there are none."""
    written = "\n".join(templates)
    named = {getattr(tokenizer, name, None) for name in _NAMED}
    placeholders = set() if media is None else set(media.tokens.values())
    found = sorted(
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
        and token.content.strip()
        and (token.content in written or token.content in named)
        and token.content not in placeholders
    )
    return re.compile("|".join(map(re.escape, found))) if found else None


def check_control(sample: Mapping[str, Any], control: re.Pattern[str]) -> None:
    """Refuse a sample one of whose texts holds a control token.

    Raises:
        SampleError: `control_token`.
    """
    for place, message in enumerate(sample["messages"]):
        for text in _texts(message):
            found = control.search(text)
            if found is not None:
                raise SampleError(
                    "control_token",
                    f"the text of message {place} ({message['role']}) holds the control token "
                    f"{found.group()!r}, which the model would read as such",
                    hint="take the marks of the chat template out of the data",
                )


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    else:
        for part in content or ():
            if part["type"] == "text":
                yield part["text"]
    if len(message) > 2:
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str):
            yield reasoning
        if message.get("tool_calls"):
            yield from _strings(message["tool_calls"])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)
