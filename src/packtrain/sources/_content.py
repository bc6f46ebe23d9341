"""Content of one message: text and media as a list of parts, whatever spelling the record uses.

A part comes out as `{"type": "text", "text": str}`, `{"type": "image", "image": ref}`, `{"type": "audio",
"audio": ref}` or `{"type": "video", "video": ref or [ref, …]}` (a list: frames sampled before). In:

    "text with <image> in it"                each placeholder takes the next listed medium of its kind
    "text with <image 1> in it"              the first listed image; mentioned again it is text
    "text with <img>a.jpg</img> in it"       a medium named in the text
    [{"type": "text" | "input_text" | "output_text", "text" | "value": str}, …]
    [{"type": "image", "image" | "url" | "path" | "value": ref}]     without a ref: the next listed image
    [{"type": "image_url" | "video_url" | "audio_url", that name | "url" | "value": str | {"url": str}}]
    [{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}]
    [{"type": "image", "source": {"type": "base64", "media_type", "data"} | {"type": "url", "url"}}]
    [{"type": "text", "text": str, "image": ref}]                    both, what the type names first

A ref may also be `{"bytes": …, "path": …}` as image columns have it, a medium in base64, or decoded sound
`{"array", "sampling_rate"}`. Hints (`width`, `duration`, …; see `packtrain.media.hints`) and knobs
(`max_pixels`, `start`, …; see `packtrain.media.knobs`) beside a ref are kept in the part. Absent values do
not count (tables fill every part up to the same keys). Bad content raises `SampleError`; nothing is dropped.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import SampleError, counted
from ..media.hints import HINTS, checked
from ..media.knobs import KNOB_KEYS, STARTS, knobs_of
from ..media.location import Ref
from . import keys
from ._account import unread
from ._values import MAGIC, absent, kind_of_ref, sniffed

MODALITIES = ("image", "video", "audio")

_PICTURE = re.compile(r"\.(jpe?g|png|webp|bmp|tiff?)$", re.I)
#: Keys of an object around a ref.
_AROUND = ("bytes", "path", "url", "data", "format", "array", "sampling_rate", "media_type", "type")
#: Modality -> where a part may hold its ref.
_NAMES = {kind: (kind, f"{kind}_url", *keys.FIELDS[kind]) for kind in MODALITIES}
#: Where else, after the names of its kind.
_REFS = ("url", "path", "source", "data", "file", "value")

#: First characters of a medium in a text.
_FILE = ("data:", *MAGIC)

Part = dict[str, Any]


def fault(what: str, *, hint: str | None = None) -> SampleError:
    """A `malformed_record`; the caller of the normaliser puts the place in front."""
    return SampleError("malformed_record", what, hint=hint)


def refuse(bad: object, what: str, *, hint: str | None = None, reason: str = "malformed_record") -> None:
    """Refuse a record where something of it is bad; `what` is made in any case, so it is plain."""
    if bad:
        raise SampleError(reason, what, hint=hint)


class Media:
    """The media a record lists beside its text, handed out in order, and how many were asked for.

    Args:
        listed: modality -> parts without their `type`: `{"image": ref, "width": …}`.
        kinds: placeholder -> modality.
        account: keys of parts are counted here.
    """

    __slots__ = ("account", "asked", "base", "inline", "kinds", "listed", "numbered")

    def __init__(self, listed: Mapping[str, list[Part]], kinds: Mapping[str, str], account: Any) -> None:
        self.kinds, self.account = kinds, account
        self.listed = {kind: listed.get(kind, []) for kind in MODALITIES}
        self.asked = dict.fromkeys(MODALITIES, 0)
        self.inline = dict.fromkeys(MODALITIES, 0)
        self.numbered: set[tuple[str, int]] = set()
        self.base: int | None = None  # what parts count from that number their media

    def named(self, kind: str, live: Mapping[str, Any]) -> None:
        """A part without a ref that numbers its medium means the next one, from 0 or from 1.

        Raises:
            SampleError: `unread_key`, where it means another one.
        """
        for name in (*keys.INDEX, f"{kind}_id", f"{kind}_index"):
            number = live.get(name)
            if type(number) is not int or not 0 <= number <= len(self.listed[kind]):
                continue  # an id
            base = number - self.asked[kind]
            if self.base is None and base in (0, 1):
                self.base = base
            if base != self.base:
                raise unread(f"content[].{name}", f"({number}) means another than the next {kind}")

    def next(self, kind: str) -> Part:
        """The part for the next placeholder. Counting goes on when the list has run out."""
        place = self.asked[kind]
        self.asked[kind] += 1
        held = self.listed[kind]
        return {"type": kind, **(held[place] if place < len(held) else {kind: ""})}

    def rest(self, kinds: Iterable[str]) -> list[Part]:
        """The parts of all listed media of these kinds, which no text names."""
        return [self.next(kind) for kind in kinds for _ in self.listed[kind]]

    def number(self, kind: str, place: int) -> Part | None:
        """The part for a numbered placeholder, from 1; None where it was handed out before."""
        if (kind, place) in self.numbered:
            return None
        self.numbered.add((kind, place))
        self.asked[kind] += 1
        held = self.listed[kind]
        return {"type": kind, **(held[place - 1] if 0 < place <= len(held) else {kind: ""})}

    def _is_off(self, kind: str) -> bool:
        """Whether another number of media was asked for than is listed, or one by a number that none has."""
        listed = len(self.listed[kind])
        return self.asked[kind] != listed or any(k == kind and n > listed for k, n in self.numbered)

    def complete(self) -> bool:
        """Whether every listed medium was asked for exactly once."""
        return not any(map(self._is_off, MODALITIES))

    def check(self, placeholders: Mapping[str, Sequence[str]]) -> None:
        """Every listed medium was asked for exactly once."""
        for kind in filter(self._is_off, MODALITIES):
            asked, listed = self.asked[kind], len(self.listed[kind])
            names = " or ".join(repr(name) for name in placeholders.get(kind, ())) or "none known"
            hint = f"set placeholders={{{kind!r}: ['TEXT']}} to what the text uses"
            if not asked:
                hint += ', or media_without_placeholder="prepend" to put media first'
            elif not listed:
                hint += f"; placeholders={{{kind!r}: []}} where these are plain words"
            raise SampleError(
                "placeholder_mismatch",
                f"the text has {counted(asked, f'{kind} placeholders')} ({names}) but the record lists "
                f"{counted(listed, f'{kind}s')}",
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
    refuse(content is None, f"{what} has null content")
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise fault(f"{what} has content of type {type(content).__name__}, not text or a list of parts")
    parts: list[Part] = []
    for number, part in enumerate(content):
        parts += _PartReader(part, media, pattern, f"part {number} of {what}").read()
    return parts


def _type_of(live: Mapping[str, Any]) -> str | None:
    """The type of a part that does not say it: the one key it has that names one."""
    found = [kind for kind in ("text", *MODALITIES) if kind in live or f"{kind}_url" in live]
    return found[0] if len(found) == 1 else None


class _PartReader:
    """Reads one part of a message; `used` are the keys of it that were read."""

    __slots__ = ("given", "kind", "live", "media", "part", "pattern", "used", "what")

    def __init__(self, part: Any, media: Media, pattern: re.Pattern[str] | None, what: str) -> None:
        part = check_object(part, what, "an object with a type")
        self.part, self.media, self.pattern, self.what = part, media, pattern, what
        ignored = media.account.ignore
        self.live = {k: v for k, v in part.items() if k != "type" and not absent(v) and k not in ignored}
        given = part.get("type")
        self.given = _type_of(self.live) if given is None else given
        kind = keys.PART.get(self.given) if isinstance(self.given, str) else None
        if kind is None:
            hint = f"types: {', '.join((*keys.PART, *keys.BLOCK))}"
            raise fault(f"{what} has the unknown type {self.given!r}", hint=hint)
        self.kind = kind
        self.used: set[str] = set()

    def read(self) -> list[Part]:
        out: list[Part] = []
        for each in (self.kind, *(other for other in ("text", *MODALITIES) if other != self.kind)):
            out += self.text() if each == "text" else self.medium(each)
        left = [key for key in self.live if key not in self.used]
        if left:
            held = any(one["type"] != "text" for one in out)
            self.media.account.rest(self.live, left, "content[].", media=held or None)
        return out

    def text(self) -> list[Part]:
        if self.kind != "text" and "text" not in self.live:
            return []
        names = ("text", "value", "content") if self.kind == "text" else ("text",)
        name = next((name for name in names if name in self.live), None)
        held = self.part if name is None else self.live  # an empty text says nothing, and is one
        text = next((held[n] for n in names if held.get(n) is not None), None)
        if not isinstance(text, str):
            raise fault(f"{self.what} has type text but no text")
        for other in names:
            if self.live.get(other) == text:
                self.used.add(other)
            elif other in self.live:
                raise fault(f"{self.what} has {name} beside another {other}")
        return _split(text, self.media, self.pattern, self.what)

    def medium(self, each: str) -> list[Part]:
        """The medium of one modality: the part's own, or one beside it."""
        own, names = each == self.kind, _NAMES[each]
        if own:
            names = (str(self.given), *names, *_REFS)
        name = next((name for name in names if name in self.live), None)
        if name is None and not own:
            return []
        if name is None:
            extra = self.beside(each)
            self.media.named(each, self.live)
            found = self.media.next(each)
            if isinstance(found.get("video"), list) and "sample_fps" in extra:  # the rate of its frames
                extra.setdefault("fps", extra.pop("sample_fps"))
            return [{**found, **extra}]
        held = self.live[name]
        self.media.inline[each] += 1
        if name != each and name in keys.FIELDS[each]:
            self.media.account.alias(f"content[].{name}", f"content[].{each}")
        found = _medium(each, held, self.what, self.media.account)
        self.used.update(other for other in names if other == name or self.live.get(other) == held)
        extra = self.beside(each, listed=isinstance(held, (list, tuple))) if own else {}
        return [{"type": each, **found, **extra}]

    def beside(self, kind: str, *, listed: bool = False) -> Part:
        """Hints and knobs beside a ref."""
        knobs, taken = knobs_of(kind, self.live, listed=listed)
        hints = _hints(kind, {key: value for key, value in self.live.items() if key not in taken})
        self.used.update(taken, hints)
        return {**hints, **knobs}


