"""Chat records of any common shape as one shape: `{"messages": [{"role", "content": [part, …]}, …]}`.

`ChatSource` wraps any source of raw records and is a source itself. A normalised sample holds

    messages   role is system | user | assistant | tool; content is always a list of parts
               ({"type": "text", "text"}, {"type": "image", "image": ref}, the same for audio, and
               {"type": "video", "video": ref or list of refs}; hints such as width and knobs such as
               max_pixels beside the ref);
               `tool_calls`, `tool_call_id`, `name`, `reasoning_content` are kept where the record has them;
               `loss` is the weight of an answer, only where it is not 1
    tools      list, only where the record has tools
    objects    names and boxes of `<ref-object>` and `<bbox>` in its texts (`_beside.py`)

with refs ready to open: absolute paths, URLs, data URLs or bytes. Shapes and spellings are described in
`_shapes.py`, `_content.py` and `keys.py`. Every key of a record is used, harmless or named (`_account.py`).
Whether media exist is not checked here: opening them says so.

Reasons of the `SampleError` a record can raise: malformed_record (no known shape, null content, unknown
role, text that UTF-8 cannot hold), empty (no message, or nothing said by the assistant, or by the user),
no_assistant_turn, unsupervised (every answer is masked), unread_key (a key that changes training and is not
read), placeholder_mismatch, outside_media_root, remote_media, unsupported_media.

The fingerprint covers the inner source and the options, never the place: equal data in another folder or
on another host has the same one. Media are no part of it (see `media.location.media_refs`).
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import one_of
from ..errors import ConfigError, SampleError
from ..extend import Source
from ..files import StrPath
from ..media.hints import HINTS, checked
from ..media.location import Ref, is_url, resolve
from . import _content
from ._account import Account, refuse_beside, unread
from ._beside import objects_of, weigh
from ._memory import Over, as_source
from ._open import open_source
from ._plain import OF_MEDIUM, form_of, open_media, read_plain, says_nothing
from ._shapes import FIELDS, SHAPES, Draft, Fields, Turn, detect, plan_of, unread_of
from ._values import absent
from .keys import HARMLESS, MEDIA, ORIGIN, USES, WANTED

SCHEMA = 3  # raised when the same record would be normalised to another sample
_HINTS = tuple(dict.fromkeys(name for kind in _content.MODALITIES for name in HINTS[kind] if name in FIELDS))
_MEDIA_FIELDS = frozenset(MEDIA)
#: Harmless names whose plain values need no look.
_QUIET = HARMLESS - frozenset(ORIGIN) - OF_MEDIUM
_PLACEHOLDERS = {"image": ("<image>",), "video": ("<video>",), "audio": ("<audio>",)}


class ChatSource(Over):
    """Normalised chat samples of a source of raw records.

    Args:
        source: any source whose items are mappings.
        shape: "auto" (told per record), or one of messages, sharegpt, texts, alpaca, columns, captions: other
            records are then refused.
        columns: our field name -> name in the data, e.g. `{"prompt": "question", "response": "answer"}`.
        placeholders: what stands for a medium in a text: modality -> texts; default `<image>`, `<video>`,
            `<audio>`. A list or text is for images. `()` for none (`{"video": ()}` where `<video>` is HTML).
        media_root: folder or URL that relative media paths start from and must stay in; default the source's
            folder. Given explicitly, absolute paths must lie in it too.
        media_prefix: text that relative media paths start with and that is cut off before they are joined to
            the media root, for data whose paths start from another folder (`data/` in `data/x/1.jpg`).
        allow_outside, allow_remote: let media paths and links leave the media root; fetch URLs of records.
        media_without_placeholder: what to do with listed media when the text has no placeholder of their
            kind: "error", or "prepend": all of them go before the text of the first user message, images
            before videos before sounds. Where nobody asks (a caption) they go before the first answer.
        tool_calls: "structured": a sharegpt `function_call` becomes `tool_calls` of an assistant message,
            for templates that render them; "text": it stays the assistant's text.
        ignore_keys: keys that are left out, in records, messages and parts alike.
        frame_rate: frames a second of lists of frames that do not say theirs.

    A source whose items are normalised already (`source.normalised`, such as a mixture) is passed through:
    the options were given to its parts.

    Hints: `columns` may also map `width`, `height`, `duration`, `frames`, `fps` and `sample_rate` to fields
    of the data, each one number or a list as long as the listed media that take it.

    Attributes:
        source: of raw records.
        media_root: absolute path of the folder that relative media paths start from, or its URL.

    Raises:
        ConfigError: an option that cannot hold.
    """

    reads = "chat"

    def __init__(
        self,
        source: Source,
        *,
        shape: str = "auto",
        columns: Mapping[str, str] | None = None,
        placeholders: Mapping[str, Sequence[str] | str] | Sequence[str] | str | None = None,
        media_root: StrPath | None = None,
        media_prefix: str | None = None,
        allow_outside: bool = False,
        allow_remote: bool = False,
        media_without_placeholder: str = "error",
        tool_calls: str = "structured",
        ignore_keys: Sequence[str] = (),
        frame_rate: float | None = None,
    ) -> None:
        source = as_source(source)
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise ConfigError(
                f"{type(source).__name__} is no source: records must be indexable and counted",
                hint="write a one-shot generator to a JSONL file first, and open that",
            )
        self.source = source
        self._shape = one_of("chat shape", shape, ("auto", *SHAPES))
        self._prepend = one_of("media_without_placeholder", media_without_placeholder, ("error", "prepend"))
        self._calls = one_of("tool_calls", tool_calls, ("structured", "text"))
        self._columns = _checked_columns(columns, shape)
        self._mapped = tuple(self._columns.items())
        self._placeholders = _checked_placeholders(placeholders)
        self._pattern = _pattern(self._placeholders)
        self._kinds = {name: kind for kind, names in self._placeholders.items() for name in names}
        folder = getattr(source, "folder", None) if media_root is None else os.fspath(media_root)
        self.media_root = folder if folder is not None and is_url(folder) else os.path.abspath(folder or "")
        self._normalised = bool(getattr(source, "normalised", False))
        self._prefix = media_prefix or ""
        self._may = {"allow_outside": bool(allow_outside), "absolute_ok": media_root is None}
        self._may["allow_remote"] = bool(allow_remote) or self._normalised  # of those the parts were asked
        if isinstance(ignore_keys, str) or not all(isinstance(key, str) and key for key in ignore_keys):
            raise ConfigError(f"ignore_keys is {ignore_keys!r}", hint="a list of keys: ignore_keys: [meta]")
        self._frame_rate = None if frame_rate is None else checked("fps", frame_rate)
        self.account = Account(ignore_keys)
        # records with nothing special are read by the form of their keys (`_plain`)
        tagged = all(name.startswith("<") for names in self._placeholders.values() for name in names)
        self._plain = (
            tagged and shape == "auto" and not self._columns and frame_rate is None and not self._normalised
        )

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
            "absolute_paths": self._may["absolute_ok"],
            "allow_outside": self._may["allow_outside"],
            **({"allow_remote": True} if self._may["allow_remote"] and not self._normalised else {}),
            "ignore_keys": sorted(self.account.ignore),
            "frame_rate": self._frame_rate,
        }

    def read(self, record: Any) -> dict[str, Any]:
        if self._normalised:
            return self._passed(record)
        try:
            return self._read_plain(record) or self._normalise(record)
        except RecursionError:
            raise SampleError("malformed_record", "the record is nested too deeply") from None

    # ----------------------------------------------------------------------------------------
    def _read_plain(self, record: Any) -> dict[str, Any] | None:
        """The sample of a record that holds nothing special; None for any other."""
        if not self._plain or type(record) is not dict:
            return None
        form = form_of(tuple(record))
        if form is None or not self.account.ignore.isdisjoint(record):
            return None
        return read_plain(record, form, self._kinds, self._pattern, self.account, self._open)

    def _normalise(self, record: Any) -> dict[str, Any]:
        record = _content.check_object(record, "the record")
        account = self.account
        account.begin()
        if account.ignore:
            record = {key: value for key, value in record.items() if key not in account.ignore}
        names = tuple(name for name, value in record.items() if not absent(value))
        fields = Fields(record, plan_of(names, self._mapped), self._columns, account)
        shape = detect(fields) if self._shape == "auto" else self._shape
        draft = SHAPES[shape](fields, self._calls == "structured")
        listed = self._listed(fields)
        left = unread_of(names, self._mapped, shape, self._shape != "auto")
        if all(name in _QUIET and says_nothing(record[name]) for name in left):
            left = ()  # nothing but harmless names of plain values
        messages = self._messages(draft, listed)
        left = self._set_media(record, left, _parts(messages))
        objects = _objects(record, _parts(messages)) if "objects" in left else None
        if objects is not None:
            left = tuple(name for name in left if name != "objects")
        if left:
            self._account_for(fields, shape, weigh(record, left, messages, account), messages)
        _refuse_unwanted(record)
        for name, field in fields.plan.aliases:
            if field in USES[shape]:
                account.alias(name, field)
        _check_said(messages)
        seen = open_media(messages, self._open)
        sample: dict[str, Any] = {"messages": messages}
        if draft.tools:
            sample["tools"] = draft.tools
        if objects is not None:
            sample["objects"] = objects
        account.end(
            media=bool(seen),
            marked=lambda: any(
                _content.marks_medium(part.get("text", "")) for m in messages for part in m["content"]
            ),
        )
        return sample

    def _set_media(
        self, record: Mapping[str, Any], left: tuple[str, ...], parts: list[dict[str, Any]]
    ) -> tuple[str, ...]:
        """The keys of a record that set nothing of its media; those that do are put into their part."""
        if knobs := {name: record[name] for name in left if name in OF_MEDIUM}:
            taken = _content.set_knobs(
                knobs, [part for part in parts if part["type"] != "text"], self.account
            )
            left = tuple(name for name in left if name not in taken)
        if self._frame_rate is not None:
            for part in parts:
                if isinstance(part.get("video"), list):
                    part.setdefault("fps", self._frame_rate)
        return left

    def _account_for(
        self, fields: Fields, shape: str, left: tuple[str, ...], messages: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keys of a record that nothing read."""
        record, held = fields.record, None
        if shape in ("alpaca", "columns"):
            asked = _parts([m for m in messages if m["role"] != "assistant"])
            refuse_beside(record, left, "\n".join(part.get("text", "") for part in asked))
        elif shape in ("messages", "sharegpt"):
            held = fields.get(shape if shape == "messages" else "conversations")
        parts = _parts(messages)
        texts = [part["text"].strip() for part in parts if part["type"] == "text"]
        thoughts = (message.get("reasoning_content", "") for message in messages)
        said, media = frozenset((*texts, *thoughts)) - {""}, len(texts) < len(parts)
        rest = [
            name
            for name in left
            if not (name in WANTED and isinstance(record[name], bool))
            and (held is None or record[name] != held)  # a second conversation that says the same
        ]
        self.account.rest(record, rest, said=said, media=media)

    def _passed(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A sample that is normalised already; only where its media may lie is checked."""
        messages = [
            {**message, "content": [dict(part) for part in message["content"]]}
            for message in sample["messages"]
        ]
        open_media(messages, self._open)
        return {**sample, "messages": messages}

    def _listed(self, fields: Fields) -> dict[str, list[dict[str, Any]]]:
        """Media a record lists beside its text, in `images` or `image` and so on, with mapped hints."""
        if _MEDIA_FIELDS.isdisjoint(fields.plan.fields) and not fields.plan.numbered and not fields.columns:
            return {kind: [] for kind in _content.MODALITIES}
        listed: dict[str, list[dict[str, Any]]] = {}
        for kind in _content.MODALITIES:
            plural = f"{kind}s"
            several = self._field(fields, kind, plural)
            single = self._field(fields, kind, kind)
            if several and single and fields.name(kind) != fields.name(plural) and several != single:
                raise _content.fault(
                    f"has {plural} in {fields.name(plural)!r} and in {fields.name(kind)!r}",
                    hint=f"ignore_keys: [{fields.name(kind)}]",
                )
            listed[kind] = several or single
        for name in fields.plan.numbered:
            kind = name.partition("_")[0]
            if fields.has(kind) or fields.has(f"{kind}s"):
                raise unread(name, f"stands beside other {kind}s")
            listed[kind] += _content.media_list(kind, fields.record[name], f"field {name!r}", self.account)
            self.account.alias(name, f"{kind}s")
        if fields.has("media"):
            for kind, parts in _content.listed_media(
                fields.get("media"), f"field {fields.name('media')!r}", self.account
            ).items():
                both = parts and listed[kind]
                _content.refuse(both, f"has {kind}s in {fields.name('media')!r} and elsewhere")
                listed[kind] = listed[kind] or parts
        self._add_hints(fields, listed)
        return listed

    def _field(self, fields: Fields, kind: str, field: str) -> list[dict[str, Any]]:
        what = f"field {fields.name(field)!r}"
        return _content.media_list(kind, fields.get(field), what, self.account, single=field == kind)

    def _add_hints(self, fields: Fields, listed: Mapping[str, list[dict[str, Any]]]) -> None:
        for name in _HINTS:
            values = fields.get(name) if name in self._columns else None
            if values is None:
                continue
            parts = [part for kind in _content.MODALITIES if name in HINTS[kind] for part in listed[kind]]
            values = list(values) if isinstance(values, (list, tuple)) else [values]
            told = f"field {fields.name(name)!r} has {len(values)} values for {len(parts)} media"
            _content.refuse(len(values) != len(parts), told)
            for part, value in zip(parts, values, strict=True):
                if value is not None:
                    part[name] = checked(name, value)

    def _messages(self, draft: Draft, listed: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        _content.refuse(not draft.turns, "the record has no messages", reason="empty")
        messages, media = self._read(draft, listed, answers=False)
        if not media.complete():
            if any("<" in part.get("text", "") for part in _parts(messages, "assistant")):
                again, other = self._read(draft, listed, answers=True)
                if other.complete() or not (self._prepend == "prepend" or draft.media_first):
                    messages, media = again, other
            asked = next((message for message in messages if message["role"] == "user"), None)
            first = asked or next((m for m in messages if m["role"] == "assistant"), None)
            ahead_of_all = self._prepend == "prepend" or draft.media_first or asked is None  # a caption
            if ahead_of_all and first is not None:
                unnamed = [
                    kind for kind in _content.MODALITIES if not media.asked[kind] and not media.inline[kind]
                ]
                first["content"] = media.rest(unnamed) + first["content"]
            media.check(self._placeholders)
        return messages

    def _read(
        self, draft: Draft, listed: Mapping[str, list[dict[str, Any]]], *, answers: bool
    ) -> tuple[list[dict[str, Any]], _content.Media]:
        """Messages, with placeholders in answers as text or as media."""
        media = _content.Media(listed, self._kinds, self.account)
        messages: list[dict[str, Any]] = []
        for number, turn in enumerate(draft.turns):
            what = f"message {number} ({turn.role})"
            pattern = self._pattern if answers or turn.role != "assistant" else None
            if turn.role == "assistant" and not answers:
                _content.refuse_tagged(turn.content, what)
            if turn.media:
                content = self._with_own(turn, pattern, what, media)
            else:
                content = _content.read_content(turn.content, media, pattern, what)
            if turn.role == "user":
                _content.refuse_file_names(content, what)
            messages.append({"role": turn.role, "content": content, **turn.extra})
        return messages, media

    def _with_own(
        self, turn: Turn, pattern: re.Pattern[str] | None, what: str, media: _content.Media
    ) -> list[Any]:
        """The parts of a message on which media stand: at its placeholders, or before its text."""
        listed = self._listed(Fields(turn.media, plan_of(tuple(turn.media)), {}, self.account))
        own = _content.Media(listed, self._kinds, self.account)
        content = _content.read_content(turn.content, own, pattern, what)
        for kind in _content.MODALITIES:
            media.inline[kind] += len(own.listed[kind])
        ahead = own.rest([kind for kind in _content.MODALITIES if not own.asked[kind]])
        try:
            own.check(self._placeholders)
        except SampleError as error:
            raise error.at(what) from None
        return ahead + content

    def _open(self, ref: Ref) -> Ref:
        if self._prefix and isinstance(ref, str):
            ref = ref.removeprefix(self._prefix)
        return resolve(ref, self.media_root, **self._may)


# --------------------------------------------------------------------------------------------
def _check_said(messages: list[dict[str, Any]]) -> None:
    """There is an answer to train on and a question that was asked; empty answers are not trained."""
    answers = [message for message in messages if message["role"] == "assistant"]
    untold = "the record has no assistant message: nothing to train on"
    _content.refuse(not answers, untold, reason="no_assistant_turn")
    said = [
        message
        for message in answers
        if message.get("tool_calls") or _holds_text(message) or message.get("reasoning_content", "").strip()
    ]
    _content.refuse(not said, "every assistant message is empty", reason="empty")
    if len(said) < len(answers):
        for message in answers:
            if not any(message is one for one in said):
                message["loss"] = 0.0
    asked = [message for message in messages if message["role"] == "user"]
    media = any(part["type"] != "text" for message in asked for part in message["content"])
    silent = asked and not media and not any(map(_holds_text, asked))
    _content.refuse(silent, "every user message is empty", reason="empty")
    masked = all(message.get("loss") == 0 for message in answers)
    _content.refuse(masked, "every answer is masked: nothing to train on", reason="unsupervised")


def _objects(record: Mapping[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    texts = (part["text"] for part in parts if part["type"] == "text")
    return objects_of(record["objects"], texts, sum(part["type"] == "image" for part in parts))


def _refuse_unwanted(record: Mapping[str, Any]) -> None:
    """An answer that its record calls unwanted (KTO)."""
    for name in WANTED:
        if record.get(name) is False:
            what = f"{name} is false: an answer that is not wanted"
            raise SampleError("unsupervised", what, hint=f"ignore_keys: [{name}] trains it")


def _parts(messages: Sequence[Mapping[str, Any]], role: str | None = None) -> list[dict[str, Any]]:
    """The parts of messages, of one role or of all."""
    return [part for message in messages if role in (None, message["role"]) for part in message["content"]]


def _holds_text(message: Mapping[str, Any]) -> bool:
    return any(part["type"] == "text" and part["text"].strip() for part in message["content"])


def _checked_columns(columns: Mapping[str, str] | None, shape: str) -> dict[str, str]:
    mapped = dict(columns or {})
    for field, name in mapped.items():
        one_of("columns key", field, FIELDS)
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
        one_of("placeholders key", kind, _content.MODALITIES)
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


def open_chats(path: Any, *, kind: str | None = None, **options: Any) -> ChatSource:
    """The chats of a file, folder or glob, `ChatSource(open_source(path))`, or of records in memory.

    Args:
        path, kind: as for `open_source`; or a list of records, or a Hugging Face `datasets.Dataset`.
        options: keywords of `ChatSource`; all others go to the source's plug-in.
    """
    own = inspect.signature(ChatSource).parameters
    chats = {name: value for name, value in options.items() if name in own}
    rest = {name: value for name, value in options.items() if name not in own}
    if not isinstance(path, (str, os.PathLike)) and kind is None and not rest:
        return ChatSource(path, **chats)
    return ChatSource(open_source(path, kind=kind, **rest), **chats)
