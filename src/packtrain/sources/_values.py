"""What a value is, whatever its key: absent, a reference to a medium, a list of turns, spans, a mask.

JSON text means what it holds. Absent are null, empty texts and lists, and objects that
hold nothing but absent values, as Arrow fills them.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SUFFIXES = {
    "image": "jpe?g|png|webp|gif|bmp|tiff?|heic|avif",
    "video": "mp4|mov|avi|mkv|webm|m4v|mpe?g",
    "audio": "wav|flac|mp3|ogg|opus|m4a|aac|aiff?|au",
}
#: Names that end as media do; the group says which.
SUFFIX = re.compile("|".join(rf"(?P<{kind}>\.(?:{ends}))" for kind, ends in _SUFFIXES.items()), re.I)
_NAMED = re.compile(rf"[^\n\r\t<>|*?\"]{{1,1024}}(?:{SUFFIX.pattern})(?:[?#]\S*)?", re.I)
_DATA = re.compile(r"data:(image|video|audio)/")

#: First characters of files in base64.
MAGIC = {
    **dict.fromkeys(("/9j/", "iVBORw0KGg", "R0lGOD", "Qk0"), "image"),
    **dict.fromkeys(("T2dnUw", "ZkxhQ", "SUQz"), "audio"),
    "UklGR": "",  # WEBP or WAVE
}
_SIGNATURES = {
    b"\xff\xd8": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\x00": "tif",
    b"MM\x00*": "tif",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"ID3": "mp3",
}
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")


def absent(value: Any) -> bool:
    """Whether a value says nothing."""
    if type(value) is str:
        return not value
    if value is None:
        return True
    if isinstance(value, Mapping):
        return all(absent(held) for held in value.values())
    return isinstance(value, (str, list, tuple, bytes)) and not len(value)


def pruned(value: Any) -> Any:
    """A copy of nested plain values without the members of objects that are null.

    An object that holds nothing but nulls is the empty object: Arrow stores `{}` so.
    """
    if isinstance(value, Mapping):
        return {str(key): pruned(held) for key, held in value.items() if held is not None}
    if isinstance(value, (list, tuple)):
        return [pruned(held) for held in value]
    return value


def texts_in(value: Any) -> Iterator[str]:
    """The texts of a nested value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for held in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(held)


def sniffed(text: str) -> bytes | None:
    """The bytes of a text that is a medium in base64; None for any other."""
    if len(text) < 64 or not text.startswith(tuple(MAGIC)) or _BASE64.fullmatch(text) is None:
        return None
    try:
        return base64.b64decode(text + "=" * (-len(text.strip()) % 4), validate=False)
    except (binascii.Error, ValueError):
        return None


def kind_of_ref(value: Any) -> str | None:
    """The modality of a reference, "" for one whose modality does not show, None for what is none."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _by_bytes(bytes(value[:16]))
    if isinstance(value, str):
        if len(value) < 4:
            return None
        data = _DATA.match(value)
        if data is not None:
            return data[1]
        if len(value) >= 64 and (held := sniffed(value)) is not None:
            return _by_bytes(held[:16])
        found = _NAMED.fullmatch(value) if len(value) <= 2048 else None
        return None if found is None else found.lastgroup
    if isinstance(value, Mapping):
        if "array" in value and "sampling_rate" in value:
            return "audio"
        held = next((value[key] for key in ("bytes", "path", "url") if not absent(value.get(key))), None)
        known = {"bytes", "path", "url"} & set(value)
        return kind_of_ref(held) if known else None
    return None


def suffix_of(head: bytes) -> str:
    """The suffix of a medium, without its dot, by its first bytes; `bin`: they tell none."""
    if head[:4] == b"RIFF":
        return {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}.get(head[8:12], "bin")
    if head[4:8] == b"ftyp":
        return "mp4"
    return next((suffix for magic, suffix in _SIGNATURES.items() if head.startswith(magic)), "bin")


def _by_bytes(head: bytes) -> str:
    found = SUFFIX.fullmatch(f".{suffix_of(head)}")
    return "" if found is None else str(found.lastgroup)


def meaning(value: Any) -> str | None:
    """What a value of a key that is not read means for training; None for nothing."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "a medium"
    if isinstance(value, str):
        if kind_of_ref(value) is not None:
            return "a reference to a medium"
        return meaning(json_of(value)) if value[:1] in ("[", "{") else None
    if isinstance(value, Mapping):
        if kind_of_ref(value) is not None:
            return "a reference to a medium"
        return next((told for told in map(meaning, value.values()) if told), None)
    if not isinstance(value, (list, tuple)) or not len(value):
        return None
    if all(isinstance(item, Mapping) and _is_turn(item) for item in value):
        return "a list of turns"
    if all(_is_span(item) for item in value):
        return "spans"
    if len(value) > 1 and all(isinstance(item, (bool, int)) and item in (0, 1) for item in value):
        return "a mask"
    return next((told for told in map(meaning, value) if told), None)


def json_of(text: str | bytes) -> Any:
    """The value that a text is in JSON; None for null and for any other."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_turn(item: Mapping[str, Any]) -> bool:
    said = any(not absent(item.get(key)) for key in ("content", "value"))
    return said and any(isinstance(item.get(key), str) for key in ("role", "from"))


def _is_span(item: Any) -> bool:
    if isinstance(item, Mapping):
        item = (item.get("start"), item.get("end"))
    return (
        isinstance(item, (list, tuple))
        and len(item) == 2
        and all(isinstance(edge, int) and not isinstance(edge, bool) for edge in item)
        and item[0] < item[1]
    )