def set_knobs(holder: Mapping[str, Any], parts: Sequence[Part], account: Any) -> set[str]:
    """Put knobs of a record into the part of its one medium.

    Args:
        holder: keys of the record that describe or set a medium.
        parts: its media.
        account: counts the keys that set one.

    Returns:
        Those keys.

    Raises:
        SampleError: `unread_key`, where they may belong to any of several media, and a start without an end,
            which may tell where a clip was cut from; malformed_record.
    """
    if len(parts) != 1:
        knob = next((name for name in holder if name in KNOB_KEYS), None)
        if parts and knob is not None:
            raise unread(knob, f"may belong to any of {len(parts)} media", hint="set it beside the medium")
        return set()
    (part,) = parts
    kind = part["type"]
    found, taken = knobs_of(kind, holder, listed=isinstance(part[kind], list))
    for name, value in found.items():
        refuse(part.setdefault(name, value) != value, f"{name} of the {kind} and of the record disagree")
    if "start" in found and "end" not in part:
        first = next(name for name in STARTS if name in taken)
        raise unread(first, f"stands without an end beside the {kind}", hint="set it in the medium")
    for name in taken:
        account.note(f"{name} -> {kind}")
    return taken


#: A medium that a text names, and one that it numbers.
_TAGGED = re.compile(r"<(?P<tag>img|image|video|audio)>(?P<ref>[^<>\n]{1,2048})</(?P=tag)>")
_NUMBERED = re.compile(r"<(?P<bar>\|?)(?P<kind>image|video|audio)[ _-]?(?P<number>[1-9][0-9]{0,3})(?P=bar)>")
#: Placeholders of models that no table of `placeholders` names: never words of a text.
_FOREIGN = re.compile(r"<\|(?P<kind>image|video|audio)(?:_pad)?\|>|<(?:IMG_CONTEXT|ImageHere)>", re.I)
#: What stands for a medium in texts, some of it only perhaps.
_MARKER = re.compile(
    rf"{_FOREIGN.pattern}|{_NUMBERED.pattern.replace('?P<kind>', '?:')}"
    r"|[<\[](?:image|img|video|audio|sound|speech)[>\]]",
    re.I,
)
_TAGS = {"img": "image"}


