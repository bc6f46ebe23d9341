"""Several records of one image, in both ways of offline packing: split into pairs, or merged into a dialogue.

    split_pairs(source, out)                      X.jpg X.json, X_1.jpg X_1.json … ; output_00000000.json
    merge_images(source, out, measure, limit)     one record an image, its turns one after the other

Split: names never clash, whatever the data call their images: not in case, not in Unicode form, not with an
image that is really called `X_1`. First every image's first record gets the image's own name, then the others
get numbers that are free; what a name was stands in the record under `names`.

Merge: records with the same images are joined in the order of their ids while the merged sample stays within
`limit` tokens, as `measure` (of a template) counts it; what would not fit begins another sample. Records that
cannot be joined without changing what they say (system turns, tools, media behind a text) stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import ForeignArtefactError, InputError, SampleError
from ..extend import Source
from ..media.location import identity_name, name_of, read_bytes
from ..sources.chat import media_refs

__all__ = ["merge_images", "split_pairs"]

#: Bytes of a stem that are kept; with a number and a suffix it stays below the 255 of file systems.
_STEM = 200
_MARKER = ".packtrain-split.json"


def split_pairs(source: Source, out: str | Path) -> dict[str, int]:
    """Write every record as a pair of its own.

    Args:
        source: normalised chat samples, as `ChatSource` gives them.
        out: an empty folder, or one that this very call was stopped in.

    Returns:
        {"records", "images", "without_image"}.

    Raises:
        ForeignArtefactError: `out` holds something else. InputError: a record or medium cannot be read.
    """
    out = Path(out)
    key = {"source": source.fingerprint, "records": len(source)}
    _claim(out, key)
    root = getattr(source, "media_root", None)
    stems = _stems(source, root)
    done = {"records": 0, "images": 0, "without_image": 0}
    for number, sample in _samples(source):
        names = []
        for place, ref in enumerate(media_refs(sample)):
            name = f"{stems[number]}{f'.{place}' if place else ''}{_suffix(ref)}"
            with files.publish(out / name) as handle:
                handle.write(read_bytes(ref))
            names.append(name)
        record = {**_plain(sample, number), "images": names}
        originals = [identity_name(ref, root) for ref in media_refs(sample)]
        if originals:
            record["names"] = originals
        files.publish_text(
            out / f"{stems[number]}.json", json.dumps(record, ensure_ascii=False, indent=1) + "\n"
        )
        done["records"] += 1
        done["images"] += len(names)
        done["without_image"] += not names
    files.remove_leftovers(out)
    files.publish_json(out / _MARKER, {**key, "whole": True})
    return done


def merge_images(
    source: Source, out: str | Path, measure: Callable[[Any], int], limit: int
) -> dict[str, int]:
    """Write a JSONL file in which records of the same images are one sample of several turns.

    Args:
        source: normalised chat samples.
        out: the file; replaced as a whole.
        measure: `template.measure`.
        limit: longest merged sample, in tokens. A record that is longer alone stays alone.

    Returns:
        {"records", "samples", "merged"}: read, written, and how many of those hold several records.
    """
    if limit < 1:
        raise InputError(f"the longest merged sample is {limit} tokens", hint="at least 1")
    groups: dict[bytes, list[int]] = {}
    for number, sample in _samples(source):
        groups.setdefault(_group(sample, number), []).append(number)
    done = {"records": len(source), "samples": 0, "merged": 0}
    with files.publish(out) as handle:
        for ids in groups.values():
            for held, sample in _joined(source, ids, measure, limit):
                images = [_path(ref, held[0]) for ref in media_refs(sample)]
                line = json.dumps(
                    {**_plain(sample, held[0]), "images": images, "ids": held}, ensure_ascii=False
                )
                handle.write(line.encode("utf-8") + b"\n")
                done["samples"] += 1
                done["merged"] += len(held) > 1
    return done


# --------------------------------------------------------------------------------------------
def _samples(source: Source) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number in range(len(source)):
        try:
            yield number, source[number]
        except SampleError as error:
            raise InputError(f"{error.reason}: {error.message}", hint=error.hint) from error


def _claim(out: Path, key: dict[str, Any]) -> None:
    marker = out / _MARKER
    if marker.is_file():
        held = files.read_json(marker)
        if {name: held.get(name) for name in key} != key:
            raise ForeignArtefactError(
                f"{out} holds the pairs of another source", hint="choose another folder"
            )
        return
    if out.is_dir() and any(path for path in out.iterdir() if not path.name.startswith(f".{_MARKER}")):
        raise ForeignArtefactError(f"{out} is not empty", hint="choose an empty folder")
    files.publish_json(marker, {**key, "whole": False})


def _stems(source: Source, root: Any) -> list[str]:
    """A stem for each record: no two are equal, also not in case or Unicode form."""
    taken: set[str] = set()
    stems: list[str | None] = []
    wanted: list[tuple[str, int]] = []
    seen: set[str] = set()
    for number, sample in _samples(source):
        refs = media_refs(sample)
        first = identity_name(refs[0], root) or f"image_{number:08d}" if refs else ""
        wish = _cut(os.path.splitext(first.rpartition("/")[2].rpartition("!")[2])[0]) if refs else ""
        wish = wish or f"output_{number:08d}"
        wanted.append((wish, len(refs)))
        is_first = first not in seen or not refs
        seen.add(first)
        stems.append(wish if is_first and _take(wish, len(refs), taken) else None)
    for number, stem in enumerate(stems):
        suffix = 0
        while stem is None:
            suffix += 1
            wish, images = wanted[number]
            stem = f"{wish}_{suffix}" if _take(f"{wish}_{suffix}", images, taken) else None
        stems[number] = stem
    return [str(stem) for stem in stems]


def _take(stem: str, images: int, taken: set[str]) -> bool:
    """Reserve the names of a record: its stem, and `stem.1`, … where it has more images."""
    names = [stem, *(f"{stem}.{place}" for place in range(1, images))]
    folded = [unicodedata.normalize("NFC", unicodedata.normalize("NFC", n).casefold()) for n in names]
    if any(name in taken for name in folded):
        return False
    taken.update(folded)
    return True


def _cut(stem: str) -> str:
    """At most `_STEM` bytes, whole characters, nothing a file system or a shell takes for something else."""
    safe = "".join("_" if ord(c) < 32 or c in '/\\:*?"<>|' else c for c in stem).strip(". ")
    return safe.encode("utf-8", "replace")[:_STEM].decode("utf-8", "ignore")


def _suffix(ref: Any) -> str:
    name = "" if isinstance(ref, bytes) or str(ref).startswith("data:") else os.fspath(ref)
    suffix = os.path.splitext(name)[1].lower()
    return suffix if 1 < len(suffix) <= 6 and suffix[1:].isalnum() else ".jpg"


def _plain(sample: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The sample with contents as text, `<image>` where an image stands."""
    messages = []
    for message in sample["messages"]:
        text = ""
        for part in message["content"]:
            if part["type"] == "text":
                if "<image>" in part["text"]:
                    raise InputError(
                        f"record {number} has the text <image> beside its images",
                        hint="such records cannot be written as pairs",
                    )
                text += part["text"]
            elif part["type"] == "image":
                text += "<image>"
            else:
                raise InputError(f"record {number} has a {part['type']}", hint="pairs hold images only")
        messages.append({**message, "content": text})
    return {**sample, "messages": messages}


