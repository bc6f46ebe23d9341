"""Chat template rendering: one sample -> text, trained character ranges, images in order.

Which characters are trained comes from the template's own `{% generation %}` marks where it has
them. Otherwise each assistant turn is found by rendering the conversation up to it: without the
turn (plus the generation prompt) and with it. That only works when both are beginnings of the whole
text; a template that rewrites earlier turns (drops their reasoning, say) is refused for that sample,
because guessing the range would train on the wrong tokens.

Rendering never reads the clock: `strftime_now("…")` in a template is replaced by a fixed date, so a
sample has the same length tomorrow.
"""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, SampleError

__all__ = ["FROZEN_DATE", "ChatRenderer", "Rendered"]

logger = logging.getLogger(__name__)

#: The day a template sees when it asks for today's date.
FROZEN_DATE = datetime.datetime(2024, 7, 26)

#: Kinds of parts besides text.
MEDIA = ("image", "video", "audio")
_ARTICLE = {"image": "an image", "video": "a video", "audio": "audio"}

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"\n]*)(?P=quote)\s*\)""")
_CLOCK_CALL = re.compile(r"strftime_now\s*\(")


@dataclass(frozen=True)
class Rendered:
    """A rendered sample.

    Attributes:
        text: the whole conversation, media as one placeholder each.
        spans: ascending character ranges that are trained (assistant turns with their end mark).
        media: parts of the media with their references and hints, in order of appearance.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    media: tuple[Mapping[str, Any], ...]


class ChatRenderer:
    """Renders samples with the chat template of one processor or tokenizer.

    Args:
        processor: what holds the chat template (a processor, or a tokenizer).
        tokenizer: its tokenizer; its special tokens are variables of the template.
        takes: modalities of the family; templates of text families expect plain string contents.
        system: system turn for samples that have none.
        variables: further template variables, for example `{"enable_thinking": False}`.
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: Any,
        *,
        takes: Sequence[str],
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.templates = _templates(processor, tokenizer)
        self.takes = tuple(takes)
        self.system = system
        self.variables = dict(variables or {})
        self._tokens = {str(k): v for k, v in tokenizer.special_tokens_map.items()}
        self._end_marks = tuple(token for token in tokenizer.get_added_vocab() if token.strip())

    def render(self, sample: Mapping[str, Any]) -> Rendered:
        """Render one sample.

        Raises:
            SampleError: `malformed_record`, `empty`, `no_assistant_turn`, `unsupported_media`,
                `template_error` (the template refuses the conversation), `prefix_mismatch`.
        """
        messages, media = self._messages(sample)
        tools = _tools(sample)
        template = self.templates["tools" if tools else "plain"]
        if _MARKS.search(template):
            text, spans = self._run(template, messages, tools, marks=True)
            return Rendered(text, tuple((a, b) for a, b in spans if b > a), media)
        text, _ = self._run(template, messages, tools)
        return Rendered(text, tuple(self._turns(template, messages, tools, text)), media)

    def _messages(self, sample: Mapping[str, Any]) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
        """Messages as the template wants them (media replaced by a mark), and the media references."""
        given = sample.get("messages") if isinstance(sample, Mapping) else None
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
            raise SampleError("malformed_record", "the sample has no list of messages", hint=_SHAPE_HINT)
        if not given:
            raise SampleError("empty", "the sample has no messages")
        messages: list[dict[str, Any]] = []
        media: list[Mapping[str, Any]] = []
        for place, message in enumerate(given):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise SampleError("malformed_record", f"message {place} has no role", hint=_SHAPE_HINT)
            clean = {key: value for key, value in message.items() if value is not None}
            clean["content"] = self._content(place, message.get("content"), media)
            messages.append(clean)
        if not any(message["role"] == "assistant" for message in messages):
            raise SampleError("no_assistant_turn", "the sample has no assistant turn, so nothing is trained")
        if self.system is not None and messages[0]["role"] not in ("system", "developer"):
            turn: Any = [{"type": "text", "text": self.system}] if self.takes else self.system
            messages.insert(0, {"role": "system", "content": turn})
        return messages, tuple(media)

    def _content(self, place: int, content: Any, media: list[Mapping[str, Any]]) -> Any:
        if content is None:
            content = []
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise SampleError("malformed_record", f"content of message {place} is not a list of parts")
        parts: list[dict[str, Any]] = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            elif kind in MEDIA and part.get(kind) is not None:
                if kind not in self.takes:
                    raise SampleError(
                        "unsupported_media",
                        f"message {place} has {_ARTICLE[kind]}, but the model takes "
                        + (f"text and {' and '.join(self.takes)} only" if self.takes else "text only"),
                        hint=f"choose a processor that takes {kind}, or drop such samples",
                    )
                media.append(part)
                parts.append({"type": kind, kind: kind})
            elif kind in ("text", *MEDIA):
                raise SampleError("malformed_record", f"a {kind} part of message {place} has no {kind}")
            else:
                raise SampleError(
                    "unsupported_media",
                    f"message {place} has a part of type {kind!r}; text, image, video and audio are taken",
                )
        return parts if self.takes else "".join(part["text"] for part in parts)

    def _turns(
        self, template: str, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
    ) -> list[tuple[int, int]]:
        """Character ranges of the assistant turns, by rendering the conversation up to each."""
        spans: list[tuple[int, int]] = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._run(template, messages[:place], tools, prompt=True)
            through, _ = self._run(template, messages[: place + 1], tools)
            if not (text.startswith(through) and through.startswith(before)):
                raise SampleError(
                    "prefix_mismatch",
                    f"the chat template renders message {place} differently as part of the whole "
                    "conversation, so its trained tokens cannot be located",
                    hint="mark assistant turns with {% generation %} … {% endgeneration %} in the template",
                )
            end = len(through)
            trimmed = through.rstrip()
            if trimmed.endswith(self._end_marks) and len(trimmed) > len(before):
                end = len(trimmed)  # the separator after the end-of-turn token is not the model's to say
            if end > len(before):
                spans.append((len(before), end))
        return spans

    def _run(
        self,
        template: str,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        marks: bool = False,
        prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, ranges = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **{**self._tokens, **self.variables},
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template cannot be compiled: line {error.lineno}: {error.message}",
                hint="repair chat_template.jinja",
            ) from error
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            raise SampleError(
                "template_error",
                f"the chat template refuses the conversation: {type(error).__name__}: {said}",
            ) from error
        return texts[0], [(int(a), int(b)) for a, b in ranges[0]] if marks else []


