"""Tool calls and tools, in the spellings that records have, as one: objects, arguments parsed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import SampleError
from ._content import check_list, check_text, fault
from ._once import Twice, loads
from ._values import absent, pruned
from .keys import BLOCK

#: What may stand beside the name and arguments of a call.
_BESIDE = ("id", "index", "call_id", "type")


def parsed(value: Any, what: str, *, strict: bool = True) -> Any:
    """A value that may be JSON text.

    Raises:
        SampleError: malformed_record, for text that is no JSON (with `strict`), or that gives a key twice.
    """
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except (ValueError, RecursionError) as error:
        if isinstance(error, Twice):
            raise fault(f"{what} gives {error}") from None
        if strict:
            raise fault(f"{what} is not JSON") from None
        return value


def calls_of(content: Any, what: str) -> list[dict[str, Any]]:
    """Calls from a `function_call` turn or a `tool_calls` field: one call or a list, objects or JSON text.

    Each comes out as `{"type": "function", "function": {"name", "arguments"}}`; what else stands in a call
    (`id`) is kept. Arguments are an object; text that is no JSON stays text.
    """
    held = parsed(content, f"{what} (a function call)")
    out: list[dict[str, Any]] = []
    for item in held if isinstance(held, (list, tuple)) else [held]:
        call = parsed(item, f"{what} (a function call)") if isinstance(item, str) else item
        call = pruned(call) if isinstance(call, Mapping) else {}
        inner = call.get("function")
        wrapped = isinstance(inner, Mapping)
        named: dict[str, Any] = dict(inner) if isinstance(inner, Mapping) else dict(call)
        if not isinstance(named.get("name"), str):
            raise fault(f"{what} is a function call without a name")
        named["arguments"] = _arguments(named, what)
        function = {"name": named.pop("name"), "arguments": named.pop("arguments")}
        rest = {key: value for key, value in (call if wrapped else named).items() if key != "function"}
        odd = [key for key in rest if key not in _BESIDE] + (list(named) if wrapped else [])
        if odd:
            raise fault(f"{what} is a function call with {odd[0]!r} beside its name and arguments")
        rest = rest if wrapped else {"type": "function", **rest}
        out.append({**rest, "function": function})
    return out


def _arguments(call: dict[str, Any], what: str) -> Any:
    names = [name for name in ("arguments", "parameters", "input", "args") if name in call]
    if len(names) > 1:
        raise fault(f"{what} is a function call with {names[0]} and {names[1]}")
    held = call.pop(names[0]) if names else {}
    if held is None or (isinstance(held, str) and not held.strip()):
        return {}
    read = parsed(held, f"arguments of {what}", strict=False)
    return read if isinstance(read, Mapping) else held


class Blocks(NamedTuple):
    """The content of a message, told apart.

    Attributes:
        runs: in order: parts that stand side by side, or the `tool_call_id` and content of a tool's result.
        calls: calls of an answer.
        reasoning: its thoughts, or "".
    """

    runs: list[list[Any] | tuple[Any, Any]]
    calls: list[dict[str, Any]]
    reasoning: str


def blocks_of(content: Any, role: str, what: str, account: Any) -> Blocks | None:
    """The content of a message that holds Anthropic's blocks; None for one without.

    Raises:
        SampleError: malformed_record, for a block that its role cannot have, and for words behind a call or
            before a thought: no template keeps their order.
    """
    kinds = [_kind(part) for part in content] if isinstance(content, (list, tuple)) else []
    if BLOCK.keys().isdisjoint(kinds):
        return None
    found = Blocks([], [], "")
    for number, (kind, part) in enumerate(zip(kinds, content, strict=True)):
        where = f"part {number} of {what}"
        if kind not in BLOCK:
            if found.calls:
                raise fault(f"{where} stands behind a tool_use", hint="write it as a message of its own")
            if not found.runs or isinstance(found.runs[-1], tuple):
                found.runs.append([])
            found.runs[-1] = [*found.runs[-1], part]
            continue
        if (role == "assistant") != (kind != "tool_result") or role == "system":
            raise fault(f"{where} is a {kind} of the role {role}")
        reads = {"tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id", "content")}
        known = {"type", *reads.get(str(kind), ("thinking", "signature"))}
        account.rest(part, [key for key in part if key not in known], "content[].")
        if kind == "tool_use":
            call = {key: part[key] for key in ("id", "name", "input") if part.get(key) is not None}
            found.calls.extend(calls_of(call, where))
        elif kind == "tool_result":
            found.runs.append((part.get("tool_use_id"), part.get("content") or ""))
        elif found.calls or found.runs or found.reasoning or not isinstance(part.get("thinking"), str):
            raise fault(f"{where} is no thinking that stands first")
        else:
            found = found._replace(reasoning=part["thinking"])
    return found


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None


def tools_of(tools: Any, what: str) -> list[Any]:
    """The tools of a field: a list of objects, JSON text of one, or a list of JSON texts."""
    if isinstance(tools, str):
        if not tools.strip():
            return []
        tools = parsed(tools, what)
    else:
        tools = pruned(tools)
    if absent(tools):
        return []
    held = check_list(tools, what, "tools")
    read = [parsed(tool, f"item {number} of {what}") for number, tool in enumerate(held)]
    check_json({"tools": read}, "the record")
    return read


def check_json(value: Mapping[str, Any], what: str) -> None:
    """Values that UTF-8 and JSON can hold."""
    if value:
        try:
            check_text(json.dumps(value, ensure_ascii=False, default=str), f"{', '.join(value)} of {what}")
        except (ValueError, RecursionError) as error:
            if isinstance(error, SampleError):
                raise
            raise fault(f"{', '.join(value)} of {what} cannot be written as JSON: {error}") from None
