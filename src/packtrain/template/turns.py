"""Which characters of a rendering are trained: the turns of a conversation as spans with owners and weights.

Spans come from the template's own marks, from renderings of the beginnings of a conversation, or, where a
template writes earlier turns anew once later ones are there, from where the texts of a turn stand in the
final rendering (`locate`). Then the same rules hold for all of them: an empty think block that the template
put in front is not trained, reasoning may be masked, each message weighs what its `loss` says, and an
answer that says nothing is not trained as a bare end mark.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..checks import is_finite
from ..errors import ConfigError, SampleError
from .account import texts_of
from .marked import Placed


@dataclass(frozen=True, slots=True)
class Span:
    """A range of characters and the message it belongs to (-1: not known)."""

    first: int
    last: int
    owner: int = -1


_EMPTY_THINK = re.compile(r"\s*(?:<think>)?\s*</think>\s*")
_THINK = "<think>"
_OPENING = re.compile(r"<think>\s*\Z")
_CLOSING = re.compile(r"\s*</think>\s*")

_HINT = "mark assistant turns with {% generation %} … {% endgeneration %} in the template"


def loss_of(message: Mapping[str, Any], place: int) -> float | None:
    """What the record says of a message: its weight, or None where it says nothing.

    Raises:
        SampleError: `malformed_record`, no weight at all.
    """
    value = message.get("loss")
    if value is None:
        return None
    if is_finite(value) and value >= 0:
        return float(value)
    raise SampleError(
        "malformed_record",
        f"loss of message {place} is {value!r}",
        hint="true or false, or a weight of 0 or more",
    )


def speaks(message: Mapping[str, Any]) -> bool:
    """Whether a message says something that can be trained: a medium cannot."""
    if message.get("tool_calls") or message.get("reasoning_content"):
        return True
    return any(text and not text.isspace() for text in texts_of(message.get("content")))


def blank(message: Mapping[str, Any]) -> bool:
    """Whether a message says nothing: no text, no call, no reasoning, no medium."""
    return not speaks(message) and not shows(message)


def shows(message: Mapping[str, Any]) -> bool:
    """Whether a message holds a medium."""
    content = message.get("content")
    return not isinstance(content, str) and any(part["type"] != "text" for part in content or ())


def spoken(roles: Sequence[str], train_on: str) -> list[bool]:
    """Which messages are answers that may be trained: those of the assistant, or those behind the last
    question only."""
    last = max((place for place, role in enumerate(roles) if role == "user"), default=-1)
    after = last if train_on == "last" else -1
    return [role == "assistant" and place > after for place, role in enumerate(roles)]


def chosen(spans: Sequence[Span], weights: Mapping[int, float]) -> tuple[list[Span], tuple[float, ...]]:
    """Spans that are trained, and the weight of each (empty: all weigh 1).

    Args:
        weights: message -> weight; one that is not named weighs 1.
    """
    kept = [span for span in spans if span.last > span.first and weights.get(span.owner, 1.0) > 0]
    scale = tuple(weights.get(span.owner, 1.0) for span in kept)
    return kept, () if all(weight == 1.0 for weight in scale) else scale


def owners_of(
    spans: Sequence[tuple[int, int]], messages: Sequence[Mapping[str, Any]], found: Placed | None
) -> list[Span]:
    """Ranges that the template marked, with the message each belongs to."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) == len(answers):
        return [Span(a, b, place) for (a, b), place in zip(spans, answers, strict=True)]
    out: list[Span] = []
    for a, b in spans:
        inside: set[int] = set()
        if found is not None:
            near = range(bisect_left(found.where, (a,)), bisect_right(found.where, (b, b, len(found.leaves))))
            held = (found.where[k] for k in near)
            inside = {found.leaves[number].place for _, last, number in held if last <= b}
        out.append(Span(a, b, inside.pop() if len(inside) == 1 else -1))
    return out