def _tools(sample: Mapping[str, Any]) -> list[Any] | None:
    tools = sample.get("tools")
    if not tools:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise SampleError("malformed_record", "tools is not a list of objects", hint=_SHAPE_HINT)
    return [dict(tool) for tool in tools]


_SHAPE_HINT = "wrap the source in ChatSource, which brings records into this shape"


def _templates(processor: Any, tokenizer: Any) -> dict[str, str]:
    """The template for samples without and with tools, the clock frozen."""
    found = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    if isinstance(found, list):  # older files: [{"name": …, "template": …}]
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, Mapping):
        plain = found.get("default") or (next(iter(found.values())) if len(found) == 1 else None)
        tools = found.get("tool_use", plain)
    else:
        plain = tools = found
    if not plain:
        raise ConfigError(
            f"{type(processor).__name__} has no chat template, so chats cannot be turned into text",
            hint="put a chat_template.jinja beside tokenizer.json, or set processor.chat_template",
        )
    return {"plain": _freeze_clock(plain), "tools": _freeze_clock(tools)}


def _freeze_clock(template: str) -> str:
    frozen = _CLOCK.sub(lambda call: repr(FROZEN_DATE.strftime(call["format"])), template)
    if frozen != template:
        logger.warning("the chat template prints today's date; it gets %s instead", FROZEN_DATE.date())
    if _CLOCK_CALL.search(frozen):
        raise ConfigError(
            "the chat template reads the clock in a way that cannot be frozen, so lengths would change",
            hint="write the date into the chat template",
        )
    return frozen
