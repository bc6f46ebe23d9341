"""Chat records of any common shape as one shape: `{"messages": [{"role", "content": [part, …]}, …]}`.

`ChatSource` wraps any source of raw records and is a source itself. A normalised sample holds

    messages   role is system | user | assistant | tool; content is always a list of parts
               ({"type": "text", "text"} or {"type": "image", "image": ref}); `tool_calls`,
               `tool_call_id`, `name` and `reasoning_content` are kept where the record has them
    tools      list, only where the record has tools

with refs ready to open: absolute paths, data URLs or bytes. Shapes and spellings are described in
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
from ..media.location import Ref, resolve
from ._content import Images, fault, image_refs, read_content
from ._shapes import FIELDS, SHAPES, Draft, Fields, Turn, detect

__all__ = ["ChatSource", "media_refs"]

SCHEMA = 1  # raised when the same record would be normalised to another sample
_OTHER_MEDIA = ("video", "videos", "audio", "audios")


class ChatSource:
    """Normalised chat samples of a source of raw records.

    Args:
        source: any source whose items are mappings.
        shape: "auto" (told per record), or one of messages, sharegpt, alpaca, columns: other records are
            then refused.
        columns: our field name -> name in the data, e.g. `{"prompt": "question", "response": "answer"}`.
        placeholders: what stands for an image in a text; default `("<image>",)`. `()` for none.
        media_root: folder that relative media paths start from and must stay in; default the source's
            folder. Given explicitly, absolute paths must lie in it too.
        allow_outside: let media paths leave the media root.
        media_without_placeholder: what to do with listed images when the text has no placeholder at all:
            "error", or "prepend": all of them go before the text of the first user message.
        tool_calls: "structured": a sharegpt `function_call` becomes `tool_calls` of an assistant message,
            for templates that render them; "text": it stays the assistant's text.

    Raises:
        ConfigError: an option that cannot hold.
    """

    def __init__(
        self,
        source: Source,
        *,
        shape: str = "auto",
        columns: Mapping[str, str] | None = None,
        placeholders: Sequence[str] | str | None = None,
        media_root: str | os.PathLike[str] | None = None,
        allow_outside: bool = False,
        media_without_placeholder: str = "error",
        tool_calls: str = "structured",
    ) -> None:
        self._source = source
        self._shape = _one_of("chat shape", shape, ("auto", *SHAPES))
        self._prepend = _one_of("media_without_placeholder", media_without_placeholder, ("error", "prepend"))
        self._calls = _one_of("tool_calls", tool_calls, ("structured", "text"))
        self._columns = _checked_columns(columns, shape)
        self._placeholders = _checked_placeholders(placeholders)
        longest_first = sorted(self._placeholders, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._free = media_root is None
        folder = getattr(source, "folder", None) if media_root is None else os.fspath(media_root)
        self._root = os.path.abspath(folder if folder is not None else os.getcwd())
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
            "placeholders": list(self._placeholders),
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
            return self._normalise(record)
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
        for field in _OTHER_MEDIA:
            if record.get(field):
                raise SampleError(
                    "unsupported_media", f"the record lists {field}: only text and images are read here"
                )
        draft = SHAPES[shape](fields, self._calls == "structured")
        images = Images(self._listed(fields))
        messages = self._messages(draft, images)
        _check_said(messages)
        for message in messages:
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = self._resolve(part["image"])
        sample: dict[str, Any] = {"messages": messages}
        if draft.tools:
            sample["tools"] = draft.tools
        return sample

    def _listed(self, fields: Fields) -> list[Ref]:
        """Images a record lists beside its text, in `images` or `image`."""
        several = image_refs(fields.get("images"), f"field {fields.name('images')!r}")
        single = image_refs(fields.get("image"), f"field {fields.name('image')!r}")
        if several and single and fields.name("image") != fields.name("images"):
            raise fault(f"has images in {fields.name('images')!r} and in {fields.name('image')!r}")
        return several or single

    def _messages(self, draft: Draft, images: Images) -> list[dict[str, Any]]:
        if not draft.turns:
            raise SampleError("empty", "the record has no messages")
        messages = [
            {
                "role": turn.role,
                "content": read_content(turn.content, images, self._pattern, _name(number, turn)),
                **turn.extra,
            }
            for number, turn in enumerate(draft.turns)
        ]
        if self._prepend == "prepend" and not images.asked and not images.inline and images.listed:
            first = next((message for message in messages if message["role"] == "user"), None)
            if first is not None:
                first["content"] = [images.next() for _ in images.listed] + first["content"]
        images.check(self._placeholders)
        return messages

    def _resolve(self, ref: Ref) -> Ref:
        return resolve(ref, self._root, self._allow_outside, absolute_ok=self._free)


def media_refs(sample: Mapping[str, Any]) -> list[Ref]:
    """The media of a normalised sample, in the order the model sees them."""
    return [part["image"] for message in sample["messages"] for part in message["content"] if "image" in part]


# --------------------------------------------------------------------------------------------
def _check_said(messages: list[dict[str, Any]]) -> None:
    """There is an answer to train on and a question that was asked."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise SampleError("no_assistant_turn", "the record has no assistant message: nothing to train on")
    if not any(message.get("tool_calls") or _holds_text(message) for message in answers):
        raise SampleError("empty", "every assistant message is empty")
    asked = [message for message in messages if message["role"] == "user"]
    if asked and not any(_holds_text(message) or _holds_image(message) for message in asked):
        raise SampleError("empty", "every user message is empty")


def _holds_text(message: Mapping[str, Any]) -> bool:
    return any(part["type"] == "text" and part["text"].strip() for part in message["content"])


def _holds_image(message: Mapping[str, Any]) -> bool:
    return any(part["type"] == "image" for part in message["content"])


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


def _checked_placeholders(placeholders: Sequence[str] | str | None) -> tuple[str, ...]:
    if placeholders is None:
        return ("<image>",)
    given = (placeholders,) if isinstance(placeholders, str) else tuple(placeholders)
    if not all(isinstance(name, str) and name for name in given):
        raise ConfigError(f"placeholders {given!r} must be non-empty texts")
    return given
