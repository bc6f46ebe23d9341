"""Media of a chunk as their source bytes: the record without its media, and the media beside it.

`media: source` keeps a chunk as small as the files it was made from. Reading encodes the record again, with
the bytes put back, and takes only the media tensors from it: the token ids have to be those in the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import DriftError, InputError
from ..media.location import read_bytes

__all__ = ["MEDIA_BYTES", "MEDIA_FIELDS", "MEDIA_RECORD", "encode_again", "pull_media", "put_back"]

#: Columns of a chunk that holds media as their bytes: the record, the tensors it encodes to, and the bytes.
MEDIA_RECORD, MEDIA_FIELDS, MEDIA_BYTES = "media.record", "media.fields", "media.bytes"

_KINDS = ("image", "video", "audio")
_PLACE = "packtrain_media"


def pull_media(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """(the record as plain JSON with a number for each medium, the bytes of the media).

    Args:
        record: a chat sample, as `sources.chat.ChatSource` gives it.
    """
    media: list[bytes] = []
    messages = []
    for message in record["messages"]:
        content = message["content"]
        parts = content if isinstance(content, str) else [_pulled(part, media) for part in content]
        messages.append({**message, "content": parts})
    return {**record, "messages": messages}, media


def _pulled(part: Mapping[str, Any], media: list[bytes]) -> dict[str, Any]:
    kind = next((kind for kind in _KINDS if kind in part), None)
    if kind is None:
        return dict(part)
    ref = part[kind]
    if isinstance(ref, list):  # the frames of a video
        media += [read_bytes(one) for one in ref]
        places: Any = list(range(len(media) - len(ref), len(media)))
    else:
        media.append(read_bytes(ref))
        places = len(media) - 1
    return {**part, kind: {_PLACE: places}}


def put_back(record: Mapping[str, Any], media: list[bytes]) -> dict[str, Any]:
    """The inverse of `pull_media`; media are refs by their bytes."""
    messages = []
    for message in record["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            content = [_put(part, media) for part in content]
        messages.append({**message, "content": content})
    return {**record, "messages": messages}


def _put(part: Mapping[str, Any], media: list[bytes]) -> dict[str, Any]:
    kind = next((kind for kind in _KINDS if isinstance(part.get(kind), dict)), None)
    if kind is None:
        return dict(part)
    places = part[kind][_PLACE]
    ref = [media[place] for place in places] if isinstance(places, list) else media[places]
    return {**part, kind: ref}


def encode_again(
    record: Mapping[str, Any],
    media: list[bytes],
    encode: Callable[[Any], Mapping[str, Any]] | None,
    wanted: list[str],
    ids: Any,
    where: str,
) -> dict[str, Any]:
    """The media tensors of a sample whose chunk holds the media's bytes.

    Raises:
        InputError: no encode was given.
        DriftError: encoding does not give the chunk's token ids, or lacks a tensor it had.
    """
    if encode is None:
        raise InputError(
            f"{where} holds media as their bytes",
            hint="pass encode=HFTemplate(processor).encode, or write the chunk with media='tensor'",
        )
    again = encode(put_back(record, media))
    if not np.array_equal(np.asarray(again["input_ids"]), np.asarray(ids)):
        raise DriftError(
            f"{where} encodes to other token ids than the chunk holds",
            hint="read the chunk with the processor that it was written with",
        )
    lacking = [name for name in wanted if name not in again]
    if lacking:
        raise DriftError(f"{where} no longer encodes to {lacking[0]}", hint="use the same processor")
    return {name: again[name] for name in wanted}