def _split(text: str, media: Media, pattern: re.Pattern[str] | None, what: str) -> list[Part]:
    """Text cut at its placeholders; the text around them is kept to the letter."""
    check_text(text, what)
    if pattern is None or not text:
        return [{"type": "text", "text": text}] if text else []
    found = [(m.start(), m.end(), m) for m in pattern.finditer(text)]
    if "<" in text:
        found = _marked(text, media, found)
        _refuse_foreign(text, media)
    parts: list[Part] = []
    start = 0
    for first, last, match in found:
        part = _part_of(match, media, what)
        if part is None:
            continue
        if first > start:
            parts.append({"type": "text", "text": text[start:first]})
        parts.append(part)
        start = last
    if start < len(text):
        parts.append({"type": "text", "text": text[start:]})
    return parts


def _marked(
    text: str, media: Media, plain: list[tuple[int, int, re.Match[str]]]
) -> list[tuple[int, int, re.Match[str]]]:
    """Placeholders, numbered placeholders and media named in the text, in order, without overlaps."""
    tagged = "</" in text and [
        m
        for m in _TAGGED.finditer(text)
        if kind_of_ref(m["ref"]) is not None or m["ref"].startswith(("http://", "https://", "data:"))
    ]
    numbered = [m for m in _NUMBERED.finditer(text) if f"<{m['kind']}>" in media.kinds]
    if not tagged and not numbered:
        return plain
    out: list[tuple[int, int, re.Match[str]]] = []
    reached = 0
    named = [(m.start(), m.end(), m) for m in (*(tagged or ()), *numbered)]
    for item in sorted([*named, *plain], key=lambda item: (item[0], -item[1])):
        if item[0] >= reached:
            out.append(item)
            reached = item[1]
    return out


