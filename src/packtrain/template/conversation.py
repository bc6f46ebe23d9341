"""One sample as a chat template takes it: messages, tools, media, and the boxes of `objects` in its texts.

Tool arguments that come as JSON text (as OpenAI writes them) are parsed, so that a template that writes
JSON does not quote them again. `loss` of a message stays here: no template sees it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..errors import SampleError
from ..families import Family
from ..sources._account import Account
from ..sources._beside import BOX, REF
from .account import texts_of, with_texts
from .turns import common, loss_of

#: Kinds of parts besides text.
MEDIA = ("image", "video", "audio")
_ARTICLE = {"image": "an image", "video": "a video", "audio": "audio"}
_SHAPE_HINT = "wrap the source in ChatSource, which brings records into this shape"

#: Keys that are read of a sample, a message and a text part.
_SAMPLE = frozenset(("messages", "tools", "objects"))
_MESSAGE = frozenset(("role", "content", "loss", "tool_calls", "tool_call_id", "name", "reasoning_content"))
_TEXT = frozenset(("type", "text"))

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A sample read for its template.

    Attributes:
        messages: as the template wants them, media replaced by a mark.
        tools: tool schemas, or None.
        media: the media parts in order of appearance.
        losses: message -> weight that the record gives it; only those it names.
    """

    messages: list[Message]
    tools: list[Any] | None
    media: tuple[Mapping[str, Any], ...]
    losses: dict[int, float]


def read_conversation(sample: Mapping[str, Any], takes: Sequence[str], system: str | None) -> Conversation:
    """Read a sample.

    Args:
        takes: modalities of the family; without any, contents are strings.
        system: system turn for samples that have none.

    Raises:
        SampleError: `malformed_record`, `empty`, `no_assistant_turn`, `unsupported_media`.
    """
    given = sample.get("messages") if isinstance(sample, Mapping) else None
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise SampleError("malformed_record", "the sample has no list of messages", hint=_SHAPE_HINT)
    if not given:
        raise SampleError("empty", "the sample has no messages")
    messages: list[Message] = []
    media: list[Mapping[str, Any]] = []
    losses: list[float | None] = []
    for place, message in enumerate(given):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise SampleError("malformed_record", f"message {place} has no role", hint=_SHAPE_HINT)
        clean = {key: value for key, value in message.items() if value is not None and key != "loss"}
        clean["content"] = _content(place, message.get("content"), media, takes)
        if clean.get("tool_calls"):
            clean["tool_calls"] = [_with_arguments(call, _parsed) for call in clean["tool_calls"]]
        messages.append(clean)
        losses.append(loss_of(message, place))
    if not any(message["role"] == "assistant" for message in messages):
        raise SampleError("no_assistant_turn", "the sample has no assistant turn, so nothing is trained")
    if system is not None and messages[0]["role"] not in ("system", "developer"):
        turn: Any = [{"type": "text", "text": system}] if takes else system
        messages.insert(0, {"role": "system", "content": turn})
        losses.insert(0, None)
    named = {place: value for place, value in enumerate(losses) if value is not None}
    return Conversation(messages, _tools(sample), tuple(media), named)


def check_closed(sample: Mapping[str, Any]) -> None:
    """A sample says nothing that no template reads: a record that was not read as a chat may.

    Raises:
        SampleError: `unread_key`: a key of the sample, a message or a text part that changes what is trained.
    """
    _rest(sample, _SAMPLE, "")
    messages = sample.get("messages")
    for message in messages if isinstance(messages, (list, tuple)) else ():
        if not isinstance(message, Mapping):
            continue
        _rest(message, _MESSAGE, "messages[].")
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if isinstance(part, Mapping) and part.get("type") == "text":
                _rest(part, _TEXT, "content[].")


def _rest(holder: Mapping[str, Any], known: frozenset[str], place: str) -> None:
    if not hasattr(holder, "keys") or holder.keys() <= known:
        return
    try:
        Account().rest(holder, [key for key in holder if key not in known], place, media=True)
    except SampleError as error:
        raise SampleError(
            error.reason,
            error.args[0],
            hint="read the records with packtrain.open_chats, or leave the key out",
        ) from None


def _content(place: int, content: Any, media: list[Mapping[str, Any]], takes: Sequence[str]) -> Any:
    if content is None:
        content = []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise SampleError("malformed_record", f"content of message {place} is not a list of parts")
    parts: list[dict[str, Any]] = []
    for part in content:
        kind: Any = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in takes and part.get(kind) is not None:
            media.append(part)
            parts.append({"type": kind, kind: kind})
        else:
            raise _unusable(place, kind, part, takes)
    return parts if takes else "".join(part["text"] for part in parts)


def _unusable(place: int, kind: Any, part: Any, takes: Sequence[str]) -> SampleError:
    """The fault of a part that the model does not take."""
    if kind in ("text", *MEDIA) and (kind == "text" or part.get(kind) is None):
        return SampleError("malformed_record", f"a {kind} part of message {place} has no {kind}")
    told, hint = f"a part of type {kind!r}; text, image, video and audio are taken", None
    if kind in MEDIA:
        told = f"{_ARTICLE[kind]}, but the model takes {' and '.join(('text', *takes))} only"
        hint = f"choose a processor that takes {kind}, or drop such samples"
    return SampleError("unsupported_media", f"message {place} has {told}", hint=hint)


