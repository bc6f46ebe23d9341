"""A folder of `{image, json}` pairs: `X.jpg` beside `X.json`, and text-only `output_00000000.json`.

Every `.json` file of the folder is one record (one JSON object), in the order of the file names. A record
that names no image gets the image of the same stem, where there is one; a record that names its images
keeps them. Several records about one image are `X.json`, `X_1.json`, `X_2.json`, each with an image of its
own name. What a stem is, exactly:

    name            stem      only the last suffix is cut, whatever dots stand before it: a.b.jpg ~ a.b.json
    suffix          of an image in any case: .jpg .jpeg .png .webp .gif .bmp .tif .tiff
    Unicode         names match to the letter, else by their composed form (NFC)
    two images      X.jpg and X.png for one X.json: that record is malformed, unless it names its image
    no record       an image without a .json is no sample; they are counted and logged

The fingerprint covers names inside the folder and the bytes of the records, not the place. A table of
stamps and digests in the cache folder saves reopening from hashing what has not changed (`_index.py`).
"""

from __future__ import annotations

import hashlib
import logging
import operator
import os
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..errors import SampleError, SourceError
from ..files import StrPath
from ._handles import contents
from ._index import digest_files
from ._open import near
from ._records import numbered, record_of

log = logging.getLogger(__name__)

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
TABLE = ".packtrain-pairs"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One record file: its name, the digest of its bytes, and the images of its stem."""

    name: str
    sha256: str
    images: tuple[str, ...]


class Pairs:
    """Records of a folder of pairs. Picklable; each read checks that the file is still the one indexed."""

    def __init__(self, folder: str, entries: list[_Entry], unpaired: int) -> None:
        self.folder, self.unpaired, self._entries = folder, unpaired, entries
        rows = [[entry.name, entry.sha256, list(entry.images)] for entry in entries]
        self.fingerprint = files.digest_json({"kind": "pairs", "records": rows})

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON (the table of files as its digest)."""
        return {"kind": "pairs", "records": len(self._entries), "digest": self.fingerprint}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self._entries[numbered(index, len(self), self.folder)]
        data = contents(os.path.join(self.folder, entry.name))
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise SourceError(
                f"the file changed: {entry.name} in {self.folder} changed after the source was opened",
                hint="open the source again: its lengths and plan must be made anew",
            )
        record = record_of(data, entry.name)
        if entry.images and record.get("images") is None and record.get("image") is None:
            if len(entry.images) > 1:
                raise SampleError(
                    "malformed_record",
                    f"{entry.name} has more than one image beside it: {', '.join(entry.images)}",
                    hint='name the one that is meant under "images"',
                )
            record["images"] = list(entry.images)
        return record

    def where(self, index: int) -> str:
        return self._entries[operator.index(index)].name

    def __repr__(self) -> str:
        return f"<pairs source {self.folder}: {len(self)} records, {self.fingerprint[:7]}>"


def open_source(path: StrPath, *, cache_dir: StrPath | None = None, verify_content: bool = False) -> Pairs:
    """Open a folder of pairs.

    Args:
        path: the folder. Folders inside it are not entered.
        cache_dir: where the table goes.
        verify_content: hash every record again instead of trusting sizes and times.

    Raises:
        SourceError: no such folder, or no record in it.
    """
    folder = os.path.abspath(os.fspath(path))
    if not os.path.isdir(folder):
        raise SourceError(f"{folder} is not a folder", hint=near(folder))
    names, images = _names(folder)
    if not names:
        deeper = min(Path(folder).rglob("*.json*"), default=None)
        hint = "name a file of records, or a folder of .json records"
        hint = f"there are some deeper, such as {deeper}" if deeper else hint
        raise SourceError(f"{folder} holds no .json files", hint=hint)
    paths = [os.path.join(folder, name) for name in names]
    held = digest_files(paths, folder, TABLE, cache_dir=cache_dir, verify=verify_content)
    entries = [
        _Entry(name, file.sha256, tuple(images.pop(_stem(name), ())))
        for name, file in zip(names, held, strict=True)
    ]
    unpaired = sum(len(found) for found in images.values())
    if unpaired:
        log.warning("%s: %d images without a .json are no samples", folder, unpaired)
    return Pairs(folder, entries, unpaired)


# --------------------------------------------------------------------------------------------
def _names(folder: str) -> tuple[list[str], dict[str, list[str]]]:
    """(names of record files, stem -> names of images), all in name order."""
    records: list[str] = []
    images: dict[str, list[str]] = {}
    for name in sorted(os.listdir(folder)):
        suffix = os.path.splitext(name)[1].lower()
        if name.startswith(".") or not os.path.isfile(os.path.join(folder, name)):
            continue
        if suffix == ".json":
            records.append(name)
        elif suffix in IMAGES:
            images.setdefault(_stem(name), []).append(name)
    seen: dict[str, str] = {}
    for name in records:
        other = seen.setdefault(_stem(name), name)
        if other != name:
            raise SourceError(
                f"{folder} holds two records of one stem: {other!r} and {name!r}", hint="rename one of them"
            )
    return records, images


def _stem(name: str) -> str:
    return unicodedata.normalize("NFC", os.path.splitext(name)[0])
