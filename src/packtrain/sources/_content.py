"""Content of one message: text and images as a list of parts, whatever spelling the record uses.

A part comes out as `{"type": "text", "text": str}` or `{"type": "image", "image": ref}`. In:

    "text with <image> in it"                           each placeholder takes the next listed image
    [{"type": "text", "text" | "value": str}, …]
    [{"type": "image", "image" | "url" | "path" | "value": ref}]     without a ref: the next listed image
    [{"type": "image_url", "image_url": str | {"url": str}}]         also "url" or "value"

A ref may also be `{"bytes": …, "path": …}` as image columns have it. Keys that hold null count as absent
(tables fill every part up to the same keys). Bad content raises `SampleError`; nothing is dropped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SampleError
from ..media.location import Ref

__all__ = ["Images", "check_text", "fault", "image_refs", "read_content"]

_IMAGE_KEYS = ("image", "image_url", "url", "path", "value")
_OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio")

Part = dict[str, Any]


def fault(what: str, *, hint: str | None = None) -> SampleError:
    """A `malformed_record`; the caller of the normaliser puts the place in front."""
    return SampleError("malformed_record", what, hint=hint)


class Images:
    """The images a record lists beside its text, handed out in order, and how many were asked for."""

    __slots__ = ("asked", "inline", "listed")

    def __init__(self, listed: list[Ref]) -> None:
        self.listed = listed
        self.asked = 0
        self.inline = 0

    def next(self) -> Part:
        """The part for the next placeholder. Counting goes on when the list has run out."""
        self.asked += 1
        ref = self.listed[self.asked - 1] if self.asked <= len(self.listed) else ""
        return {"type": "image", "image": ref}

    def check(self, placeholders: Sequence[str]) -> None:
        """Every listed image was asked for exactly once."""
        if self.asked == len(self.listed):
            return
        names = " or ".join(repr(name) for name in placeholders) or "none known"
        hint = "set placeholders= to what the text uses"
        if not self.asked and self.listed:
            hint += ', or media_without_placeholder="prepend" to put images first'
        raise SampleError(
            "placeholder_mismatch",
            f"the text has {self.asked} image placeholders ({names}) "
            f"but the record lists {len(self.listed)} images",
            hint=hint,
        )


def read_content(content: Any, images: Images, pattern: re.Pattern[str] | None, what: str) -> list[Part]:
    """The parts of a message's content.

    Args:
        content: text or a list of parts.
        images: images listed beside the text.
        pattern: matches a placeholder, or None where there are none.
        what: the message, for errors ("message 2").
    """
    if isinstance(content, str):
        return _split(content, images, pattern, what)
    if content is None:
        raise fault(f"{what} has null content")
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise fault(f"{what} has content of type {type(content).__name__}, not text or a list of parts")
    parts: list[Part] = []
    for number, part in enumerate(content):
        parts.extend(_read_part(part, images, pattern, f"part {number} of {what}"))
    return parts


def _read_part(part: Any, images: Images, pattern: re.Pattern[str] | None, what: str) -> list[Part]:
    if not isinstance(part, Mapping):
        raise fault(f"{what} is {type(part).__name__}, not an object with a type")
    kind = part.get("type")
    if kind == "text":
        text = part.get("text")
        text = part.get("value") if text is None else text
        if not isinstance(text, str):
            raise fault(f"{what} has type text but no text")
        return _split(text, images, pattern, what)
    if kind in ("image", "image_url"):
        for key in _IMAGE_KEYS:
            value = part.get(key)
            if value is not None:
                images.inline += 1
                return [{"type": "image", "image": _ref(value, what)}]
        return [images.next()]
    if kind in _OTHER_MEDIA:
        raise SampleError("unsupported_media", f"{what} is {kind}: only text and images are read here")
    raise fault(f"{what} has the unknown type {kind!r}", hint="types: text, image, image_url")


def _split(text: str, images: Images, pattern: re.Pattern[str] | None, what: str) -> list[Part]:
    """Text cut at its placeholders; the text around them is kept to the letter."""
    check_text(text, what)
    if pattern is None:
        return [{"type": "text", "text": text}] if text else []
    parts: list[Part] = []
    start = 0
    for found in pattern.finditer(text):
        if found.start() > start:
            parts.append({"type": "text", "text": text[start : found.start()]})
        parts.append(images.next())
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


def image_refs(value: Any, what: str) -> list[Ref]:
    """The images of an `image` or `images` field: one ref or a list; null, "" and [] are none."""
    if value is None or value == "" or value == []:
        return []
    if isinstance(value, (list, tuple)):
        return [_ref(item, f"item {number} of {what}") for number, item in enumerate(value)]
    return [_ref(value, what)]


def _ref(value: Any, what: str) -> Ref:
    if isinstance(value, Mapping):
        held = value.get("bytes")
        value = held if held is not None else next((value[k] for k in ("url", "path") if value.get(k)), None)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if not text:
            raise fault(f"{what} has an empty image path")
        return check_text(text, what)
    raise fault(f"{what} has an image of type {type(value).__name__}", hint="a path, a data: URL or bytes")
