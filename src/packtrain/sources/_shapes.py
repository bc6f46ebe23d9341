"""The shapes of chat records: each reads one record into turns, listed images and tools.

    messages   {"messages": [{"role", "content"}, …], "images"?, "tools"?, "system"?}
    sharegpt   {"conversations": [{"from", "value"}, …], "image" | "images"?, "tools"?, "system"?}
    alpaca     {"instruction", "input"?, "output", "history"?: [[q, a], …], "system"?}
    columns    {prompt?, response, "system"?, "image" | "images"?} with the names that `columns` maps

Any of them may list "video" | "videos" and "audio" | "audios" as it lists images.

A shape is one function in `SHAPES`. Field names are looked up through `columns`, so a record with
`dialog` in place of `messages` needs `columns={"messages": "dialog"}` only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import SampleError
from ._content import check_text, fault

__all__ = ["FIELDS", "SHAPES", "Draft", "Fields", "Turn", "detect"]

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response"), "tool"),
}
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")
_WEIGHTS = ("loss_weight", "weight")

#: Names that `columns` may map to the names of a data set.
FIELDS = (
    "prompt",
    "response",
    "system",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "width",
    "height",
    "duration",
    "frames",
    "fps",
    "sample_rate",
    "tools",
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "history",
)


class Turn(NamedTuple):
    """One message as the record has it: the role in our words, content still in any spelling."""

    role: str
    content: Any
    extra: dict[str, Any]


class Draft(NamedTuple):
    turns: list[Turn]
    tools: list[Any]


class Fields:
    """A record seen through `columns`."""

    __slots__ = ("columns", "record")

    def __init__(self, record: Mapping[str, Any], columns: Mapping[str, str]) -> None:
        self.record = record
        self.columns = columns

    def get(self, field: str) -> Any:
        return self.record.get(self.columns.get(field, field))

    def name(self, field: str) -> str:
        return self.columns.get(field, field)

    def text(self, field: str, *, needed: bool = False) -> str:
        """A text field; absent and null are "" unless it is needed."""
        value = self.get(field)
        if value is None:
            if needed:
                raise fault(f"has no field {self.name(field)!r}", hint=self.hint())
            return ""
        if not isinstance(value, str):
            raise fault(f"field {self.name(field)!r} is {type(value).__name__}, not text")
        return check_text(value, f"field {self.name(field)!r}")

    def hint(self) -> str:
        return f"it has the fields {', '.join(map(repr, self.record))}; map names with columns="


def detect(fields: Fields) -> str:
    """The shape of a record by its fields.

    Raises:
        SampleError: malformed_record when it has none.
    """
    columns = fields.columns
    if "prompt" in columns or "response" in columns:
        return "columns"
    if fields.get("messages") is not None:
        return "messages"
    if fields.get("conversations") is not None:
        return "sharegpt"
    if fields.get("instruction") is not None and (
        fields.get("output") is not None or fields.get("instances") is not None
    ):
        return "alpaca"
    if fields.get("prompt") is not None and fields.get("response") is not None:
        return "columns"
    raise fault("has no shape that is known here", hint=fields.hint())


def _messages(fields: Fields, structured: bool) -> Draft:
    return _conversation(fields, "messages", structured)


def _sharegpt(fields: Fields, structured: bool) -> Draft:
    return _conversation(fields, "conversations", structured)


def _alpaca(fields: Fields, structured: bool) -> Draft:
    turns: list[Turn] = []
    history = fields.get("history")
    if history is not None and not isinstance(history, (list, tuple)):
        raise fault(f"field {fields.name('history')!r} is not a list of [question, answer] pairs")
    for number, pair in enumerate(history or ()):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise fault(f"item {number} of {fields.name('history')!r} is not a [question, answer] pair")
        turns += [Turn("user", pair[0], {}), Turn("assistant", pair[1], {})]
    task = _instance(fields)
    asked = [fields.text("instruction", needed=True), task.text("input")]
    turns.append(Turn("user", "\n".join(text for text in asked if text), {}))
    turns.append(Turn("assistant", task.text("output", needed=True), {}))
    return Draft(_with_system(turns, fields), _tools(fields))


def _instance(fields: Fields) -> Fields:
    """Where `input` and `output` stand: in the record, or in its one instance (self-instruct)."""
    instances = fields.get("instances")
    if instances is None or fields.get("output") is not None:
        return fields
    if not isinstance(instances, list) or len(instances) != 1 or not isinstance(instances[0], Mapping):
        raise fault(
            f"field {fields.name('instances')!r} does not hold exactly one instance",
            hint="write a record for each instance",
        )
    return Fields(instances[0], fields.columns)


def _columns(fields: Fields, structured: bool) -> Draft:
    answer = Turn("assistant", fields.text("response", needed=True), {})
    if "response" in fields.columns and "prompt" not in fields.columns:
        return Draft(_with_system([answer], fields), _tools(fields))  # plain text: all of it is trained
    turns = [Turn("user", fields.text("prompt", needed=True), {}), answer]
    return Draft(_with_system(turns, fields), _tools(fields))


SHAPES: dict[str, Callable[[Fields, bool], Draft]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "columns": _columns,
}


# --------------------------------------------------------------------------------------------
def _conversation(fields: Fields, field: str, structured: bool) -> Draft:
    messages = fields.get(field)
    if messages is None:
        raise fault(f"has no field {fields.name(field)!r}", hint=fields.hint())
    if isinstance(messages, Mapping):
        messages = _rows(messages)
    if not isinstance(messages, (list, tuple)):
        raise fault(f"field {fields.name(field)!r} is {type(messages).__name__}, not a list of messages")
    turns = [_turn(message, f"message {number}", structured) for number, message in enumerate(messages)]
    return Draft(_with_system(turns, fields), _tools(fields))


def _rows(table: Mapping[str, Any]) -> Any:
    """Messages from an object of lists, `{"role": [...], "content": [...]}`, as Hugging Face sequences store
    them; anything else comes back as it is."""
    values = list(table.values())
    if not values or not all(isinstance(v, (list, tuple)) and len(v) == len(values[0]) for v in values):
        return table
    return [dict(zip(table, row, strict=True)) for row in zip(*values, strict=True)]


def _turn(message: Any, what: str, structured: bool) -> Turn:
    if not isinstance(message, Mapping):
        raise fault(f"{what} is {type(message).__name__}, not an object")
    given = message.get("role")
    given = message.get("from") if given is None else given
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise fault(f"{what} has the unknown role {given!r}", hint=f"roles: {', '.join(_ROLES)}")
    content = message.get("content")
    content = message.get("value") if content is None else content
    for key in _WEIGHTS:
        weight = message.get(key)
        if weight is not None and weight != (1 if role == "assistant" else 0):
            raise fault(
                f"{what} ({role}) asks for {key} {weight!r}",
                hint="assistant messages are trained on with weight 1, all others with 0",
            )
    extra = {key: message[key] for key in _KEPT if message.get(key) is not None}
    if given == "function_call":
        calls = _calls(content, what)
        if structured:
            extra["tool_calls"], content = calls, ""
    if content is None and "tool_calls" in extra:
        content = ""  # an assistant that only calls tools
    _check_json(extra, what)
    return Turn(role, content, extra)


def _calls(content: Any, what: str) -> list[dict[str, Any]]:
    """Tool calls from the JSON text of a `function_call` turn: one call or a list of them."""
    try:
        calls = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        raise fault(f"{what} is a function call that is not JSON") from None
    out: list[dict[str, Any]] = []
    for call in calls if isinstance(calls, list) else [calls]:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise fault(f"{what} is a function call without a name")
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # plain text stays plain text
                arguments = json.loads(arguments)
        out.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}})
    return out


def _with_system(turns: list[Turn], fields: Fields) -> list[Turn]:
    system = fields.text("system")
    if not system:
        return turns
    if any(turn.role == "system" for turn in turns):
        raise fault(f"has a system message and the field {fields.name('system')!r}")
    return [Turn("system", system, {}), *turns]


def _tools(fields: Fields) -> list[Any]:
    tools = fields.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise fault(f"field {fields.name('tools')!r} is not JSON") from None
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return []
    if not isinstance(tools, (list, tuple)):
        raise fault(f"field {fields.name('tools')!r} is {type(tools).__name__}, not a list of tools")
    _check_json({"tools": tools}, "the record")
    return list(tools)


def _check_json(value: Mapping[str, Any], what: str) -> None:
    if value:
        try:
            check_text(json.dumps(value, ensure_ascii=False, default=str), f"{', '.join(value)} of {what}")
        except (ValueError, RecursionError) as error:
            if isinstance(error, SampleError):
                raise
            raise fault(f"{', '.join(value)} of {what} cannot be written as JSON: {error}") from None
