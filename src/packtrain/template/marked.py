"""Where the texts of a conversation stand in its rendering: found by rendering it once more with marks.

Each text, reasoning and tool name is put between two marks (characters of a private range) and the template
is run again. Where the rendering without its marks is the plain rendering, the marks changed nothing and
say exactly where everything is. A template that looks at the edges of a text may answer otherwise: then
nothing is known, and whoever asks has to do without.

`traits` tells which properties of a text a template can branch on, so that one conversation can vouch for
all others that look the same to it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .account import Piece, segments, texts_of, with_texts

_MARK = re.compile("([\ue000\ue001])(\\d+)\ue002")
_RESERVED = re.compile("[\ue000-\ue002]")

_METHODS = {
    *("startswith", "endswith", "split", "rsplit", "strip", "lstrip", "rstrip", "replace", "get", "items"),
    *("keys", "values", "append", "update", "upper", "lower", "capitalize", "title", "format"),
}
_FILTERS = {
    *("trim", "tojson", "length", "count", "default", "d", "string", "safe", "items", "first", "last"),
    *("list", "reverse", "join", "map", "select", "reject", "selectattr", "rejectattr", "upper", "lower"),
    *("replace", "capitalize", "title", "indent", "e", "escape", "dictsort", "sort", "unique", "from_json"),
    "int",
}
_NAMES = ("role", "type", "name", "recipient")  # what is compared with constants beside texts


@dataclass(frozen=True)
class Placed:
    """A rendering whose texts are located.

    Attributes:
        text: the rendering, marks taken out.
        leaves: what was marked.
        where: (first character, one past the last, number of the leaf), ascending; a leaf may stand in the
            text several times, or not at all.
    """

    text: str
    leaves: tuple[Piece, ...]
    where: tuple[tuple[int, int, int], ...]


def with_marks(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Piece]] | None:
    """The conversation with marks around its texts, and what was marked; None where a text holds marks."""
    leaves: list[Piece] = []
    marked = [_Marker(leaves, n, m["role"]).message(m) for n, m in enumerate(messages)]
    return None if any(_RESERVED.search(str(leaf.texts[0])) for leaf in leaves) else (marked, leaves)


class _Marker:
    """Puts marks around the texts of one message."""

    def __init__(self, leaves: list[Piece], place: int, role: str) -> None:
        self.leaves, self.place, self.role = leaves, place, role

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        copy = dict(message)
        content, reasoning = copy.get("content"), copy.get("reasoning_content")
        if content is not None:
            copy["content"] = with_texts(content, self.text)
        if isinstance(reasoning, str) and (core := reasoning.strip()):
            copy["reasoning_content"] = reasoning.replace(core, self.mark(core, "reasoning"), 1)
        if copy.get("tool_calls"):
            copy["tool_calls"] = [self.call(call) for call in copy["tool_calls"]]
        return copy

    def mark(self, text: str, kind: str) -> str:
        number = len(self.leaves)
        self.leaves.append(Piece(kind, self.place, self.role, (text,)))
        return f"\ue000{number}\ue002{text}\ue001{number}\ue002"

    def text(self, text: str) -> str:
        out: list[str] = []
        at = 0
        for kind, first, last in segments(text, self.role):
            out += [text[at:first], self.mark(text[first:last], kind)]
            at = last
        return "".join([*out, text[at:]])

    def call(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        inner = call.get("function")
        held = inner if isinstance(inner, Mapping) else call
        name = held.get("name")
        if not isinstance(name, str) or not name or _RESERVED.search(name):
            return call
        held = {**held, "name": self.mark(name, "tool_calls")}
        return {**call, "function": held} if isinstance(inner, Mapping) else held


def placed(rendered: str, leaves: Sequence[Piece]) -> Placed | None:
    """A rendering with marks, located; None where marks were torn apart."""
    pieces: list[str] = []
    where: list[tuple[int, int, int]] = []
    opened: dict[int, int] = {}
    at = size = 0
    for match in _MARK.finditer(rendered):
        pieces.append(rendered[at : match.start()])
        size += match.start() - at
        at = match.end()
        number = int(match.group(2))
        if match.group(1) == "\ue000":
            opened[number] = size
        elif number in opened:
            where.append((opened.pop(number), size, number))
        else:
            return None
    pieces.append(rendered[at:])
    text = "".join(pieces)
    if opened or _RESERVED.search(text):
        return None
    return Placed(text, tuple(leaves), tuple(sorted(where)))


# ----------------------------------------------------------------------------------------- traits
@dataclass(frozen=True)
class Traits:
    """What of a text a chat template can branch on.

    Attributes:
        words: constants that texts are searched for or compared with.
        known: False where it may look at more than those, emptiness and the space at the edges.
    """

    words: tuple[str, ...]
    known: bool

    def of(self, text: str) -> tuple[Any, ...]:
        """The properties of one text."""
        core = text.strip()
        if not core:
            return (len(text) > 0,)
        held = [n for n, word in enumerate(self.words) if word in text]
        edges = [(core.startswith(self.words[n]), core.endswith(self.words[n])) for n in held]
        return (text[0].isspace(), text[-1].isspace(), *held, *edges)

    def key(self, messages: Sequence[Mapping[str, Any]], tools: bool) -> tuple[Any, ...] | None:
        """What two conversations share that this template cannot tell apart; None where that is unknown."""
        if not self.known:
            return None
        shape: list[Any] = [tools]
        for message in messages:
            content = message.get("content")
            kinds = None if isinstance(content, str) else tuple(part["type"] for part in content or ())
            texts = tuple(self.of(text) for text in texts_of(content))
            reasoning = message.get("reasoning_content")
            shape.append(
                (
                    message["role"],
                    kinds,
                    texts,
                    self.of(reasoning) if isinstance(reasoning, str) else None,
                    len(message.get("tool_calls") or ()),
                    tuple(sorted(message)),
                )
            )
        return tuple(shape)


@functools.lru_cache(maxsize=64)
def traits(template: str) -> Traits:
    """Read the traits of a chat template from its syntax tree."""
    from .skeleton import parsed

    tree, n = parsed(template)
    if tree is None:
        return Traits((), False)
    words: set[str] = set()
    known = True
    for node in tree.find_all((n.Call, n.Filter, n.Compare, n.Getitem)):
        if isinstance(node, n.Call) and isinstance(node.node, n.Getattr):
            known = known and node.node.attr in _METHODS
            if node.node.attr not in ("get", "strip", "lstrip", "rstrip"):
                words |= _constants(node.args, n)
        elif isinstance(node, n.Filter):
            known = known and node.name in _FILTERS
            words |= _constants(node.args, n)
        elif isinstance(node, n.Compare):
            sides = (node.expr, *(operand.expr for operand in node.ops))
            if not any(_named(side, n) for side in sides):
                words |= _constants(sides, n)
        elif isinstance(node, n.Getitem) and isinstance(node.arg, n.Slice):
            known = known and "messages" in str(getattr(node.node, "name", ""))
    return Traits(tuple(sorted(words)), known)


def _constants(nodes: Sequence[Any], n: Any) -> set[str]:
    return {node.value for node in nodes if isinstance(node, n.Const) and isinstance(node.value, str)} - {""}


def _named(node: Any, n: Any) -> bool:
    if isinstance(node, n.Getattr):
        return node.attr in _NAMES
    return isinstance(node, n.Getitem) and getattr(node.arg, "value", None) in _NAMES
