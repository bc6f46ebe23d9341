"""Control tokens inside of a text: `<|im_end|>` in what a user wrote would end the turn there.

A tokenizer reads such a text as the token, wherever it stands. A sample that holds one is refused. Control
tokens are special tokens that the chat template writes itself or that the tokenizer begins, ends and pads
with; tokens that only data use (`<|box_start|>` and others of grounding, `<think>`, `<tool_call>`) stay
what they are. Placeholders of media are counted elsewhere (`placeholder_mismatch`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import SampleError

_NAMED = ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token")


class Control(NamedTuple):
    """The control tokens of a tokenizer: what matches them, and what all of them begin with."""

    pattern: re.Pattern[str]
    lead: str

    def search(self, text: str) -> re.Match[str] | None:
        """The first control token in a text."""
        return self.pattern.search(text) if self.lead in text else None


def control_tokens(tokenizer: Any, templates: Iterable[str], media: Any) -> Control | None:
    """The control tokens of a tokenizer under a chat template; None: there are none."""
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
    if not found:
        return None
    first, last = found[0], found[-1]  # sorted: what these share, all share
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return Control(re.compile("|".join(map(re.escape, found))), first[:same])


def check_control(sample: Mapping[str, Any], control: Control) -> None:
    """Refuse a sample one of whose texts holds a control token.

    Raises:
        SampleError: `control_token`.
    """
    lead = control.lead
    for place, message in enumerate(sample["messages"]):
        content = message.get("content")
        for part in ({"type": "text", "text": content},) if isinstance(content, str) else content or ():
            if part["type"] == "text" and lead in part["text"]:
                _refuse(part["text"], f"message {place} ({message['role']})", control)
        if len(message) > 2:
            for text in _strings([message.get("reasoning_content"), message.get("tool_calls")]):
                _refuse(text, f"message {place} ({message['role']})", control)
    for text in _strings(sample.get("tools")):
        _refuse(text, "the tools", control)


def _refuse(text: str, what: str, control: Control) -> None:
    found = control.search(text)
    if found is not None:
        raise SampleError(
            "control_token",
            f"the text of {what} holds the control token {found.group()!r}, which the "
            "model would read as such",
            hint="take the marks of the chat template out of the data",
        )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)
