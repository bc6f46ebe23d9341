"""The shapes of chat records: each reads one record into turns, listed media and tools.

    messages   {"messages": [{"role", "content"}, …], "images"?, "tools"?, "system"?}
    sharegpt   {"conversations": [{"from", "value"}, …], "image" | "images"?, "tools"?, "system"?}
    texts      {"texts": [{"user", "assistant"}, …], "images"?}: media go first where no text names them
    alpaca     {"instruction", "input"?, "output", "history"?: [[q, a], …], "system"?}
    columns    {prompt?, response, "history"?, "system"?, "image" | "images"?}, texts or lists of messages
    captions   {"caption" | "captions", "image" | "images"}: the medium, and what is said of it

Any of them may list videos and audios as it lists images. Every field has the spellings of `keys.py`; names
of a data set are mapped with `columns`, so a record with `talk` in place of `messages` needs
`columns={"messages": "talk"}` only. A shape is one function in `SHAPES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ..errors import nearest
from . import keys
from ._account import Account, unread
from ._beside import blocks_of, calls_of, check_json, loss_of, parsed, tools_of
from ._content import check_list, check_object, check_text, fault, refuse
from ._values import absent, kind_of_ref

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "bot", "chatgpt", "model", "function_call", "tool_call"), "assistant"
    ),
    **dict.fromkeys(("tool", "observation", "function", "tool_response", "ipython"), "tool"),
}
CALLS = ("function_call", "tool_call")
_TYPES = ("message", "function", *keys.PART)
_NUMBERED = re.compile(keys.NUMBERED)

#: Names that `columns` may map to the names of a data set.
FIELDS = (
    *(name for name in keys.FIELDS if name not in ("texts", "instances", "media")),
    *("width", "height", "duration", "frames", "fps", "sample_rate"),
    *("media", "text"),
)


class Turn(NamedTuple):
    """One message as the record has it: the role in our words, content still in any spelling.

    `media` are fields of media that stand on the message: field -> value.
    """

    role: str
    content: Any
    extra: dict[str, Any]
    media: dict[str, Any]


class Draft(NamedTuple):
    turns: list[Turn]
    tools: list[Any]
    media_first: bool = False


class Plan(NamedTuple):
    """What the keys of a record are: field -> key, (spelling, field) of aliases, all other keys."""

    fields: dict[str, str]
    aliases: tuple[tuple[str, str], ...]
    rest: tuple[str, ...]
    numbered: tuple[str, ...]
    shape: str | None  # None: not told by the keys that hold something


#: `columns` of a `ChatSource`, to be looked up by.
Columns = tuple[tuple[str, str], ...]
REMEMBERED = 4096  # tuples of keys


@lru_cache(REMEMBERED)
def plan_of(names: tuple[str, ...], mapped: Columns = ()) -> Plan:
    """The plan of a record with these keys.

    Raises:
        SampleError: malformed_record, a key that is no text.
    """
    odd = next((name for name in names if not isinstance(name, str)), None)
    if odd is not None:
        raise fault(f"has the key {odd!r}, which is no text")
    held, columns, fields, aliases = set(names), dict(mapped), {}, []
    for field in dict.fromkeys((*keys.FIELDS, *columns)):
        spellings = (columns[field],) if field in columns else keys.FIELDS.get(field, (field,))
        name = next((name for name in spellings if name in held), None)
        if name is not None:
            fields[field] = name
            if name != field and field not in columns:
                aliases.append((name, field))
    numbered = tuple(
        sorted((n for n in names if _NUMBERED.fullmatch(n)), key=lambda n: int(n.rpartition("_")[2]))
    )
    taken = {*fields.values(), *numbered}
    rest = tuple(name for name in names if name not in taken)
    shape = next((shape for shape, needed in _TELLS if needed <= fields.keys()), None)
    return Plan(fields, tuple(aliases), rest, numbered, shape)


@lru_cache(REMEMBERED)
def unread_of(names: tuple[str, ...], mapped: Columns, shape: str, named: bool) -> tuple[str, ...]:
    """Keys that a shape does not read; one that was asked for by name settles what is a conversation."""
    plan = plan_of(names, mapped)
    shapes = keys.USES.values() if named else (keys.USES[shape],)
    reads = {*dict(mapped), *(field for held in shapes for field in held)}
    unused = [name for field, name in plan.fields.items() if field not in reads]
    caption = keys.CAPTION if shape == "captions" else ()
    return (*unused, *(name for name in plan.rest if name not in caption))


@dataclass(slots=True)
class Fields:
    """A record seen through the plan of its keys."""

    record: Mapping[str, Any]
    plan: Plan
    columns: Mapping[str, str]
    account: Account

    def has(self, field: str, *, empty: bool = False) -> bool:
        """Whether a field holds something; with `empty`, whether it is there and not null."""
        return field in self.plan.fields or (empty and self.record.get(self.name(field)) is not None)

    def get(self, field: str) -> Any:
        return self.record.get(self.name(field))

    def name(self, field: str) -> str:
        return self.plan.fields.get(field) or self.columns.get(field, field)

    def text(self, field: str, *, needed: bool = False) -> str:
        """A text field; one that says nothing is "" unless it is needed."""
        value = self.get(field)
        if value is None or (not needed and absent(value)):
            if needed:
                raise fault(f"has no field {self.name(field)!r}", hint=self.hint())
            return ""
        return check_text(value, f"field {self.name(field)!r}")

    def hint(self) -> str:
        wanted = next((name for name in ("chosen", "chosen_response") if name in self.record), None)
        if wanted is not None:
            return (
                "preference data are not trained as they are: ignore_keys: [rejected] with columns: "
                f"{{response: {wanted}}} (or messages: {wanted}) trains the answers that are wanted"
            )
        return (
            f"it has the fields {', '.join(map(repr, self.record))}; columns={{'prompt': 'FIELD'}} maps names"
        )


#: Fields that tell a shape, in the order they are looked for.
_TELLS: tuple[tuple[str, frozenset[str]], ...] = (
    ("messages", frozenset({"messages"})),
    ("sharegpt", frozenset({"conversations"})),
    ("texts", frozenset({"texts"})),
    ("alpaca", frozenset({"instruction", "output"})),
    ("alpaca", frozenset({"instruction", "instances"})),
    ("columns", frozenset({"prompt", "response"})),
)
_TOLD = tuple(sorted({field for _, needed in _TELLS for field in needed}))


def detect(fields: Fields) -> str:
    """The shape of a record by its fields.

    Raises:
        SampleError: malformed_record when it has none.
    """
    columns = fields.columns
    if "prompt" in columns or "response" in columns:
        return "columns"
    if fields.plan.shape is not None:
        return fields.plan.shape
    held = {field for field in _TOLD if fields.has(field, empty=True)}
    for shape, needed in _TELLS:
        if needed <= held:
            return shape
    if any(not absent(fields.record.get(name)) for name in keys.CAPTION) and any(
        fields.has(field) for field in keys.MEDIA
    ):
        return "captions"
    hint = fields.hint()
    if any(isinstance(fields.record.get(name), str) for name in keys.TEXT):
        hint += '; task="text" trains documents as they are'
    raise fault("has no shape that is known here", hint=hint)


def _texts(fields: Fields, structured: bool) -> Draft:
    name = fields.name("texts")
    pairs = parsed(fields.get("texts"), f"field {name!r}")
    unlisted = not isinstance(pairs, (list, tuple))
    refuse(unlisted, f"field {name!r} is not a list of user and assistant texts")
    turns: list[Turn] = []
    for number, pair in enumerate(pairs):
        lacking = not isinstance(pair, Mapping) or "user" not in pair or "assistant" not in pair
        refuse(lacking, f"item {number} of {name!r} has no user and assistant text")
        fields.account.rest(pair, [key for key in pair if key not in ("user", "assistant")], "texts[].")
        turns += [Turn("user", pair["user"], {}, {}), Turn("assistant", pair["assistant"], {}, {})]
    return Draft(_with_system(turns, fields), _tools(fields), media_first=True)


def _alpaca(fields: Fields, structured: bool) -> Draft:
    turns = _history(fields)
    task = _instance(fields)
    asked = [fields.text("instruction", needed=True), task.text("input")]
    turns.append(Turn("user", "\n".join(text for text in asked if text), {}, {}))
    turns.append(Turn("assistant", task.text("output", needed=True), {}, {}))
    return Draft(_with_system(turns, fields), _tools(fields))


def _history(fields: Fields) -> list[Turn]:
    turns: list[Turn] = []
    name = fields.name("history")
    history = parsed(fields.get("history") or None, f"field {name!r}")
    unlisted = history is not None and not isinstance(history, (list, tuple))
    refuse(unlisted, f"field {name!r} is not a list of [question, answer] pairs")
    for number, pair in enumerate(history or ()):
        if isinstance(pair, Mapping):
            turns.append(_turn(pair, f"item {number} of {name!r}", True, fields.account, []))
            continue
        alone = not isinstance(pair, (list, tuple)) or len(pair) != 2
        refuse(alone, f"item {number} of {name!r} is not a [question, answer] pair")
        turns += [Turn("user", pair[0], {}, {}), Turn("assistant", pair[1], {}, {})]
    return turns


def _instance(fields: Fields) -> Fields:
    """Where `input` and `output` stand: in the record, or in its one instance (self-instruct)."""
    instances = fields.get("instances")
    if instances is None or fields.get("output") is not None:
        if not absent(instances):
            raise unread(fields.name("instances"), f"stands beside {fields.name('output')!r}")
        return fields
    if not isinstance(instances, list) or len(instances) != 1 or not isinstance(instances[0], Mapping):
        raise fault(
            f"field {fields.name('instances')!r} does not hold exactly one instance",
            hint="write a record for each instance",
        )
    held = instances[0]
    plan = plan_of(tuple(name for name in held if not absent(held[name])), tuple(fields.columns.items()))
    read = [plan.fields.get(name) for name in ("input", "output")]
    fields.account.rest(held, [name for name in held if name not in read], "instances[].")
    return Fields(held, plan, fields.columns, fields.account)


def _columns(fields: Fields, structured: bool) -> Draft:
    asked, said = fields.get("prompt"), fields.get("response")
    tools: list[Any] = []
    if _is_turns(said):
        answers = _all(said, fields.name("response"), structured, fields.account, tools)
    else:
        answers = [Turn("assistant", fields.text("response", needed=True), {}, {})]
    if "response" in fields.columns and "prompt" not in fields.columns:
        return Draft(_with_system(answers, fields), _tools(fields, tools))  # plain text: all of it is trained
    turns = _history(fields)
    if _is_turns(asked):
        before = _all(asked, fields.name("prompt"), structured, fields.account, tools)
        turns += [
            turn._replace(extra={**turn.extra, "loss": 0.0}) if turn.role == "assistant" else turn
            for turn in before
        ]  # the completion is what is trained
    else:
        turns.append(Turn("user", fields.text("prompt", needed=True), {}, {}))
    return Draft(_with_system([*turns, *answers], fields), _tools(fields, tools))


def _captions(fields: Fields, structured: bool) -> Draft:
    held = [fields.record[name] for name in keys.CAPTION if not absent(fields.record.get(name))]
    found = held[0] if held and isinstance(held[0], (list, tuple)) else held[:1]
    refuse(
        len(held) != 1 or len(found) != 1,
        f"has {max(len(held), len(found))} captions, expected one",
        hint="write a record for each; packs of LLaVA-OneVision are read by kind llava_packed",
    )
    said = found[0]
    if isinstance(said, Mapping):
        fields.account.rest(said, [key for key in said if key not in ("content", "role")], "captions[].")
        said = said.get("content")
    turns = [Turn("user", "", {}, {}), Turn("assistant", check_text(said, "its caption"), {}, {})]
    return Draft(_with_system(turns, fields), _tools(fields), media_first=True)


# --------------------------------------------------------------------------------------------
def _is_turns(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )


def _conversation(field: str, fields: Fields, structured: bool) -> Draft:
    messages = fields.get(field)
    name = fields.name(field)
    if messages is None:
        raise fault(f"has no field {name!r}", hint=fields.hint())
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = parsed(messages, f"field {name!r}")
    if isinstance(messages, Mapping):
        messages = _rows(messages)
    messages = check_list(messages, f"field {name!r}", "messages")
    tools: list[Any] = []
    turns = _all(messages, None, structured, fields.account, tools)
    return Draft(_with_system(turns, fields), _tools(fields, tools))


def _all(messages: Any, name: str | None, structured: bool, account: Account, tools: list[Any]) -> list[Turn]:
    """The turns of a list of messages; calls that follow each other are one message with several calls."""
    beside = f" of {name!r}" if name else ""
    turns: list[Turn] = []
    called = False
    for number, message in enumerate(messages):
        turn = _turn(message, f"message {number}{beside}", structured, account, tools)
        calls = structured and "tool_calls" in turn.extra and _role_of(message) in CALLS
        if calls and called:
            last = turns[-1]
            joined = [*last.extra["tool_calls"], *turn.extra["tool_calls"]]
            others = last.extra.get("loss") != turn.extra.get("loss")
            refuse(others, f"message {number}{beside} and the call before it have other loss flags")
            turns[-1] = last._replace(extra={**last.extra, "tool_calls": joined})
        else:
            turns += _told_apart(turn, f"message {number}{beside}", account)
        called = calls
    return turns


def _told_apart(turn: Turn, what: str, account: Account) -> list[Turn]:
    """The turn, or those that Anthropic's blocks in its content make: calls, thoughts, results of tools."""
    blocks = blocks_of(turn.content, turn.role, what, account)
    if blocks is None:
        return [turn]
    if turn.role == "assistant":
        made = {"tool_calls": blocks.calls, "reasoning_content": blocks.reasoning}
        made = {name: value for name, value in made.items() if value}
        twice = not made.keys().isdisjoint(turn.extra)
        refuse(twice, f"{what} has {' and '.join(made)} in its content and beside it")
        check_json(made, what)
        return [turn._replace(content=[part for run in blocks.runs for part in run], extra=turn.extra | made)]
    if turn.media or turn.extra:
        raise fault(f"{what} holds results of tools and {next(iter(turn.media | turn.extra))!r}")
    return [
        Turn("tool", run[1], {"tool_call_id": run[0]} if run[0] else {}, {})
        if isinstance(run, tuple)
        else turn._replace(content=run)
        for run in blocks.runs
    ]


