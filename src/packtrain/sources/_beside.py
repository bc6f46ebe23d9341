"""What a message or record says beside its text and media: tool calls and tools, loss flags, objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..checks import is_finite
from ..errors import SampleError, counted
from ._account import Account
from ._content import check_list, check_text, fault, refuse
from ._records import Twice, loads
from ._values import absent, pruned
from .keys import BLOCK, LOSS

# --------------------------------------------------------------------------------------------
# Tool calls and tools, in the spellings that records have, as one: objects, arguments parsed
# --------------------------------------------------------------------------------------------
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
        if not strict and not isinstance(error, Twice):
            return value
        told = f"gives {error}" if isinstance(error, Twice) else "is not JSON"
        raise fault(f"{what} {told}") from None


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
        inner: Any = call.get("function")
        wrapped = isinstance(inner, Mapping)
        named: dict[str, Any] = dict(inner if wrapped else call)
        refuse(not isinstance(named.get("name"), str), f"{what} is a function call without a name")
        function = {"name": named.pop("name"), "arguments": _arguments(named, what)}
        rest = {key: value for key, value in (call if wrapped else named).items() if key != "function"}
        odd = [key for key in rest if key not in _BESIDE] + (list(named) if wrapped else [])
        if odd:
            raise fault(f"{what} is a function call with {odd[0]!r} beside its name and arguments")
        out.append({**({} if wrapped else {"type": "function"}), **rest, "function": function})
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
            hint = "write it as a message of its own"
            refuse(found.calls, f"{where} stands behind a tool_use", hint=hint)
            if not found.runs or isinstance(found.runs[-1], tuple):
                found.runs.append([])
            found.runs[-1] = [*found.runs[-1], part]
            continue
        others = (role == "assistant") != (kind != "tool_result") or role == "system"
        refuse(others, f"{where} is a {kind} of the role {role}")
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
    if isinstance(tools, str) and not tools.strip():
        return []
    tools = parsed(tools, what) if isinstance(tools, str) else pruned(tools)
    if absent(tools):
        return []
    held = enumerate(check_list(tools, what, "tools"))
    read = [parsed(tool, f"item {number} of {what}") for number, tool in held]
    check_json({"tools": read}, "the record")
    return read


def check_json(value: Mapping[str, Any], what: str) -> None:
    """Values that UTF-8 and JSON can hold."""
    if value:
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except (ValueError, RecursionError) as error:
            raise fault(f"{', '.join(value)} of {what} cannot be written as JSON: {error}") from None
        check_text(text, f"{', '.join(value)} of {what}")


# --------------------------------------------------------------------------------------------
# Loss flags of messages and records: is an answer trained, and with which weight?
# --------------------------------------------------------------------------------------------
#: Flags of a record that may be any weight; others also name what was recorded there (`loss: 2.31`).
_WEIGHTS = ("weight", "loss_weight", "loss_scale")


def loss_of(message: Mapping[str, Any], flags: Iterable[str], role: str, what: str) -> float | None:
    """The weight that flags of a message ask for; None for the default.

    Args:
        message: the message.
        flags: names of the flags it has.
        role: its role; only an assistant's messages can be trained.
        what: the message, for errors.

    Raises:
        SampleError: malformed_record, for a flag that is none, flags that disagree, or a turn of another role
            that asks to be trained.
    """
    weight: float | None = None
    first = ""
    for flag in flags:
        value = message[flag]
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            value = value.strip().lower() == "true"
        told = f"{what} has {flag} {value!r}"
        refuse(not is_finite(value) or value < 0, told, hint="true, false, or a weight >= 0")
        asked = float(value)
        if not LOSS[flag]:
            hint = "true masks a message; loss_weight takes weights"
            refuse(asked not in (0.0, 1.0), told, hint=hint)
            asked = 1.0 - asked
        refuse(weight is not None and weight != asked, f"{what} has {first} and {flag}, which disagree")
        weight, first = asked, flag
    if role != "assistant":
        if weight:
            raise fault(
                f"{what} ({role}) asks for {first} {message[first]!r}",
                hint="only assistant messages are trained on",
            )
        return None
    return None if weight == 1.0 else weight


def weigh(
    record: Mapping[str, Any], names: Iterable[str], messages: Iterable[dict[str, Any]], account: Account
) -> tuple[str, ...]:
    """The keys of a record that are no loss flags; what those say holds for all its answers.

    The weight of an answer is what the record says times what the message says. A value that is no flag
    (a mask, a text, a recorded loss) comes back, to be accounted for.

    Args:
        record: the record.
        names: keys of it that nothing read.
        messages: its messages; `loss` of the answers is set.
        account: counts the flags as read.

    Raises:
        SampleError: malformed_record, for flags that disagree.
    """
    names = tuple(names)
    flags = [name for name in names if name in LOSS and _is_flag(name, record[name])]
    if not flags:
        return names
    weight = loss_of(record, flags, "assistant", "the record")
    for message in messages:
        if message["role"] == "assistant" and weight is not None:
            message["loss"] = weight * message.get("loss", 1.0)
            if message["loss"] == 1.0:
                del message["loss"]
    for name in flags:
        account.alias(name, "loss of its answers")
    return tuple(name for name in names if name not in flags)


def _is_flag(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("true", "false")
    if not isinstance(value, (bool, int, float)):
        return False
    return name in _WEIGHTS or value in (0, 1)


# --------------------------------------------------------------------------------------------
# `objects` of a record: boxes and names that stand at `<bbox>` and `<ref-object>` in its texts (ms-swift)
# --------------------------------------------------------------------------------------------
#     {"ref": ["dog"], "bbox": [[x1, y1, x2, y2]], "bbox_type": "real" | "norm1", "image_id": [0]}
#
# Boxes (or points, two numbers) are pixels of their image, or shares of its sides (`norm1`); `image_id` says
# which listed image each belongs to, the first where it is left out. How they are written is the model
# family's to say: the template fills them in.
REF, BOX = "<ref-object>", "<bbox>"

_KEYS = ("ref", "bbox", "bbox_type", "image_id")


def objects_of(value: Any, texts: Iterable[str], images: int) -> dict[str, Any] | None:
    """The objects of a record, checked; None where its texts have no place for any, or it has no image.

    Args:
        value: what the record holds.
        texts: its texts, in order.
        images: how many images it has.

    Raises:
        SampleError: malformed_record; placeholder_mismatch, where texts have more or fewer places.
    """
    told = list(texts)
    places = {mark: sum(text.count(mark) for text in told) for mark in (REF, BOX)}
    if not images or not any(places.values()) or not isinstance(value, Mapping):
        return None
    held = {name: inner for name, inner in value.items() if not absent(inner)}
    odd = [name for name in held if name not in _KEYS]
    if odd:
        raise fault(f"objects holds {odd[0]!r}", hint=f"it takes {', '.join(_KEYS)}")
    names, boxes, which = (held.get(name, []) for name in ("ref", "bbox", "image_id"))
    texts_only = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    refuse(not texts_only, "ref of objects is not a list of texts")
    boxes_only = isinstance(boxes, (list, tuple)) and all(map(_is_box, boxes))
    refuse(not boxes_only, "bbox of objects is not a list of [x1, y1, x2, y2] or [x, y]")
    for mark, found in ((REF, names), (BOX, boxes)):
        if places[mark] != len(found):
            raise SampleError(
                "placeholder_mismatch",
                f"the text has {places[mark]} {mark} but objects holds {len(found)}",
                hint="ignore_keys: [objects] trains the text as it stands",
            )
    kind = held.get("bbox_type", "real")
    refuse(kind not in ("real", "norm1"), f"bbox_type of objects is {kind!r}", hint="real or norm1")
    which = [*which, *[0] * (len(boxes) - len(which))] if isinstance(which, (list, tuple)) else which
    known = isinstance(which, list) and len(which) == len(boxes)
    if not known or not all(type(number) is int and 0 <= number < images for number in which):
        raise fault(
            f"image_id of objects is {which!r} for "
            f"{counted(len(boxes), 'boxes')} and {counted(images, 'images')}"
        )
    return {"ref": list(names), "bbox": [list(b) for b in boxes], "bbox_type": kind, "image_id": which}


def _is_box(box: Any) -> bool:
    return (
        isinstance(box, (list, tuple))
        and len(box) in (2, 4)
        and all(type(edge) in (int, float) and is_finite(edge) and edge >= 0 for edge in box)
    )