def _group(sample: Mapping[str, Any], number: int) -> bytes:
    """What records that may be joined have in common; a record that may not be has a key of its own."""
    refs = media_refs(sample)
    messages = sample["messages"]
    turns = [message["role"] for message in messages]
    ahead = [part["type"] for part in messages[0]["content"]] if messages else []
    plain = (
        bool(refs)
        and set(sample) == {"messages"}
        and turns == ["user", "assistant"] * (len(turns) // 2)
        and all(set(message) == {"role", "content"} for message in messages)
        and ahead[: len(refs)] == ["image"] * len(refs)
    )
    if not plain:
        return str(number).encode()
    digest = hashlib.sha256()
    for ref in refs:
        data = ref if isinstance(ref, bytes) else os.fspath(ref).encode("utf-8", "surrogateescape")
        digest.update(hashlib.sha256(data).digest())
    return digest.digest()


def _joined(
    source: Source, ids: list[int], measure: Callable[[Any], int], limit: int
) -> Iterator[tuple[list[int], Mapping[str, Any]]]:
    """(ids, sample) of the samples that records of the same images become."""
    held: list[int] = []
    sample: Mapping[str, Any] = {}
    for number in ids:
        record = source[number]
        if held:
            longer = {"messages": [*sample["messages"], *_without_images(record["messages"])]}
            if measure(longer) <= limit:
                held, sample = [*held, number], longer
                continue
            yield held, sample
        held, sample = [number], record
    yield held, sample


def _without_images(messages: list[Any]) -> list[Any]:
    first = messages[0]
    content = [part for part in first["content"] if part["type"] != "image"]
    for place, part in enumerate(content[:1]):
        content[place] = {**part, "text": part["text"].lstrip("\n")}  # the line break behind an image
    return [{**first, "content": content}, *messages[1:]]


def _path(ref: Any, number: int) -> str:
    if isinstance(ref, bytes):
        raise InputError(
            f"record {number} holds its {name_of(ref)}: a JSONL file names files",
            hint="use --way split first",
        )
    return str(ref)
