"""Chat records of any common shape as one shape: `{"messages": [{"role", "content": [part, …]}, …]}`.

`ChatSource` wraps any source of raw records and is a source itself. A normalised sample holds

    messages   role is system | user | assistant | tool; content is always a list of parts
               ({"type": "text", "text"}, {"type": "image", "image": ref}, the same for audio, and
               {"type": "video", "video": ref or list of refs}; hints such as width beside the ref);
               `tool_calls`, `tool_call_id`, `name`, `reasoning_content` are kept where the record has them
    tools      list, only where the record has tools

with refs ready to open: absolute paths, URLs, data URLs or bytes. Shapes and spellings are described in
`_shapes.py` and `_content.py`. Whether media exist is not checked here: opening them says so.

Reasons of the `SampleError` a record can raise: malformed_record (no known shape, null content, unknown
role, text that UTF-8 cannot hold), empty (no message, or nothing said by the assistant, or by the user),
no_assistant_turn, placeholder_mismatch, outside_media_root, unsupported_media.

The fingerprint covers the inner source and the options, never the place: equal data in another folder or
on another host has the same one. Media are no part of it (see `media_refs`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, SampleError, UnknownNameError
from ..extend import Source
from ..files import digest_json
from ..media.hints import HINTS, checked
from ..media.location import Ref, is_url, resolve
from ._content import MODALITIES, Media, fault, media_list, read_content
from ._shapes import FIELDS, SHAPES, Draft, Fields, Turn, detect

__all__ = ["ChatSource", "media_refs"]

SCHEMA = 2  # raised when the same record would be normalised to another sample
_HINTS = tuple(dict.fromkeys(name for kind in MODALITIES for name in HINTS[kind] if name in FIELDS))
_PLACEHOLDERS = {"image": ("<image>",), "video": ("<video>",), "audio": ("<audio>",)}


class ChatSource:
    """Normalised chat samples of a source of raw records.

    Args:
        source: any source whose items are mappings.
        shape: "auto" (told per record), or one of messages, sharegpt, alpaca, columns: other records are
            then refused.
        columns: our field name -> name in the data, e.g. `{"prompt": "question", "response": "answer"}`.
        placeholders: what stands for a medium in a text: modality -> texts; default `<image>`, `<video>`,
            `<audio>`. A list or text is for images. `()` for none (`{"video": ()}` where `<video>` is HTML).
        media_root: folder or URL that relative media paths start from and must stay in; default the source's
            folder. Given explicitly, absolute paths must lie in it too.
        media_prefix: text that relative media paths start with and that is cut off before they are joined to
            the media root, for data whose paths start from another folder (`data/` in `data/x/1.jpg`).
        allow_outside: let media paths leave the media root.
        media_without_placeholder: what to do with listed media when the text has no placeholder of their
            kind: "error", or "prepend": all of them go before the text of the first user message, images
            before videos before sounds.
        tool_calls: "structured": a sharegpt `function_call` becomes `tool_calls` of an assistant message,
            for templates that render them; "text": it stays the assistant's text.

    A source whose items are normalised already (`source.normalised`, such as a mixture) is passed through:
    the options were given to its parts.

    Hints: `columns` may also map `width`, `height`, `duration`, `frames`, `fps` and `sample_rate` to fields
    of the data, each one number or a list as long as the listed media that take it.

    Raises:
        ConfigError: an option that cannot hold.
    """

    def __init__(
        self,
        source: Source,
        *,
        shape: str = "auto",
        columns: Mapping[str, str] | None = None,
        placeholders: Mapping[str, Sequence[str] | str] | Sequence[str] | str | None = None,
        media_root: str | os.PathLike[str] | None = None,
        media_prefix: str | None = None,
        allow_outside: bool = False,
        media_without_placeholder: str = "error",
        tool_calls: str = "structured",
    ) -> None:
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise ConfigError(
                f"{type(source).__name__} is no source: records must be indexable and counted",
                hint="write a one-shot generator to a JSONL file first, and open that",
            )
        self._source = source
        self._shape = _one_of("chat shape", shape, ("auto", *SHAPES))
        self._prepend = _one_of("media_without_placeholder", media_without_placeholder, ("error", "prepend"))
        self._calls = _one_of("tool_calls", tool_calls, ("structured", "text"))
        self._columns = _checked_columns(columns, shape)
        self._placeholders = _checked_placeholders(placeholders)
        self._pattern = _pattern(self._placeholders)
        self._kinds = {name: kind for kind, names in self._placeholders.items() for name in names}
        self._free = media_root is None
        folder = getattr(source, "folder", None) if media_root is None else os.fspath(media_root)
        folder = os.getcwd() if folder is None else folder
        self._root = folder if is_url(folder) else os.path.abspath(folder)
        self._normalised = bool(getattr(source, "normalised", False))
        self._prefix = media_prefix or ""
        self._allow_outside = bool(allow_outside)

    @property
    def source(self) -> Source:
        """The source of raw records."""
        return self._source

    @property
    def media_root(self) -> str:
        """Absolute path of the folder relative media paths start from."""
        return self._root

    @property
    def fingerprint(self) -> str:
        return digest_json({"source": self._source.fingerprint, "chat": self.config()})

    def config(self) -> dict[str, Any]:
        """The options that affect a sample, as plain JSON. The media root is not among them."""
        return {
            "schema": SCHEMA,
            "shape": self._shape,
            "columns": dict(sorted(self._columns.items())),
            "placeholders": {kind: list(names) for kind, names in sorted(self._placeholders.items())},
            "media_prefix": self._prefix,
            "media_without_placeholder": self._prepend,
            "tool_calls": self._calls,
            "absolute_paths": self._free,
            "allow_outside": self._allow_outside,
        }

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON."""
        inner = getattr(self._source, "fields", None)
        source = inner() if callable(inner) else {"fingerprint": self._source.fingerprint}
        return {"source": source, "chat": self.config()}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self._source[index]
        try:
            return self._passed(record) if self._normalised else self._normalise(record)
        except SampleError as error:
            raise SampleError(
                error.reason, f"{self.where(index)}: {error.message}", hint=error.hint
            ) from None

    def where(self, index: int) -> str:
        return self._source.where(index)

    def __repr__(self) -> str:
        return f"<chat over {self._source!r}, {self.fingerprint[:7]}>"

    # ----------------------------------------------------------------------------------------
    def _normalise(self, record: Any) -> dict[str, Any]:
        if not isinstance(record, Mapping):
            raise fault(f"the record is {type(record).__name__}, not an object")
        fields = Fields(record, self._columns)
        shape = detect(fields) if self._shape == "auto" else self._shape
        draft = SHAPES[shape](fields, self._calls == "structured")
        media = Media(self._listed(fields), self._kinds)
        messages = self._messages(draft, media)
        _check_said(messages)
        self._resolve(messages)
        sample: dict[str, Any] = {"messages": messages}
        if draft.tools:
            sample["tools"] = draft.tools
        return sample

    def _passed(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A sample that is normalised already; only where its media may lie is checked."""
        messages = [
            {**message, "content": [dict(part) for part in message["content"]]}
            for message in sample["messages"]
        ]
        self._resolve(messages)
        return {**sample, "messages": messages}

    def _listed(self, fields: Fields) -> dict[str, list[dict[str, Any]]]:
        """Media a record lists beside its text, in `images` or `image` and so on, with mapped hints."""
        listed: dict[str, list[dict[str, Any]]] = {}
        for kind in MODALITIES:
            plural = f"{kind}s"
            several = media_list(kind, fields.get(plural), f"field {fields.name(plural)!r}")
            single = media_list(kind, fields.get(kind), f"field {fields.name(kind)!r}", single=True)
            if several and single and fields.name(kind) != fields.name(plural):
                raise fault(f"has {plural} in {fields.name(plural)!r} and in {fields.name(kind)!r}")
            listed[kind] = several or single
        self._add_hints(fields, listed)
        return listed

    def _add_hints(self, fields: Fields, listed: Mapping[str, list[dict[str, Any]]]) -> None:
        for name in _HINTS:
            values = fields.get(name) if name in self._columns else None
            if values is None:
                continue
            parts = [part for kind in MODALITIES if name in HINTS[kind] for part in listed[kind]]
            values = list(values) if isinstance(values, (list, tuple)) else [values]
            if len(values) != len(parts):
                raise fault(f"field {fields.name(name)!r} has {len(values)} values for {len(parts)} media")
            for part, value in zip(parts, values, strict=True):
                if value is not None:
                    part[name] = checked(name, value)

    def _messages(self, draft: Draft, media: Media) -> list[dict[str, Any]]:
        if not draft.turns:
            raise SampleError("empty", "the record has no messages")
        messages = [
            {
                "role": turn.role,
                "content": read_content(turn.content, media, self._pattern, _name(number, turn)),
                **turn.extra,
            }
            for number, turn in enumerate(draft.turns)
        ]
        first = next((message for message in messages if message["role"] == "user"), None)
        if self._prepend == "prepend" and first is not None:
            ahead: list[dict[str, Any]] = []
            for kind in MODALITIES:
                if not media.asked[kind] and not media.inline[kind]:
                    ahead += [media.next(kind) for _ in media.listed[kind]]
            first["content"] = ahead + first["content"]
        media.check(self._placeholders)
        return messages

    def _resolve(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refs of fresh parts, ready to open."""
        for message in messages:
            for part in message["content"]:
                kind = part["type"]
                if kind == "text":
                    continue
                held = part[kind]
                part[kind] = [self._open(ref) for ref in held] if isinstance(held, list) else self._open(held)

    def _open(self, ref: Ref) -> Ref:
        if self._prefix and isinstance(ref, str):
            ref = ref.removeprefix(self._prefix)
        return resolve(ref, self._root, self._allow_outside, absolute_ok=self._free)


def media_refs(sample: Mapping[str, Any]) -> list[Ref]:
    """The media of a normalised sample, in the order the model sees them; frames of a video one by one."""
    refs: list[Ref] = []
    for message in sample["messages"]:
        for part in message["content"]:
            if part["type"] != "text":
                held = part[part["type"]]
                refs += held if isinstance(held, list) else [held]
    return refs


# --------------------------------------------------------------------------------------------
def _check_said(messages: list[dict[str, Any]]) -> None:
    """There is an answer to train on and a question that was asked."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise SampleError("no_assistant_turn", "the record has no assistant message: nothing to train on")
    if not any(message.get("tool_calls") or _holds_text(message) for message in answers):
        raise SampleError("empty", "every assistant message is empty")
    asked = [message for message in messages if message["role"] == "user"]
    if asked and not any(_holds_text(message) or _holds_media(message) for message in asked):
        raise SampleError("empty", "every user message is empty")


def _holds_text(message: Mapping[str, Any]) -> bool:
    return any(part["type"] == "text" and part["text"].strip() for part in message["content"])


def _holds_media(message: Mapping[str, Any]) -> bool:
    return any(part["type"] != "text" for part in message["content"])


def _name(number: int, turn: Turn) -> str:
    return f"message {number} ({turn.role})"


def _one_of(what: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise UnknownNameError(what, str(value), allowed)
    return value


def _checked_columns(columns: Mapping[str, str] | None, shape: str) -> dict[str, str]:
    mapped = dict(columns or {})
    for field, name in mapped.items():
        if field not in FIELDS:
            raise UnknownNameError("columns key", str(field), FIELDS)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"columns maps {field!r} to {name!r}", hint="give the field's name in the data")
    pair = [field for field in ("prompt", "response") if field in mapped]
    if pair and shape not in ("auto", "columns"):
        raise ConfigError(f"columns maps {pair[0]!r}, which shape {shape!r} does not have")
    return mapped


def _checked_placeholders(
    placeholders: Mapping[str, Sequence[str] | str] | Sequence[str] | str | None,
) -> dict[str, tuple[str, ...]]:
    chosen: dict[str, tuple[str, ...]] = {**_PLACEHOLDERS}
    if placeholders is not None and not isinstance(placeholders, Mapping):
        placeholders = {"image": placeholders}
    for kind, names in (placeholders or {}).items():
        if kind not in MODALITIES:
            raise UnknownNameError("placeholders key", str(kind), MODALITIES)
        given = (names,) if isinstance(names, str) else tuple(names)
        if not all(isinstance(name, str) and name for name in given):
            raise ConfigError(f"placeholders {given!r} must be non-empty texts")
        chosen[kind] = given
    owners: dict[str, str] = {}
    for kind, given in chosen.items():
        for name in given:
            if owners.setdefault(name, kind) != kind:
                raise ConfigError(f"the placeholder {name!r} stands for {owners[name]} and for {kind}")
    return chosen


def _pattern(placeholders: Mapping[str, Sequence[str]]) -> re.Pattern[str] | None:
    """Matches the longest placeholder at a place."""
    names = sorted((name for held in placeholders.values() for name in held), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None