def check_spans(spans: Sequence[Span], found: Placed, trained: AbstractSet[int], name: str) -> None:
    """Every text of an answer is inside of a span, and no text of anybody else.

    Args:
        trained: messages that are trained.

    Raises:
        ConfigError: the marks of the template say otherwise.
    """
    seen: dict[int, bool] = {}
    ordered = sorted((span.first, span.last) for span in spans)
    firsts, reach = [first for first, _ in ordered], [0, *accumulate((last for _, last in ordered), max)]
    for a, b, number in found.where:
        leaf = found.leaves[number]
        inside = b <= reach[bisect_right(firsts, a)]
        if leaf.place in trained and leaf.kind in ("text", "tool_calls"):
            seen[number] = seen.get(number, False) or inside
        elif leaf.role != "assistant" and a < reach[bisect_left(firsts, b)]:
            raise ConfigError(
                f"the chat template of {name} marks the text of a {leaf.role} message (message "
                f"{leaf.place}) as generated",
                hint="repair the {% generation %} marks of the chat template",
            )
    lost = next((number for number, inside in seen.items() if not inside), None)
    if lost is not None:
        leaf = found.leaves[lost]
        raise ConfigError(
            f"the chat template of {name} leaves {leaf.kind.replace('_', ' ')} of message {leaf.place} "
            "(assistant) outside of its marks, so it would not be trained",
            hint="repair the {% generation %} marks of the chat template, or train_on: last",
        )


def without_reasoning(
    spans: Sequence[Span],
    text: str,
    messages: Sequence[Mapping[str, Any]],
    found: Placed | None,
    *,
    mask: bool,
) -> list[Span]:
    """Spans without the empty think blocks of the template, and without reasoning where it is masked.

    Raises:
        SampleError: `prefix_mismatch`, reasoning is to be masked and cannot be located.
    """
    out: list[Span] = []
    for span in spans:
        first = span.first
        message = messages[span.owner] if span.owner >= 0 else {}
        own = any("</think>" in held for held in texts_of(message.get("content")))
        empty = None if own else _EMPTY_THINK.match(text, first, span.last)
        if empty is not None:
            first = empty.end()
        out.append(Span(first, span.last, span.owner))
    if not mask:
        return out
    if found is None:
        thinks = any(
            message.get("reasoning_content")
            or any("</think>" in held for held in texts_of(message["content"]))
            for message in messages
        )
        if thinks:
            raise SampleError(
                "prefix_mismatch", "reasoning is to be masked and cannot be located", hint=_HINT
            )
        return out
    holes: list[tuple[int, int]] = []
    for a, b, number in found.where:
        if found.leaves[number].kind != "reasoning":
            continue
        before = a
        while before and text[before - 1].isspace():
            before -= 1
        begin = before - len(_THINK) if text.endswith(_THINK, 0, before) else a
        closing = _CLOSING.match(text, b)
        holes.append((begin, b if closing is None else closing.end()))
    return _without(out, holes)


def without_media(spans: Sequence[Span], text: str, marks: re.Pattern[str]) -> list[Span]:
    """Spans without media: their placeholders, and what the template writes around them."""
    found = (marks.finditer(text, span.first, span.last) for span in spans)
    return _without(spans, [match.span() for matches in found for match in matches])


