"""Content of one message: text and media as a list of parts, whatever spelling the record uses.

A part comes out as `{"type": "text", "text": str}`, `{"type": "image", "image": ref}`, `{"type": "audio",
"audio": ref}` or `{"type": "video", "video": ref or [ref, …]}` (a list: frames sampled before). In:

    "text with <image> in it"                each placeholder takes the next listed medium of its kind
    [{"type": "text", "text" | "value": str}, …]
    [{"type": "image", "image" | "url" | "path" | "value": ref}]     without a ref: the next listed image
    [{"type": "image_url" | "video_url" | "audio_url", that name | "url" | "value": str | {"url": str}}]
    [{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}]

A ref may also be `{"bytes": …, "path": …}` as image columns have it. Hints (`width`, `duration`, …; see
`packtrain.media.hints`) beside a ref are kept in the part. Keys that hold null count as absent (tables
fill every part up to the same keys). Bad content raises `SampleError`; nothing is dropped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SampleError
from ..media.hints import HINTS, checked
from ..media.location import Ref

__all__ = ["MODALITIES", "Media", "check_text", "fault", "media_list", "read_content"]

MODALITIES = ("image", "video", "audio")

_KINDS = {
    **{kind: kind for kind in MODALITIES},
    **{f"{kind}_url": kind for kind in MODALITIES},
    "input_audio": "audio",
}
_PICTURE = re.compile(r"\.(jpe?g|png|webp|bmp|tiff?)$", re.I)

Part = dict[str, Any]


def fault(what: str, *, hint: str | None = None) -> SampleError:
    """A `malformed_record`; the caller of the normaliser puts the place in front."""
    return SampleError("malformed_record", what, hint=hint)


class Media:
    """The media a record lists beside its text, handed out in order, and how many were asked for.

    Args:
        listed: modality -> parts without their `type`: `{"image": ref, "width": …}`.
        kinds: placeholder -> modality.
    """

    __slots__ = ("asked", "inline", "kinds", "listed")

    def __init__(self, listed: Mapping[str, list[Part]], kinds: Mapping[str, str]) -> None:
        self.kinds = kinds
        self.listed = {kind: listed.get(kind, []) for kind in MODALITIES}
        self.asked = dict.fromkeys(MODALITIES, 0)
        self.inline = dict.fromkeys(MODALITIES, 0)

    def next(self, kind: str) -> Part:
        """The part for the next placeholder. Counting goes on when the list has run out."""
        place = self.asked[kind]
        self.asked[kind] += 1
        held = self.listed[kind]
        return {"type": kind, **(held[place] if place < len(held) else {kind: ""})}

    def check(self, placeholders: Mapping[str, Sequence[str]]) -> None:
        """Every listed medium was asked for exactly once."""
        for kind in MODALITIES:
            asked, listed = self.asked[kind], len(self.listed[kind])
            if asked == listed:
                continue
            names = " or ".join(repr(name) for name in placeholders.get(kind, ())) or "none known"
            hint = "set placeholders= to what the text uses"
            if not asked:
                hint += ', or media_without_placeholder="prepend" to put media first'
            elif not listed:
                hint += f"; placeholders={{{kind!r}: []}} where these are plain words"
            raise SampleError(
                "placeholder_mismatch",
                f"the text has {asked} {kind} placeholders ({names}) but the record lists {listed} {kind}s",
                hint=hint,
            )


def read_content(content: Any, media: Media, pattern: re.Pattern[str] | None, what: str) -> list[Part]:
    """The parts of a message's content.

    Args:
        content: text or a list of parts.
        media: media listed beside the text.
        pattern: matches a placeholder, or None where there are none.
        what: the message, for errors ("message 2").
    """
    if isinstance(content, str):
        return _split(content, media, pattern, what)
    if content is None:
        raise fault(f"{what} has null content")
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise fault(f"{what} has content of type {type(content).__name__}, not text or a list of parts")
    parts: list[Part] = []
    for number, part in enumerate(content):
        parts.extend(_read_part(part, media, pattern, f"part {number} of {what}"))
    return parts


def _read_part(part: Any, media: Media, pattern: re.Pattern[str] | None, what: str) -> list[Part]:
    if not isinstance(part, Mapping):
        raise fault(f"{what} is {type(part).__name__}, not an object with a type")
    given = part.get("type")
    if given == "text":
        text = part.get("text")
        text = part.get("value") if text is None else text
        if not isinstance(text, str):
            raise fault(f"{what} has type text but no text")
        return _split(text, media, pattern, what)
    kind = _KINDS.get(given) if isinstance(given, str) else None
    if kind is None:
        raise fault(f"{what} has the unknown type {given!r}", hint=f"types: text, {', '.join(_KINDS)}")
    for key in (given, kind, f"{kind}_url", "url", "path", "value"):
        value = part.get(key)
        if value is not None:
            media.inline[kind] += 1
            return [{"type": kind, **_medium(kind, value, what), **_hints(kind, part)}]
    return [{**media.next(kind), **_hints(kind, part)}]


def _split(text: str, media: Media, pattern: re.Pattern[str] | None, what: str) -> list[Part]:
    """Text cut at its placeholders; the text around them is kept to the letter."""
    check_text(text, what)
    if pattern is None:
        return [{"type": "text", "text": text}] if text else []
    parts: list[Part] = []
    start = 0
    for found in pattern.finditer(text):
        if found.start() > start:
            parts.append({"type": "text", "text": text[start : found.start()]})
        parts.append(media.next(media.kinds[found.group()]))
        start = found.end()
    if start < len(text):
        parts.append({"type": "text", "text": text[start:]})
    return parts


def check_text(text: str, what: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate (`"\\ud800"` in the JSON) is refused here, by name."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise fault(f"{what} holds a lone surrogate (U+{code:04X} at character {error.start})") from None
    return text


def media_list(kind: str, value: Any, what: str, *, single: bool = False) -> list[Part]:
    """The media of a field: one ref or a list; null, "" and [] are none.

    Args:
        kind: the modality.
        value: what the field holds.
        what: the field, for errors.
        single: the field is `video`, not `videos`: a list of pictures in it is one video of frames.
    """
    if value is None or value == "" or value == []:
        return []
    if not isinstance(value, (list, tuple)):
        return [_medium(kind, value, what)]
    if kind == "video" and single and all(_is_picture(item) for item in value):
        return [_medium(kind, value, what)]
    return [_medium(kind, item, f"item {number} of {what}") for number, item in enumerate(value)]


def _is_picture(item: Any) -> bool:
    held = next((item[k] for k in ("path", "url") if item.get(k)), b"") if isinstance(item, Mapping) else item
    return isinstance(held, bytes) or (isinstance(held, str) and _PICTURE.search(held) is not None)


def _medium(kind: str, value: Any, what: str) -> Part:
    """`{kind: ref}` with the hints that an object around the ref holds."""
    if kind == "video" and isinstance(value, (list, tuple)):
        if not value:
            raise fault(f"{what} has a video without frames")
        return {kind: [_ref("image", item, f"frame {number} of {what}") for number, item in enumerate(value)]}
    hints = _hints(kind, value) if isinstance(value, Mapping) else {}
    return {kind: _ref(kind, value, what), **hints}


def _hints(kind: str, holder: Mapping[str, Any]) -> Part:
    return {name: checked(name, holder[name]) for name in HINTS[kind] if holder.get(name) is not None}


def _ref(kind: str, value: Any, what: str) -> Ref:
    if isinstance(value, Mapping):
        held = value.get("bytes")
        if held is None and isinstance(value.get("data"), str):  # base64 of an input_audio
            held = f"data:{kind}/{value.get('format') or 'wav'};base64,{value['data']}"
        value = held if held is not None else next((value[k] for k in ("url", "path") if value.get(k)), None)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if not text:
            raise fault(f"{what} has an empty {kind} path")
        return check_text(text, what)
    raise fault(f"{what} has {kind} of type {type(value).__name__}", hint="a path, a URL or bytes")
