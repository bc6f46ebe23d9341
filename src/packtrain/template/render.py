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

from ..errors import ConfigError, SampleError, one_line
from .skeleton import Skeleton, copies_texts, cut

__all__ = ["FROZEN_DATE", "ChatRenderer", "Rendered"]

logger = logging.getLogger(__name__)

#: The day a template sees when it asks for today's date.
FROZEN_DATE = datetime.datetime(2024, 7, 26)

#: Roles of the messages and kinds of their parts.
Shape = tuple[tuple[str, Any], ...]

_SHAPES = 4096  # remembered

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
        self._copies = copies_texts(self.templates["plain"], parts=bool(takes))
        self._marked = _MARKS.search(self.templates["plain"]) is not None
        self._skeletons: dict[Shape, Skeleton | None] = {}
        self._tokens = {str(k): v for k, v in tokenizer.special_tokens_map.items()}
        self._end_marks = tuple(token for token in tokenizer.get_added_vocab() if token.strip())

    def render(self, sample: Mapping[str, Any]) -> Rendered:
        """Render one sample.

        Raises:
            SampleError: `malformed_record`, `empty`, `no_assistant_turn`, `unsupported_media`,
                `template_error` (the template refuses the conversation), `prefix_mismatch`.
        """
        quick = self._quick(sample)
        if quick is not None:
            return quick
        return self._whole(sample)

    def _whole(self, sample: Mapping[str, Any]) -> Rendered:
        """Run the template on the sample."""
        messages, media = self._messages(sample)
        tools = _tools(sample)
        template = self.templates["tools" if tools else "plain"]
        if _MARKS.search(template):
            text, spans = self._run(template, messages, tools, marks=True)
            return Rendered(text, tuple((a, b) for a, b in spans if b > a), media)
        text, _ = self._run(template, messages, tools)
        return Rendered(text, tuple(self._turns(template, messages, tools, text)), media)

    def _quick(self, sample: Mapping[str, Any]) -> Rendered | None:
        """The sample joined from the skeleton of its shape; None where it has to be rendered in full."""
        if not self._copies or not isinstance(sample, Mapping) or sample.get("tools"):
            return None
        taken = self._shape(sample.get("messages"))
        if taken is None:
            return None
        shape, texts, media = taken
        skeleton = self._skeletons.get(shape)
        if skeleton is None:
            if shape in self._skeletons:
                return None
            if len(self._skeletons) >= _SHAPES:
                self._skeletons.clear()
            skeleton = self._skeletons[shape] = self._skeleton(shape)
            if skeleton is None:
                return None
        text, spans = skeleton.fill(texts)
        return Rendered(text, spans, tuple(media))

    def _shape(self, messages: Any) -> tuple[Shape, list[str], list[Mapping[str, Any]]] | None:
        """Roles and kinds of parts, the texts, the media; None for anything out of the ordinary."""
        if type(messages) is not list or not messages:
            return None
        shape: list[tuple[str, Any]] = []
        texts: list[str] = []
        media: list[Mapping[str, Any]] = []
        takes = self.takes
        for message in messages:
            if type(message) is not dict or len(message) != 2:
                return None
            role, content = message.get("role"), message.get("content")
            if type(role) is not str or type(content) is not list:
                return None
            kinds: list[str] = []
            joined: list[str] = []
            for part in content:
                if type(part) is not dict:
                    return None
                kind = part.get("type")
                if kind == "text":
                    text = part.get("text")
                    if type(text) is not str:
                        return None
                    joined.append(text)
                elif kind in takes and part.get(kind) is not None:
                    media.append(part)
                else:
                    return None
                kinds.append(kind)
            if takes:
                texts += joined
                shape.append((role, tuple(kinds)))
            else:
                texts.append("".join(joined))
                shape.append((role, ()))
        return tuple(shape), texts, media

    def _skeleton(self, shape: Shape) -> Skeleton | None:
        """Render a conversation of this shape with a mark in place of every text."""
        marks: list[str] = []

        def mark() -> str:
            marks.append(f"\ue000{len(marks)}\ue001")
            return marks[-1]

        messages = []
        for role, kinds in shape:
            parts = [
                {"type": "text", "text": mark()} if kind == "text" else {"type": kind, kind: kind}
                for kind in kinds or (() if self.takes else ("text",))
            ]
            messages.append({"role": role, "content": parts})
        try:
            whole = self._whole({"messages": messages})
        except SampleError:
            return None  # it is raised again, in full, for each such sample
        if any(whole.text[:end].rstrip().endswith("\ue001") for _, end in whole.spans) and not self._marked:
            return None  # where a turn ends would depend on the text itself
        return cut(whole.text, whole.spans, marks)

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
            said = one_line(error, 200)
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