def _part_of(match: re.Match[str], media: Media, what: str) -> Part | None:
    if match.re is _TAGGED:
        kind = _TAGS.get(match["tag"], match["tag"])
        media.inline[kind] += 1
        return {"type": kind, **_medium(kind, match["ref"].strip(), what, media.account)}
    if match.re is _NUMBERED:
        return media.number(match["kind"], int(match["number"]))
    return media.next(media.kinds[match.group()])


def _refuse_foreign(text: str, media: Media) -> None:
    for match in _FOREIGN.finditer(text):
        kind = (match["kind"] or "image").lower()
        if match.group() not in media.kinds and kind in media.kinds.values():
            raise SampleError(
                "placeholder_mismatch",
                f"the text holds {match.group()!r}, which stands for {kind}s in other models",
                hint=f"placeholders={{{kind!r}: [{match.group()!r}]}} reads it, [] where it is plain words",
            )


def marks_medium(text: str) -> bool:
    """Whether a text holds what stands for a medium in some layout."""
    return ("<" in text or "[" in text) and _MARKER.search(text) is not None


def check_text(text: Any, what: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate (`"\ud800"` in the JSON) is refused here, by name."""
    if not isinstance(text, str):
        raise fault(f"{what} is {type(text).__name__}, not text")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise fault(f"{what} holds a lone surrogate (U+{code:04X} at character {error.start})") from None
    return text


def check_object(value: Any, what: str, wanted: str = "an object") -> Mapping[str, Any]:
    """A record, message or part that is an object of JSON."""
    if not isinstance(value, Mapping):
        raise fault(f"{what} is {type(value).__name__}, not {wanted}")
    return value


def check_list(value: Any, what: str, of: str) -> Sequence[Any]:
    """A list of JSON."""
    if not isinstance(value, (list, tuple)):
        raise fault(f"{what} is {type(value).__name__}, not a list of {of}")
    return value


def media_list(kind: str, value: Any, what: str, account: Any, *, single: bool = False) -> list[Part]:
    """The media of a field: one ref or a list; absent values are none.

    Args:
        kind: the modality.
        value: what the field holds.
        what: the field, for errors.
        account: keys of objects around refs are counted here.
        single: the field is `video`, not `videos`: a list of pictures in it is one video of frames.
    """
    if absent(value):
        return []
    frames = kind == "video" and single and isinstance(value, (list, tuple)) and all(map(_is_picture, value))
    if frames or not isinstance(value, (list, tuple)):
        return [_medium(kind, value, what, account)]
    return [_medium(kind, item, f"item {number} of {what}", account) for number, item in enumerate(value)]


def listed_media(value: Any, what: str, account: Any) -> dict[str, list[Part]]:
    """The media of a field of mixed media: refs whose names tell their modality, or parts with a type."""
    out: dict[str, list[Part]] = {kind: [] for kind in MODALITIES}
    for number, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
        place = f"item {number} of {what}"
        kind: str | None = None
        ref = item
        if isinstance(item, Mapping) and isinstance(item.get("type"), str):
            kind = keys.PART.get(item["type"])
            if kind in MODALITIES:
                ref = next((item[key] for key in (str(kind), *_REFS) if not absent(item.get(key))), item)
        kind = kind_of_ref(ref) if kind is None else kind
        told = f"{place} is no image, video or sound by its name"
        refuse(kind not in MODALITIES, told, hint="use images, videos, audios")
        out[str(kind)].append(_medium(str(kind), ref, place, account))
    return out


def _is_picture(item: Any) -> bool:
    held = next((item[k] for k in ("path", "url") if item.get(k)), b"") if isinstance(item, Mapping) else item
    return isinstance(held, bytes) or (isinstance(held, str) and _PICTURE.search(held) is not None)


def _medium(kind: str, value: Any, what: str, account: Any) -> Part:
    """`{kind: ref}` with the hints and knobs that an object around the ref holds."""
    if kind == "video" and isinstance(value, (list, tuple)):
        refuse(not value, f"{what} has a video without frames")
        named = ((item, f"frame {number} of {what}") for number, item in enumerate(value))
        return {kind: [ref_of("image", item, where) for item, where in named]}
    if not isinstance(value, Mapping):
        return {kind: ref_of(kind, value, what)}
    live = {key: held for key, held in value.items() if not absent(held)}
    if kind == "video" and isinstance(live.get("video") or live.get("frames"), (list, tuple)):
        name = "video" if "video" in live else "frames"
        knobs, taken = knobs_of(kind, live, listed=True)
        account.rest(live, [key for key in live if key != name and key not in taken], "video.")
        return {**_medium(kind, live[name], what, account), **knobs}
    knobs, taken = knobs_of(kind, live)
    hints = _hints(kind, {key: held for key, held in live.items() if key not in taken})
    if "array" in live:
        for name in ("sampling_rate", "frames", "duration"):
            hints.pop(name, None)
    inner = live.get(kind) if isinstance(live.get(kind), (str, bytes, Mapping)) else None
    known = {*_AROUND, *taken, *hints, *([] if inner is None else [kind])}
    account.rest(live, [key for key in live if key not in known], f"{kind}.")
    return {kind: ref_of(kind, value if inner is None else inner, what), **hints, **knobs}


def _hints(kind: str, holder: Mapping[str, Any]) -> Part:
    return {name: checked(name, holder[name]) for name in HINTS[kind] if holder.get(name) is not None}


def refuse_file_names(parts: Sequence[Part], what: str) -> None:
    """A turn of a user that is nothing but a file name, a data URL or base64: never trained as text.

    Raises:
        SampleError: `unread_key`.
    """
    texts = [part["text"] for part in parts if part["type"] == "text"]
    for text in texts if len(texts) == len(parts) else ():
        if _is_file_name(text.strip()):
            raise unread(
                "content",
                f"of {what} is a file name",
                hint='give the turn its type ("type": "image"), or list the file in images, videos or audios',
            )


def _is_file_name(text: str) -> bool:
    if " " in text[:2048] or not (text.startswith(_FILE) or (len(text) <= 2048 and "." in text[-64:])):
        return False
    return bool(kind_of_ref(text))


def names_medium(text: str) -> bool:
    """Whether a text names a medium in tags: `<img>a.jpg</img>`."""
    return "</" in text and any(kind_of_ref(m["ref"].strip()) is not None for m in _TAGGED.finditer(text))


def refuse_tagged(content: Any, what: str) -> None:
    """An answer that names a medium in tags, which is not read as one there.

    Raises:
        SampleError: `unread_key`.
    """
    texts = [content] if isinstance(content, str) else content if isinstance(content, (list, tuple)) else ()
    for text in texts:
        text = text.get("text") if isinstance(text, Mapping) else text
        if isinstance(text, str) and names_medium(text):
            raise unread(
                "content",
                f"of {what} names a medium in tags",
                hint="list the file in images, videos or audios",
            )


def ref_of(kind: str, value: Any, what: str) -> Ref:
    """What a value names: a path, a URL or bytes.

    Raises:
        SampleError: malformed_record.
    """
    if isinstance(value, Mapping):
        if kind == "audio" and not absent(value.get("sampling_rate")) and value.get("array") is not None:
            return _wave_of(value["array"], value["sampling_rate"], what)
        held = value.get("bytes")
        if absent(held) and isinstance(
            value.get("data"), str
        ):  # base64 of an input_audio, an Anthropic source
            form = value.get("media_type") or f"{kind}/{value.get('format') or 'wav'}"
            held = value["data"]
            held = held if held.startswith("data:") else f"data:{form};base64,{held}"
        value = held if not absent(held) else next((value[k] for k in ("url", "path") if value.get(k)), None)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if not text:
            raise fault(f"{what} has an empty {kind} path")
        if len(text) >= 64 and (raw := sniffed(text)) is not None:
            return raw
        return check_text(text, what)
    raise fault(f"{what} has {kind} of type {type(value).__name__}", hint="a path, a URL or bytes")


def _wave_of(array: Any, rate: Any, what: str) -> bytes:
    """Decoded sound as a WAVE file in memory: float32 samples, as they are.

    Args:
        array: [frames], [channels, frames] or [frames, channels] numbers; the longer axis is time.
        rate: Hz.
        what: the medium, for errors.

    Raises:
        SampleError: malformed_record.
    """
    try:
        samples = np.asarray(array, dtype="<f4")
        hertz = int(rate)
    except (TypeError, ValueError):
        raise fault(f"{what} has an array that is no sound") from None
    if samples.ndim not in (1, 2) or not samples.size or hertz < 1:
        raise fault(f"{what} has sound of shape {list(samples.shape)} at {rate} Hz")
    samples = samples[:, None] if samples.ndim == 1 else samples
    if samples.shape[1] > samples.shape[0]:
        samples = samples.T
    data = np.ascontiguousarray(samples).tobytes()
    channels = samples.shape[1]
    form = struct.pack("<HHIIHH", 3, channels, hertz, hertz * channels * 4, channels * 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body
