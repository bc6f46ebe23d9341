"""Several records of one image, in both ways of offline packing: split into pairs, or merged into a dialogue.

    split_pairs(source, out)                      X.jpg X.json, X_1.jpg X_1.json … ; output_00000000.json
    merge_images(source, out, measure, limit)     one record an image, its turns one after the other

Split: names never clash, whatever the data call their images: not in case, not in Unicode form, not with an
image that is really called `X_1`. First every image's first record gets the image's own name, then the others
get numbers that are free; what a name was stands in the record under `names`.

Merge: records with the same images are joined in the order of their ids while the merged sample stays within
`limit` tokens, as `measure` (of a template) counts it; what would not fit begins another sample. Records that
cannot be joined without changing what they say (system turns, tools, media behind a text) stay as they are.

A record that cannot be read or written stops either way by name. With `skip` it is left out instead, and a
line of the ledger (`.packtrain-ledger.jsonl` in the folder, `OUT.ledger.jsonl` beside the file) says which
record, where it stands, and why: records = written + lines of the ledger.
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
from ..checks import whole
from ..errors import ForeignArtefactError, InputError, SampleError
from ..extend import Source
from ..measuring.run import drained
from ..media.knobs import KNOB_KEYS
from ..media.location import exists, identity_name, media_refs, name_of, read_bytes
from .publish import refuse_unread


# --------------------------------------------------------------------------------------------
# Records that `packtrain pairs` cannot use: the first stops it by name, or all of them stand in a ledger
# --------------------------------------------------------------------------------------------
class Faults:
    """Records that cannot be used: the first stops the command, or all of them go into the ledger."""

    def __init__(self, source: Source, skip: bool) -> None:
        self._source, self._skip = source, skip
        self._rows: dict[int, dict[str, Any]] = {}
        self._keys: dict[str, int] = {}
        drained(source)

    def add(self, number: int, error: SampleError) -> None:
        where = self._source.where(number)
        if not self._skip:
            said = error.message if where in error.message else f"{where}: {error.message}"
            raise InputError(
                f"{error.reason}: {said}", hint=error.hint or "mend it, or leave such records out: skip=True"
            ) from error
        row = {"id": number, "where": where, "reason": error.reason, "message": error.message}
        self._rows.setdefault(number, row)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def read_once(self) -> None:
        """Every record was read once: what nothing read is counted, or refused.

        Raises:
            UnreadKeys: more than 1 % of the records hold a key that changes training and is not read.
        """
        self._keys = drained(self._source)
        rows = [(number, row["reason"], row["message"]) for number, row in self._rows.items()]
        refuse_unread(rows, len(self._source))

    @property
    def counted(self) -> dict[str, Any]:
        """`skipped`, where records may be; `keys`, where nothing read some (`sources._account`)."""
        skipped = {"skipped": len(self._rows)} if self._skip else {}
        return {**skipped, **({"keys": self._keys} if self._keys else {})}

    def publish(self, path: Path) -> None:
        """Write the ledger; without faults there is none."""
        if self._rows:
            lines = [json.dumps(self._rows[number], ensure_ascii=False) for number in sorted(self._rows)]
            files.publish_text(path, "\n".join(lines) + "\n")
        else:
            files.remove(path)


def samples_of(
    source: Source, faults: Faults, use: Callable[[Mapping[str, Any], int], Any]
) -> Iterator[tuple[int, Mapping[str, Any], Any]]:
    """(number, sample, what `use` makes of them) of the records without a fault; faults are added."""
    for number in range(len(source)):
        if number not in faults:
            try:
                sample = source[number]
                made = use(sample, number)
            except SampleError as error:
                faults.add(number, error)
                continue
            yield number, sample, made


# --------------------------------------------------------------------------------------------
# Several records of one image, in both ways of offline packing: split into pairs, or merged into a dialogue
# --------------------------------------------------------------------------------------------
#: Bytes of a stem that are kept; with a number and a suffix it stays below the 255 of file systems.
_STEM = 200
_MARKER = ".packtrain-split.json"
_LEDGER = ".packtrain-ledger.jsonl"


def split_pairs(source: Source, out: str | Path, *, skip: bool = False) -> dict[str, Any]:
    """Write every record as a pair of its own.

    Args:
        source: normalised chat samples, as `ChatSource` gives them.
        out: an empty folder, or one that this very call was stopped in.
        skip: leave records out that cannot be used, into the ledger, instead of stopping at the first.

    Returns:
        {"records", "images", "without_image"}, "skipped" where `skip`, and "keys" where nothing read some.

    Raises:
        ForeignArtefactError: `out` holds something else. InputError: a record or medium cannot be read.
    """
    out = Path(out)
    key = {"source": source.fingerprint, "records": len(source), **({"skip": True} if skip else {})}
    _refuse_other(out, key)
    faults = Faults(source, skip)
    root = getattr(source, "media_root", None)
    stems = _stems(source, root, faults)
    files.publish_json(out / _MARKER, {**key, "whole": False})
    done: dict[str, Any] = {"records": 0, "images": 0, "without_image": 0}

    def pair(sample: Mapping[str, Any], number: int) -> tuple[dict[str, Any], list[bytes]]:
        return _plain(sample, number), [read_bytes(ref) for ref in media_refs(sample)]

    for number, sample, (record, media) in samples_of(source, faults, pair):
        refs = media_refs(sample)
        names = [f"{stems[number]}{f'.{i}' if i else ''}{_suffix(ref)}" for i, ref in enumerate(refs)]
        for name, data in zip(names, media, strict=True):
            with files.publish(out / name) as handle:
                handle.write(data)
        record["images"] = names
        if names:
            record["names"] = [identity_name(ref, root) for ref in refs]
        files.publish_text(
            out / f"{stems[number]}.json", json.dumps(record, ensure_ascii=False, indent=1) + "\n"
        )
        done["records"] += 1
        done["images"] += len(names)
        done["without_image"] += not names
    files.remove_leftovers(out)
    faults.publish(out / _LEDGER)
    files.publish_json(out / _MARKER, {**key, "whole": True})
    return {**done, **faults.counted}


def merge_images(
    source: Source, out: str | Path, measure: Callable[[Any], int], limit: int, *, skip: bool = False
) -> dict[str, Any]:
    """Write a JSONL file in which records of the same images are one sample of several turns.

    Args:
        source: normalised chat samples.
        out: the file; an earlier merge there is replaced as a whole.
        measure: `template.measure`.
        limit: longest merged sample, in tokens. A record that is longer alone stays alone.
        skip: as for `split_pairs`. Media are opened only where `measure` opens them.

    Returns:
        {"records", "samples", "merged"}: read, written, and how many of those hold several records; and
        "skipped" where `skip`, and "keys" where nothing read some.

    Raises:
        ForeignArtefactError: `out` is a file that no merge wrote.
        InputError: a record cannot be read.
    """
    whole("the longest merged sample", limit, 1)
    out = Path(out)
    _refuse_file(out)
    faults = Faults(source, skip)
    groups: dict[bytes, list[int]] = {}
    for number, sample, _ in samples_of(source, faults, _plain):
        groups.setdefault(_group(sample, number), []).append(number)
    faults.read_once()
    done: dict[str, Any] = {"records": len(source), "samples": 0, "merged": 0}
    with files.publish(out) as handle:
        for ids in groups.values():
            for held, sample in _joined(source, ids, measure, limit, faults):
                images = [_path(ref, held[0]) for ref in media_refs(sample)]
                line = json.dumps(
                    {**_plain(sample, held[0]), "images": images, "ids": held}, ensure_ascii=False
                )
                handle.write(line.encode("utf-8") + b"\n")
                done["samples"] += 1
                done["merged"] += len(held) > 1
        faults.publish(out.with_name(f"{out.name}.ledger.jsonl"))
    return {**done, **faults.counted}


# --------------------------------------------------------------------------------------------
def _refuse_other(out: Path, key: dict[str, Any]) -> None:
    marker = out / _MARKER
    if marker.is_file():
        held = files.read_json(marker)
        free = {"whole"} if held.get("whole") else {"whole", "skip"}  # a stopped call may go on with --skip
        told, want = ({n: v for n, v in one.items() if n not in free} for one in (held, key))
        if told != want:
            same = all(told.get(name) == want[name] for name in ("source", "records"))
            why = "made with other options (--skip)" if same else "of another source"
            raise ForeignArtefactError(f"{out} holds pairs {why}", hint="choose another folder")
        return
    if out.is_dir() and any(path for path in out.iterdir() if not path.name.startswith(f".{_MARKER}")):
        raise ForeignArtefactError(f"{out} is not empty", hint="choose an empty folder")


def _refuse_file(out: Path) -> None:
    """Only a new file, or one that a merge wrote, is written to."""
    if out.is_dir():
        raise InputError(f"{out} is a folder", hint="merge writes one JSONL file: name it")
    if not out.is_file() or out.stat().st_size == 0:
        return
    with open(out, "rb") as handle:
        line = handle.readline()
    try:
        merged = isinstance(json.loads(line)["ids"], list)
    except (ValueError, TypeError, KeyError):
        merged = False
    if not merged:
        raise ForeignArtefactError(f"{out} is no file of merged samples", hint="choose another file")


def _stems(source: Source, root: Any, faults: Faults) -> dict[int, str]:
    """A stem for each record: no two are equal, also not in case or Unicode form.

    Faults that need no medium to be read are found here, before anything is written.
    """
    taken: set[str] = set()
    stems: dict[int, str] = {}
    wanted: dict[int, tuple[str, int]] = {}
    seen: set[str] = set()

    def checked(sample: Mapping[str, Any], number: int) -> list[Any]:
        _plain(sample, number)
        refs = media_refs(sample)
        for ref in refs:
            if not exists(ref):
                read_bytes(ref)  # says what is amiss
        return refs

    for number, _, refs in samples_of(source, faults, checked):
        first = identity_name(refs[0], root) or f"image_{number:08d}" if refs else ""
        wish = _cut(os.path.splitext(first.rpartition("/")[2].rpartition("!")[2])[0]) if refs else ""
        wish = wish or f"output_{number:08d}"
        is_first = first not in seen or not refs
        seen.add(first)
        if is_first and _take(wish, len(refs), taken):
            stems[number] = wish
        else:
            wanted[number] = (wish, len(refs))
    faults.read_once()
    for number, (wish, images) in wanted.items():
        suffix = 1
        while not _take(f"{wish}_{suffix}", images, taken):
            suffix += 1
        stems[number] = f"{wish}_{suffix}"
    return stems


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


def _text(part: Mapping[str, Any]) -> str:
    return part["text"] if part["type"] == "text" else "<image>"


def _plain(sample: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The sample with contents as text, `<image>` where an image stands."""
    parts = [part for message in sample["messages"] for part in message["content"]]
    knobs = sorted({key for part in parts if part["type"] == "image" for key in KNOB_KEYS & set(part)})
    others = [part["type"] for part in parts if part["type"] not in ("text", "image")]
    reason, hint = "unsupported_record", "skip=True leaves such records out"
    if sample.get("objects"):
        why, hint = "has objects that a model's template fills in", f"write the boxes into the text; {hint}"
    elif any("<image>" in part["text"] for part in parts if part["type"] == "text"):
        why, hint = "has the text <image> beside its images", f"pairs cannot hold them; {hint}"
    elif others:
        why, hint = f"has a {others[0]}", f"pairs hold images only; {hint}"
    elif knobs:
        reason, why = "unread_key", f"sets {', '.join(knobs)} of an image"
        hint = f"pairs hold no such setting: ignore_keys=[{knobs[0]!r}] leaves it out"
    else:
        messages = [
            {**message, "content": "".join(map(_text, message["content"]))} for message in sample["messages"]
        ]
        return {**sample, "messages": messages}
    raise SampleError(reason, f"record {number} {why}", hint=hint)


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
    source: Source, ids: list[int], measure: Callable[[Any], int], limit: int, faults: Faults
) -> Iterator[tuple[list[int], Mapping[str, Any]]]:
    """(ids, sample) of the samples that records of the same images become."""
    held: list[int] = []
    sample: Mapping[str, Any] = {}
    for number in ids:
        record = source[number]
        both = [*sample["messages"], *_without_images(record["messages"])] if held else []
        longer = {"messages": both} if held else record
        try:
            fits = len(ids) == 1 or measure(longer) <= limit
        except SampleError as error:
            faults.add(number, error)
            continue
        if held and not fits:
            yield held, sample
            held, longer = [], record
        held, sample = [*held, number], longer
    if held:
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
            hint="use way='split' first",
        )
    return str(ref)