def _role_of(message: Any) -> str:
    given = message.get("role") if isinstance(message, Mapping) else None
    given = message.get("from") if given is None and isinstance(message, Mapping) else given
    return given.strip().lower() if isinstance(given, str) else ""


def _rows(table: Mapping[str, Any]) -> Any:
    """Messages from an object of lists, `{"role": [...], "content": [...]}`, as Hugging Face sequences store
    them; anything else comes back as it is."""
    values = list(table.values())
    if not values or not all(isinstance(v, (list, tuple)) and len(v) == len(values[0]) for v in values):
        return table
    return [dict(zip(table, row, strict=True)) for row in zip(*values, strict=True)]


#: Key of a message -> field of `keys.MESSAGE`.
_BY_NAME = {name: field for field, names in keys.MESSAGE.items() for name in names}
_PLAIN = ({"role", "content"}, {"from", "value"})


def _turn(message: Any, what: str, structured: bool, account: Account, tools: list[Any]) -> Turn:
    message = check_object(message, what)
    role = _said_role(message, what)
    known = ROLES[role]
    if message.keys() not in _PLAIN:
        content = _one(message, "content", "value", what)
        content, extra, media = _rest(message, content, known, what, account, tools)
    else:
        content, extra, media = message.get("content", message.get("value")), {}, {}
    if role in CALLS:
        calls = calls_of(content, what)
        if structured:
            refuse("tool_calls" in extra, f"{what} is a function call and has tool_calls")
            extra["tool_calls"], content = calls, ""
    if content is None and (extra.get("tool_calls") or media):
        content = ""  # an assistant that only calls tools; a turn that is a medium
    if content is None and not {"content", "value"} & message.keys():
        close = nearest("content", [str(key) for key in message])
        raise fault(f"{what} ({role}) has no content" + (f", only {close!r}: rename it" if close else ""))
    return Turn(known, content, extra, media)