def _tools(sample: Mapping[str, Any]) -> list[Any] | None:
    tools = sample.get("tools")
    if not tools:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise SampleError("malformed_record", "tools is not a list of objects", hint=_SHAPE_HINT)
    return [dict(tool) for tool in tools]


# ------------------------------------------------------------------------------------ tool arguments
def _parsed(arguments: Any) -> Any:
    """Arguments as an object where they came as its JSON text."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(arguments)
            if isinstance(found, dict):
                return found
    return arguments


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with arguments as JSON text, for templates that join them to other text (DeepSeek's)."""
    return [
        {**message, "tool_calls": [_with_arguments(call, _as_text) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_arguments(call: Any, change: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    inner = call.get("function")
    if isinstance(inner, Mapping):
        return {**call, "function": _with_arguments(inner, change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else dict(call)


# ----------------------------------------------------------------------------------------- reasoning
def without_history(messages: Sequence[Message]) -> list[Message]:
    """The messages without the reasoning of answers in front of the last question."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [
        _unreasoned(message) if place < last and message["role"] == "assistant" else message
        for place, message in enumerate(messages)
    ]


def _unreasoned(message: Message) -> Message:
    copy = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**copy, "content": with_texts(copy["content"], _answer)}


def _answer(text: str) -> str:
    """What stands behind the last `</think>`."""
    return text.rpartition("</think>")[2].lstrip() if "</think>" in text else text


# --------------------------------------------------------------------------------------------
# Names and boxes of `objects`, written into a sample's texts as the model family writes them
# --------------------------------------------------------------------------------------------
# Coordinates are thousandths of the image, or pixels of the image as the processor gets it; both are worked
# out from the image's header, so that measuring and encoding write the same digits.
_MARK = re.compile(f"{re.escape(REF)}|{re.escape(BOX)}")

Size = tuple[int, int]


def grounded(
    sample: Mapping[str, Any], family: Family, sizes: Callable[[Mapping[str, Any]], tuple[Size, Size]]
) -> Mapping[str, Any]:
    """The sample with its objects in its texts.

    Args:
        sample: a normalised chat sample with `objects`.
        family: says how names and boxes are written.
        sizes: image part -> its (height, width), and those of what the processor makes of it.

    Raises:
        SampleError: `unread_key`, where the family has no such notation; the reasons of reading an image.
    """
    objects = sample["objects"]
    if family.grounding is None:
        raise SampleError(
            "unread_key",
            f"the key 'objects' is not read: {family.name} has no published notation of boxes",
            hint="write the boxes into the text, or leave them out: ignore_keys: [objects]",
        )
    name, box, scale = family.grounding
    images = [part for turn in sample["messages"] for part in turn["content"] if part["type"] == "image"]
    names = iter(objects["ref"])
    boxes = iter(zip(objects["bbox"], objects["image_id"], strict=True))

    def written(mark: re.Match[str]) -> str:
        if mark.group() == REF:
            return name.format(next(names))
        edges, which = next(boxes)
        (high, wide), (rows, columns) = (
            sizes(images[which]) if objects["bbox_type"] == "real" else ((1, 1),) * 2
        )
        if scale == "pixels" and objects["bbox_type"] == "norm1":
            rows, columns = sizes(images[which])[1]
        target = (1000, 1000) if scale == "thousandths" else (columns, rows)
        return _box(
            box, [round(x / of * to) for x, of, to in zip(edges, (wide, high) * 2, target * 2, strict=False)]
        )

    messages = [
        {**turn, "content": with_texts(turn["content"], partial(_MARK.sub, written))}
        for turn in sample["messages"]
    ]
    return {**{key: value for key, value in sample.items() if key != "objects"}, "messages": messages}


def _box(notation: str, edges: Sequence[int]) -> str:
    """`{points}`: `(x1,y1),(x2,y2)`; `{list}`: `[x1, y1, x2, y2]`."""
    points = ",".join(f"({x},{y})" for x, y in zip(edges[::2], edges[1::2], strict=True))
    return notation.format(points=points, list=list(edges))


# --------------------------------------------------------------------------------------------
# Control tokens inside of a text: `<|im_end|>` in what a user wrote would end the turn there
# --------------------------------------------------------------------------------------------
# A tokenizer reads such a text as the token, wherever it stands. A sample that holds one is refused. Control
# tokens are special tokens that the chat template writes itself or that the tokenizer begins, ends and pads
# with; tokens that only data use (`<|box_start|>` and others of grounding, `<think>`, `<tool_call>`) stay
# what they are. Placeholders of media are counted elsewhere (`placeholder_mismatch`).
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
    return Control(re.compile("|".join(map(re.escape, found))), found[0][: common(found[0], found[-1])])


def check_control(sample: Mapping[str, Any], control: Control) -> None:
    """Refuse a sample one of whose texts holds a control token.

    Raises:
        SampleError: `control_token`.
    """
    for place, message in enumerate(sample["messages"]):
        held = texts_of(message.get("content"))
        if len(message) > 2:
            held.extend(_strings([message.get("reasoning_content"), message.get("tool_calls")]))
        _refuse(held, control, place, message)
    _refuse(_strings(sample.get("tools")), control)


def _refuse(
    texts: Iterable[str], control: Control, place: int = -1, message: Mapping[str, Any] | None = None
) -> None:
    found = next(filter(None, map(control.search, texts)), None)
    if found is not None:
        what = "the tools" if message is None else f"message {place} ({message['role']})"
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