def _without(spans: Sequence[Span], holes: Iterable[tuple[int, int]]) -> list[Span]:
    """What is left of the spans."""
    apart: list[tuple[int, int]] = []
    for first, last in sorted(holes):
        if apart and first <= apart[-1][1]:
            first, last = apart[-1][0], max(last, apart.pop()[1])
        apart.append((first, last))
    ends = [last for _, last in apart]
    out: list[Span] = []
    for span in spans:
        inside = range(bisect_right(ends, span.first), bisect_left(apart, (span.last,)))
        edges = [span.first, *(edge for k in inside for edge in apart[k]), span.last]
        pieces = [Span(a, b, span.owner) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        out += [piece for piece in pieces if piece.last > piece.first] if inside else [span]
    return out


# ----------------------------------------------------------------------------------------- locating
def locate(
    render: Callable[[int, bool], Placed | None],
    messages: Sequence[Mapping[str, Any]],
    found: Placed | None,
    end_marks: tuple[str, ...],
) -> list[Span]:
    """Assistant turns in a final rendering whose beginnings are not renderings of beginnings.

    A turn begins where the prompt for it ends: what stands between the text before it and its own first
    text begins like that prompt, perhaps without its `<think>`. It ends behind the mark that also ends it
    as the last turn, or behind the first end mark there is.

    Args:
        render: (number of messages, with a generation prompt) -> that beginning, located.
        messages: the conversation.
        found: its rendering, located; None: it cannot be.
        end_marks: added tokens of the tokenizer.

    Raises:
        SampleError: `prefix_mismatch`.
    """
    spans: list[Span] = []
    texts: dict[int, list[int]] = {}
    if found is not None:
        for k, (_, _, number) in enumerate(found.where):
            texts.setdefault(found.leaves[number].place, []).append(k)
    for place, message in enumerate(messages):
        if message["role"] != "assistant" or blank(message):
            continue
        mine = texts.get(place, [])
        begin = end = None
        if found is not None and mine:
            begin = _begins(render(place, True), found, mine[0])
            end = _ends(render(place + 1, False), found, mine[-1], end_marks)
        elif found is not None and not any(text.strip() for text in texts_of(message.get("content"))):
            continue  # all that it says may have been dropped on purpose
        if begin is None or end is None:
            raise SampleError(
                "prefix_mismatch",
                f"the chat template renders message {place} differently as part of the whole conversation, "
                "so its trained tokens cannot be located",
                hint=_HINT,
            )
        spans.append(Span(begin, end, place))
    return spans


def _begins(prompt: Placed | None, found: Placed, leaf: int) -> int | None:
    """Where the turn begins whose first text is entry `leaf` of `found.where`; None: it cannot be told."""
    if prompt is None:
        return None
    start = found.where[leaf][0]
    before, number = (found.where[leaf - 1][1], found.where[leaf - 1][2]) if leaf else (0, None)
    end, last = (prompt.where[-1][1], prompt.where[-1][2]) if prompt.where else (0, None)
    if _same(prompt, last) != _same(found, number):
        return None
    wanted = prompt.text[end:]
    for form in (wanted, wanted.rstrip(), _OPENING.sub("", wanted)):
        if found.text.startswith(form, before) and before + len(form) <= start:
            return before + len(form)
    return None


def _ends(alone: Placed | None, found: Placed, leaf: int, end_marks: tuple[str, ...]) -> int | None:
    """Where the turn ends whose last text is entry `leaf` of `found.where`; None: it cannot be told."""
    if alone is None or not alone.where:
        return None
    behind = found.where[leaf][1]
    limit = found.where[leaf + 1][0] if leaf + 1 < len(found.where) else len(found.text)
    if _same(alone, alone.where[-1][2]) != _same(found, found.where[leaf][2]):
        return None
    closing = alone.text[alone.where[-1][1] :]
    tail = found.text[behind:limit]
    size = common(closing, tail)
    pattern = re.compile("|".join(map(re.escape, end_marks)) or r"(?!)")
    ends = [mark.end() for mark in pattern.finditer(closing[:size])]
    if ends:
        return behind + ends[-1]
    if size == len(closing):
        return behind + size
    first = pattern.search(tail)
    return None if first is None else behind + first.end()


def _same(found: Placed, number: int | None) -> tuple[Any, ...] | None:
    """What tells a text among those of the conversation: numbers ascend with messages."""
    return None if number is None else (number, found.leaves[number])


def common(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    size = min(len(one), len(other))
    return next((k for k in range(size) if one[k] != other[k]), size)