def _said_role(message: Mapping[str, Any], what: str) -> str:
    """The role of a message, one of `ROLES`."""
    role = _one(message, "role", "from", what, roles=True)
    if isinstance(role, str) and role in ROLES:
        return role
    given = _role_of(message)
    if given not in ROLES:
        shown = message.get("role") if message.get("role") is not None else message.get("from")
        raise fault(f"{what} has the unknown role {shown!r}", hint=f"roles: {', '.join(ROLES)}")
    return given


def _one(message: Mapping[str, Any], first: str, second: str, what: str, *, roles: bool = False) -> Any:
    """The value of a key or of its other spelling; both only where they agree."""
    value, other = message.get(first), message.get(second)
    if other is None:
        return value
    if value is None or value == other:
        return other
    if roles and isinstance(value, str) and isinstance(other, str):
        if ROLES.get(value.lower()) == ROLES.get(other.lower(), ""):
            return value
        raise fault(f"{what} has role {value!r} beside another from {other!r}")
    if absent(other):
        return value
    if absent(value):
        return other
    raise fault(f"{what} has {first} beside another {second}", hint=f"ignore_keys: [{second}]")


def _rest(
    message: Mapping[str, Any], content: Any, role: str, what: str, account: Account, tools: list[Any]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(content, what is kept, media) of a message with more than role and content."""
    extra: dict[str, Any] = {}
    media: dict[str, Any] = {}
    left: list[str] = []
    for name, value in message.items():
        field = _BY_NAME.get(name)
        if field in ("role", "content") or name in account.ignore or absent(value):
            continue
        if field in keys.MEDIA:
            _hold(media, name, str(field), value, account)
        elif field == "tools":
            tools.append(tools_of(value, f"{name} of {what}"))
        elif field == "type":
            content = _typed(value, content, media, what)
        elif field is not None:
            _keep(extra, name, field, value, what)
        else:
            left.append(name)
    if "name" in extra and role != "tool":
        account.note("messages[].name")  # few templates write it
    flags = [name for name in left if name in keys.LOSS]
    if len(flags) < len(left):
        account.rest(message, [name for name in left if name not in keys.LOSS], "messages[].")
    weight = loss_of(message, flags, role, what) if flags else None
    if weight is not None:
        extra["loss"] = weight
    check_json({key: held for key, held in extra.items() if key != "loss"}, what)
    return content, extra, media


def _hold(media: dict[str, Any], name: str, field: str, value: Any, account: Account) -> None:
    """Media that stand on a message."""
    if field in media:
        raise unread(f"messages[].{name}", f"stands beside another spelling of {field}")
    media[field] = value
    account.alias(f"messages[].{name}", f"messages[].{field}")


def _keep(extra: dict[str, Any], name: str, field: str, value: Any, what: str) -> None:
    """What a message keeps beside its content."""
    if field in ("tool_calls", "function_call"):
        refuse("tool_calls" in extra, f"{what} has tool_calls and function_call")
        extra["tool_calls"] = calls_of(value, what)
    elif field == "reasoning_content":
        other = extra.get(field) not in (None, value)
        refuse(other, f"{name} of {what} stands beside another text of its kind")
        extra[field] = check_text(value, f"{name} of {what}")
    else:
        extra[field] = value


def _typed(kind: Any, content: Any, media: dict[str, Any], what: str) -> Any:
    """The content of a turn that says its type: `"type": "audio"` makes it a medium."""
    if not isinstance(kind, str) or kind not in _TYPES:
        raise unread("messages[].type", f"is {kind!r}")
    modality = keys.PART.get(kind)
    if modality in (None, "text"):
        return content
    words = isinstance(content, str) and content and kind_of_ref(content) is None and "/" not in content
    refuse(words, f"{what} has the type {kind!r}, but its content is no file")
    if isinstance(content, (list, tuple)) and all(
        isinstance(item, Mapping) and "type" in item for item in content
    ):
        return content
    media[str(modality)] = content
    return ""


def _with_system(turns: list[Turn], fields: Fields) -> list[Turn]:
    system = fields.text("system")
    if not system:
        return turns
    twice = any(turn.role == "system" for turn in turns)
    refuse(twice, f"has a system message and the field {fields.name('system')!r}")
    return [Turn("system", system, {}, {}), *turns]


def _tools(fields: Fields, beside: list[Any] | None = None) -> list[Any]:
    """Tools of the record, or of its messages where it has none."""
    tools = tools_of(fields.get("tools"), f"field {fields.name('tools')!r}")
    for other in beside or ():
        others = tools and other and other != tools
        refuse(others, "has other tools in a message than elsewhere", hint="give them once")
        tools = tools or other
    return tools


SHAPES: dict[str, Callable[[Fields, bool], Draft]] = {
    "messages": partial(_conversation, "messages"),
    "sharegpt": partial(_conversation, "conversations"),
    "texts": _texts,
    "alpaca": _alpaca,
    "columns": _columns,
    "captions": _captions,
}
