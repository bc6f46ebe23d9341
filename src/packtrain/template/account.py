"""Account of a rendering: everything a sample says has to come out of the chat template, in order.

A template that knows nothing of tools, or leaves the reasoning of earlier turns out, says so nowhere: the
text is only shorter. So every text, tool call, tool result, tool schema and reasoning is looked for in the
rendering. All of them have to stand in the order of the conversation: message by message, and within a
message the texts among themselves, the calls among themselves, since whether a message's calls come before or
behind its text and reasoning is the template's to say (records give none). System texts and tool schemas may
stand anywhere (templates move both to the front), each kind in its order. Space around a text may be
trimmed, quotes and line ends may be escaped as JSON does; members of arguments may be sorted.

What is missing is an error of the configuration, not of one sample: it would go missing from every such
sample. `template.allow_dropped` names what may.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

#: What `template.allow_dropped` may name.
DROPPABLE = ("text", "system", "reasoning", "tools", "tool_calls", "tool_results")

_THINK = re.compile(r"</?think>")
_SPACE = re.compile(r"\s+")
_HINTS = {
    "reasoning": "template.reasoning: drop_history takes the reasoning of earlier turns out on purpose",
    "tools": "use a chat template that renders tools (template.chat_template)",
    "tool_calls": "use a chat template that renders tool calls (template.chat_template)",
    "text": "use a chat template for contents as this model family gives them",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that has to appear.

    Attributes:
        kind: one of `DROPPABLE`.
        place: number of its message; -1: the record itself.
        role: role of that message.
        texts: what is looked for, each of them; of a tuple one of its spellings.
    """

    kind: str
    place: int
    role: str
    texts: tuple[str | tuple[str, ...], ...]


def segments(text: str, role: str) -> Iterator[tuple[str, int, int]]:
    """Parts of a text without the space around them: (kind, first character, one past the last).

    What an assistant says before a `</think>` is reasoning.
    """
    kind = {"system": "system", "developer": "system", "tool": "tool_results"}.get(role, "text")
    if role != "assistant" or "think>" not in text:
        core = text.strip()
        if core:
            first = text.index(core)
            yield kind, first, first + len(core)
        return
    at = 0
    for tag in (*_THINK.finditer(text), None):
        end = len(text) if tag is None else tag.start()
        core = text[at:end].strip()
        if core:
            first = text.index(core, at)
            closes = tag is not None and tag.group() == "</think>"
            yield ("reasoning" if closes else kind), first, first + len(core)
        if tag is not None:
            at = tag.end()


def with_texts(content: Any, change: Callable[[str], str]) -> Any:
    """The content of a message, a text or a list of parts, whose texts are what `change` makes of them."""
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]


def texts_of(content: Any) -> list[str]:
    """The texts of a content: a string, or a list of parts."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if part.get("type") == "text"]


def pieces_of(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[Piece]:
    """Everything that has to appear, by message."""
    out = [Piece("tools", -1, "tools", tuple(_schema(tool))) for tool in tools or ()]
    for place, message in enumerate(messages):
        role = message["role"]
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning.strip():
            out.append(Piece("reasoning", place, role, (reasoning.strip(),)))
        for text in texts_of(message.get("content")):
            held = segments(text, role)
            out += [Piece(kind, place, role, (text[first:last],)) for kind, first, last in held]
        calls = message.get("tool_calls") or ()
        out += [Piece("tool_calls", place, role, tuple(_call(call))) for call in calls]
    return out


def _call(call: Any) -> Iterator[str | tuple[str, ...]]:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else call
    if not isinstance(function, Mapping):
        yield str(function)
        return
    if function.get("name"):
        yield str(function["name"])
    if function.get("arguments") is not None:
        yield from _leaves(function["arguments"])


def _leaves(value: Any) -> Iterator[str | tuple[str, ...]]:
    """Keys and values of arguments."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        if value.strip():
            yield value.strip()
    else:
        yield json.dumps(value), str(value)  # true or True, null or None


#: Types of JSON Schema -> how notations of tools write them.
_TYPES = {
    "string": ("string", "str"),
    "integer": ("integer", "int", "number"),
    "number": ("number", "float"),
    "boolean": ("boolean", "bool"),
    "array": ("array", "list", "[]"),
    "object": ("object", "dict", "{"),
    "null": ("null", "None"),
}


def _schema(value: Any) -> Iterator[str | tuple[str, ...]]:
    """Names, descriptions, parameters, types and choices of tool schemas."""
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _schema(inner)
    if not isinstance(value, Mapping):
        return
    for key in ("name", "description"):
        if isinstance(value.get(key), str) and value[key].strip():
            yield value[key].strip()
    if isinstance(value.get("type"), str) and value["type"] in _TYPES:
        yield _TYPES[value["type"]]
    for key, inner in value.items():
        if key == "properties" and isinstance(inner, Mapping):
            yield from _fields(inner)
        elif key == "enum" and isinstance(inner, (list, tuple)):
            yield from (choice for choice in inner if isinstance(choice, str) and choice.strip())
        else:
            yield from _schema(inner)


def _fields(fields: Mapping[Any, Any]) -> Iterator[str | tuple[str, ...]]:
    for name, field in fields.items():
        yield str(name)
        yield from _schema(field)


