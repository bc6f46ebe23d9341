"""Records that hold nothing but plain turns and listed media, read without a walk over their keys.

What the keys of a record are is told once for each tuple of keys (`Form`); of later records with the same
keys only values are looked at. A record that holds anything else (flags, tool calls, keys that nothing reads,
a medium that is no plain reference, an empty turn) is no plain one, and `chat` reads it in full. What is
read here, `chat` reads the same way: a law test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import SampleError
from ..media.knobs import KNOB_KEYS
from ..media.location import Ref
from ._account import Account
from ._content import MODALITIES, Media, check_text, names_medium, read_content, ref_of, refuse_file_names
from ._shapes import CALLS, REMEMBERED, ROLES, plan_of
from ._values import absent, kind_of_ref
from .keys import HARMLESS, NUMBERS, USES

#: Keys of a record that describe or set its one medium.
OF_MEDIUM = KNOB_KEYS | {"fps", "raw_fps", "duration", "frames", "width", "height"}

_NUMBERS = frozenset({int, float, bool, type(None)})

_MANY = {"image": "image", "images": "image", "videos": "video", "audio": "audio", "audios": "audio"}
_ONE = {**_MANY, "video": "video"}
#: Shape -> field of its conversation, or fields of what is asked and said.
_TALKS = {"messages": "messages", "sharegpt": "conversations"}
_PAIRS = {"alpaca": (("instruction", "input"), "output"), "columns": (("prompt",), "response")}
_NOTHING: dict[str, list[dict[str, Any]]] = {}


class Form(NamedTuple):
    """What the keys of a record are.

    Attributes:
        talk: key of the conversation; "" for a question and its answer.
        asked, said: keys of the texts of a question and its answer.
        system: key of the system text, or "".
        media: (key, modality, whether a list is several media) of every field of media.
        harmless: keys whose plain values change nothing (`keys.HARMLESS`).
        rest: all other keys: they have to hold nothing.
        aliases: (key, field) of spellings.
    """

    talk: str
    asked: tuple[str, ...]
    said: str
    system: str
    media: tuple[tuple[str, str, bool], ...]
    harmless: tuple[str, ...]
    rest: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]


@lru_cache(REMEMBERED)
def form_of(names: tuple[str, ...]) -> Form | None:
    """The form of records with these keys; None where they are of no plain shape."""
    if not all(type(name) is str for name in names):
        return None
    plan = plan_of(names)
    talk = said = ""
    asked: tuple[str, ...] = ()
    if plan.shape in _TALKS:
        talk = plan.fields[_TALKS[plan.shape]]
    elif plan.shape in _PAIRS and {*_PAIRS[plan.shape][0][:1], _PAIRS[plan.shape][1]} <= set(plan.fields):
        fields, answer = _PAIRS[plan.shape]
        asked = tuple(plan.fields[field] for field in fields if field in plan.fields)
        said = plan.fields[answer]
    else:
        return None
    media = tuple((name, _ONE[field], field in _MANY) for field, name in plan.fields.items() if field in _ONE)
    system = plan.fields.get("system", "")
    used = {talk, *asked, said, system, *(name for name, _, _ in media)}
    left = tuple(name for name in names if name not in used)
    pictures = all(kind == "image" for _, kind, _ in media)  # of which these keys set nothing
    quiet = HARMLESS - KNOB_KEYS - (frozenset() if pictures else OF_MEDIUM)
    harmless = tuple(name for name in left if name in quiet)
    rest = tuple(name for name in left if name not in quiet)
    aliases = tuple(pair for pair in plan.aliases if pair[0] in used and pair[1] in USES[plan.shape])
    return Form(talk, asked, said, system, media, harmless, rest, aliases)


def read_plain(
    record: Mapping[str, Any],
    form: Form,
    kinds: Mapping[str, str],
    pattern: re.Pattern[str] | None,
    account: Account,
    ready: Callable[[Ref], Ref],
) -> dict[str, Any] | None:
    """The sample of a plain record; None for one that has to be read in full.

    Args:
        record: the record.
        form: of its keys.
        kinds, pattern: the placeholders of media, each beginning with `<`.
        account: counts the spellings.
        ready: makes a reference ready to open.
    """
    doubted = _doubted(record, form)
    turns = None if doubted is None else _turns(record, form)
    if turns is None:
        return None
    account.begin()
    try:
        listed = _listed(record, form)
        media = Media(listed, kinds, account) if listed else None
        read = None if listed is None else _messages(turns, media, kinds, pattern, account)
        if read is None:
            return None
        messages, media = read
        seen: set[str] = set()
        if media is not None:
            if not media.complete():
                return None
            seen = open_media(messages, ready)
        if not (seen <= {"image"} or OF_MEDIUM.isdisjoint(form.harmless)):
            return None  # they may set it
        if doubted and not seen and any(kind_of_ref(record[name]) is not None for name in form.harmless):
            return None
        for name, field in form.aliases:
            if record[name] is not None and not absent(record[name]):
                account.alias(name, field)
        account.end(media=bool(seen))
    except SampleError:
        return None  # it is raised again, named, where the record is read in full
    return {"messages": messages}


def _doubted(record: Mapping[str, Any], form: Form) -> bool | None:
    """Whether a harmless key may name a medium; None where a key holds what needs a look in full."""
    doubted = False
    for name in form.harmless:
        if not says_nothing(value := record[name]):
            if type(value) is not str or name in NUMBERS or value[:1] in ("[", "{"):
                return None
            doubted = True
    for name in form.rest:
        if record[name] is not None and not absent(record[name]):
            return None
    return doubted


def _messages(
    turns: list[tuple[str, Any]],
    media: Media | None,
    kinds: Mapping[str, str],
    pattern: re.Pattern[str] | None,
    account: Account,
) -> tuple[list[dict[str, Any]], Media | None] | None:
    """The messages and the media they take; None where a turn is empty or special, or a side says nothing."""
    messages: list[dict[str, Any]] = []
    said = asked = False
    for role, content in turns:
        if type(content) is str and (role == "assistant" or "<" not in content):
            if _blank(content):
                return None
            if not content.isascii():
                check_text(content, "")
            parts = [{"type": "text", "text": content}]
        else:
            media = media or Media(_NOTHING, kinds, account)
            parts = _parts(content, media, pattern if role != "assistant" else None)
            if all(part["type"] == "text" and _blank(part["text"]) for part in parts):
                return None
        if role == "assistant":
            said = True
            if len(parts) != 1 or parts[0]["type"] != "text" or names_medium(parts[0]["text"]):
                return None
        elif role == "user":
            asked = True
            refuse_file_names(parts, "")
        messages.append({"role": role, "content": parts})
    return (messages, media) if said and asked else None


def open_media(messages: Sequence[Mapping[str, Any]], ready: Callable[[Ref], Ref]) -> set[str]:
    """Make the references of fresh parts ready to open; the kinds of media there are."""
    seen: set[str] = set()
    for message in messages:
        for part in message["content"]:
            kind = part["type"]
            if kind != "text":
                seen.add(kind)
                held = part[kind]
                part[kind] = [ready(ref) for ref in held] if isinstance(held, list) else ready(held)
    return seen


def _parts(content: Any, media: Media, pattern: re.Pattern[str] | None) -> list[dict[str, Any]]:
    """The parts of a message: plain ones as they are, all others through `read_content`."""
    if type(content) is not list:
        return read_content(content, media, pattern, "")
    out: list[dict[str, Any]] = []
    for part in content:
        if type(part) is dict and len(part) == 2 and type(kind := part.get("type")) is str:
            held = part.get(kind)
            if kind == "text" and type(held) is str and held and held.isascii():
                if pattern is None or "<" not in held:
                    out.append({"type": "text", "text": held})
                    continue
            elif kind == "image_url" and type(held) is dict and len(held) == 1 and held.get("url"):
                kind, held = "image", held["url"]
                media.account.alias("content[].image_url", "content[].image")
            if kind in MODALITIES and type(held) is str and held:
                media.inline[kind] += 1
                out.append({"type": kind, kind: ref_of(kind, held, "")})
                continue
        out += read_content([part], media, pattern, "")
    return out


def says_nothing(value: Any) -> bool:
    """Whether the value of a harmless key needs no look: a number, or a text that is no file and no JSON."""
    return type(value) in _NUMBERS or (
        type(value) is str and "." not in value and len(value) < 64 and value[:1] not in ("[", "{")
    )


def _turns(record: Mapping[str, Any], form: Form) -> list[tuple[str, Any]] | None:
    """(role, content) of every turn; None where one has more than these."""
    turns: list[tuple[str, Any]] = []
    system = record[form.system] if form.system else None
    if system is not None and type(system) is not str:
        return None
    if system:
        turns.append(("system", system))
    if not form.talk:
        pair = _pair(record, form)
        return None if pair is None else turns + pair
    talk = record[form.talk]
    if type(talk) is not list:
        return None
    for message in talk:
        if type(message) is not dict or len(message) != 2:
            return None
        role = message.get("role")
        if role is not None:
            content = message.get("content")
        else:
            role, content = message.get("from"), message.get("value")
        if type(role) is not str or content is None or role in CALLS or role not in ROLES:
            return None
        known = ROLES[role]
        if system and known == "system":
            return None
        turns.append((known, content))
    return turns


def _pair(record: Mapping[str, Any], form: Form) -> list[tuple[str, Any]] | None:
    """A question and its answer as turns."""
    asked = [record[name] for name in form.asked]
    said = record[form.said]
    if type(said) is not str or not all(type(text) is str for text in asked) or not asked[0]:
        return None
    return [("user", "\n".join(text for text in asked if text)), ("assistant", said)]


def _listed(record: Mapping[str, Any], form: Form) -> dict[str, list[dict[str, Any]]] | None:
    """Media that the record lists, by modality; None where one is no plain reference."""
    listed: dict[str, list[dict[str, Any]]] = {}
    for name, kind, several in form.media:
        held = record[name]
        if held is None or held == [] or held == "":
            continue
        if kind in listed:
            return None
        if type(held) is str:
            held = [held]
        elif type(held) is not list or not several or not all(type(ref) is str for ref in held):
            return None
        if not all(held):
            return None
        listed[kind] = [{kind: ref_of(kind, ref, "")} for ref in held]
    return listed


def _blank(text: str) -> bool:
    return not text or text.isspace()