def missing(text: str, pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that do not appear in a rendered text, in order."""
    out: list[Piece] = []
    begin = furthest = 0  # where the message before ended, and this one so far
    place = -1
    reached: dict[str, int] = {}  # kind -> where its last piece ended
    for piece in pieces:
        anywhere = piece.kind in ("system", "tools")
        if not anywhere and piece.place != place:
            place, begin = piece.place, furthest
            reached = {kind: end for kind, end in reached.items() if kind in ("system", "tools")}
        start = reached.get(piece.kind, 0 if anywhere else begin)
        ends: list[int] = []
        for wanted in piece.texts:
            end = min(
                (
                    e
                    for w in ((wanted,) if isinstance(wanted, str) else wanted)
                    if (e := _end(text, w, start)) >= 0
                ),
                default=-1,
            )
            ends.append(end)
            if end < 0:
                break
        if not ends:
            continue
        if ends[-1] < 0:
            out.append(piece)
            continue
        # of a tool the name decides: a notation may write its description in front
        reached[piece.kind] = ends[0] if piece.kind == "tools" else max(ends)
        if not anywhere:
            furthest = max(furthest, *ends)
    return out


def _end(text: str, wanted: str, start: int) -> int:
    """One past the first place of a text at or behind `start`, in any of its spellings; -1: nowhere."""
    at = text.find(wanted, start)
    if at >= 0:
        return at + len(wanted)
    for ascii_only in (False, True):
        escaped = json.dumps(wanted, ensure_ascii=ascii_only)[1:-1]
        at = text.find(escaped, start) if escaped != wanted else -1
        if at >= 0:
            return at + len(escaped)
    words = [re.escape(word) for word in _SPACE.split(wanted)]
    found = re.compile(r"\s+".join(words)).search(text, start) if len(words) > 1 else None
    return -1 if found is None else found.end()


def dropped(name: str, lost: Sequence[Piece]) -> ConfigError:
    """The error for pieces that a template leaves out."""
    first = lost[0]
    kinds = list(dict.fromkeys(piece.kind for piece in lost))
    what = {"tools": "the tool schemas", "text": "the text"}.get(first.kind, f"the {first.kind}")
    whose = "the record" if first.place < 0 else f"{first.role} messages (message {first.place})"
    said = (text if isinstance(text, str) else text[0] for text in first.texts)
    shown = " ".join(", ".join(said).split())[:60]
    hint = _HINTS.get(first.kind, "use another chat template")
    return ConfigError(
        f"the chat template of {name} drops {what.replace('_', ' ')} of {whose}: {shown!r} is not in the "
        "rendering",
        hint=f"{hint}; template.allow_dropped: [{', '.join(kinds)}] trains without",
    )


# --------------------------------------------------------------------------------------------
# The account of a rendering, on what is trained: the decoded ids of an encoded sample
# --------------------------------------------------------------------------------------------
# A rendering that holds everything may still lose some of it on the way to ids (a tokenizer without a token
# for a character), and ranges of characters are not yet labels. So for each audited sample the ids are
# decoded: everything the sample says has to appear, in order, and the trained stretches have to hold the
# answers.
_BETWEEN = "\n\x00\n"  # between stretches: no text runs across


def check_decoded(
    tokenizer: Any,
    name: str,
    encoded: Mapping[str, Any],
    pieces: Sequence[Piece],
    trained: Collection[int],
    media_ids: Collection[int],
) -> None:
    """Everything appears in the decoded ids, and the answers in the trained ones.

    Args:
        name: of the tokenizer, for errors.
        encoded: `input_ids` int64[T], `labels` int64[T].
        pieces: what has to appear (`account.pieces_of`), without what the template may drop.
        trained: messages that are trained.
        media_ids: ids of media tokens, which are left out.

    Raises:
        ConfigError: names the tokenizer and what it loses.
    """
    ids = np.asarray(encoded["input_ids"]).reshape(-1)
    labels = np.asarray(encoded["labels"]).reshape(-1)
    shown = ids[~np.isin(ids, list(media_ids))] if media_ids else ids
    said = [piece for piece in pieces if piece.place in trained and piece.kind in ("text", "tool_calls")]
    whole = _decoded(tokenizer, shown)
    answers = _BETWEEN.join(_decoded(tokenizer, ids[a:b]) for a, b in stretches(labels))
    for text, wanted, where in ((whole, pieces, "decoded ids"), (answers, said, "trained ids")):
        lost = missing(text, wanted)
        lost = missing(text, [_as_read(tokenizer, piece) for piece in wanted]) if lost else lost
        if lost:
            first = lost[0]
            what = first.texts[0] if isinstance(first.texts[0], str) else first.texts[0][0]
            raise ConfigError(
                f"the {first.kind.replace('_', ' ')} of message {first.place} ({first.role}), "
                f"{' '.join(what.split())[:60]!r}, is not in the {where} of {name}",
                hint="the tokenizer or the chat template loses it: use the ones the model was published with",
            )


def stretches(labels: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """(first, one past the last) of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], labels != -100, [0]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _as_read(tokenizer: Any, piece: Piece) -> Piece:
    """A piece as the tokenizer reads it (brought to NFC, say); one that it has no tokens for stays."""
    texts: list[str | tuple[str, ...]] = []
    for text in piece.texts:
        if isinstance(text, str):
            ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"])
            if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
                text = _decoded(tokenizer, ids).strip() or text
        texts.append(text)
    return Piece(piece.kind, piece.place, piece.role, tuple(texts))


def _decoded(tokenizer: Any, ids: NDArray[Any]) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
