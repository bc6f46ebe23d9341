"""The lengths folder: `lengths.json` (marker, written last), `tokens.npy`, `<cost>.npy`, `status.npy`,
`reasons.jsonl`, and `origin.json`, which is outside every digest.

Loading memory-maps the arrays and checks their headers and sizes; `verify` hashes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array as packed_numbers
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..errors import ChecksumError, ForeignArtefactError, FormatError, LengthError, SampleError
from ..measuring.run import MediaRow
from ..media.location import file_of, identity, is_url, ref_of
from ..planning.lengths import Lengths
from ..remote.copies import opened
from ..remote.outputs import output
from ._folders import check_blocks, check_seal, describe, marker_there, open_array, publishing, read_marker

SCHEMA = "packtrain.lengths/1"
MARKER = "lengths.json"


def save(
    lengths: Lengths,
    folder: str | Path,
    *,
    fingerprint: str | None = None,
    template: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    origin: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write `lengths` to `folder`.

    Args:
        lengths: what to write.
        folder: made when absent; may be a URL.
        fingerprint: identity of the source that was measured.
        template: `Template.config()` of what measured it.
        fields: further plain JSON for the marker.
        origin: source paths, times, machine: kept beside the artefact, outside its digests.
        overwrite: replace other lengths that are in the folder.

    Raises:
        ForeignArtefactError: the folder holds other lengths and `overwrite` is False.
    """
    arrays = {"tokens": lengths.tokens, **lengths.costs, "status": lengths.status}
    marker = {
        **dict(fields or {}),
        "schema": SCHEMA,
        "n": len(lengths),
        "digest": lengths.digest,
        "fingerprint": fingerprint,
        "template": dict(template) if template is not None else None,
        "costs": list(lengths.costs),
        "max_tokens": lengths.max_tokens,
        "reasons": len(lengths.reasons),
        "arrays": {stem: describe(array) for stem, array in arrays.items()},
        "blocks": lengths.array_digests(),
    }
    with output(folder) as place:
        held = None if overwrite else marker_there(place, MARKER, SCHEMA)
        same = ("fingerprint", "template", "n", "digest")
        differs = [] if held is None else [key for key in same if held.get(key) != marker[key]]
        if differs:
            raise ForeignArtefactError(
                f"{place} holds other lengths: {', '.join(differs)} differ",
                hint="choose another folder or pass overwrite",
            )
        with (
            publishing(place, MARKER, marker, arrays, origin),
            files.publish(place / "reasons.jsonl") as handle,
        ):
            for i in sorted(lengths.reasons):
                line = json.dumps([i, lengths.reasons[i]], ensure_ascii=False) + "\n"
                handle.write(line.encode("utf-8", "backslashreplace"))


def load(folder: str | Path) -> Lengths:
    """Open a lengths folder, memory-mapped."""
    return read(folder)[0]


def read(folder: str | Path) -> tuple[Lengths, dict[str, Any]]:
    """The lengths and the marker (fingerprint, template, …) of a folder; `folder` may be a URL.

    Raises:
        FormatError: the folder is absent, torn or of another schema; names the file.
    """
    folder = opened(folder)
    marker = read_marker(folder, MARKER, SCHEMA)
    with files.reading(folder / MARKER, "a marker of lengths", "make the folder again"):
        described = marker["arrays"]
        arrays = {stem: open_array(folder, stem, described[stem]) for stem in described}
        reasons = _read_reasons(folder / "reasons.jsonl", int(marker["reasons"]))
        costs = {name: arrays[name] for name in marker["costs"]}
        try:
            lengths = Lengths(arrays["tokens"], costs, arrays["status"], reasons)
        except LengthError as error:
            raise FormatError(f"{folder} does not hold lengths: {error.message}") from None
        digest = str(marker["digest"])
    lengths._digest, lengths.media = digest, marker.get("media")
    return lengths, marker


def verify(folder: str | Path) -> Lengths:
    """Hash every stored byte of a lengths folder. ChecksumError names the file that differs."""
    folder = opened(folder)
    lengths, _ = read(folder)
    marker = check_seal(folder, MARKER)
    if "media" in marker and files.sha256_file(folder / "media.jsonl") != marker["media"]:
        raise ChecksumError(f"{folder / 'media.jsonl'} differs from its digest", hint="measure again")
    for stem, array in {"tokens": lengths.tokens, **lengths.costs, "status": lengths.status}.items():
        check_blocks(folder, stem, array, list(marker["blocks"][stem]))
    fresh = Lengths(lengths.tokens, lengths.costs, lengths.status, lengths.reasons)
    if fresh.digest != marker["digest"]:
        raise ChecksumError(
            f"{folder} hashes to {fresh.digest[:12]}…, its digest is {str(marker['digest'])[:12]}…"
        )
    return lengths


def _read_reasons(path: Path, count: int) -> dict[int, str]:
    with files.reading(path, f"a file of {count} reasons", "make the folder again"):
        with open(path, encoding="utf-8") as handle:
            out = {int(i): sys.intern(str(reason)) for i, reason in map(json.loads, handle)}
        if len(out) != count:
            raise ValueError(f"it holds {len(out)}")
    return out


# --------------------------------------------------------------------------------------------
# The media table of a lengths folder: which files the lengths were read from
# --------------------------------------------------------------------------------------------
# `media.jsonl` has one row [name, size, header digest] a medium, ascending by name; its digest is part of the
# folder's fingerprint. `media_stat.npy` holds their stamps (`files.Stamp`) as they were on this machine: it
# is outside every digest and only saves hashing them again.
TABLE = "media.jsonl"
STATS = "media_stat.npy"
_ABSENT = files.Stamp(-1, 0, 0, 0)
_ROWS = 1 << 16  # noted rows in memory at once


def save_media(folder: Path, rows: Iterable[MediaRow], root: str | None) -> str:
    """Write both files; returns the SHA-256 (hex) of the table.

    Args:
        rows: ascending, each once.
        root: folder or URL that relative names start from.
    """
    digest = hashlib.sha256()
    stats = packed_numbers("q")  # 32 bytes a medium
    with files.publish(folder / TABLE) as handle:
        for row in rows:
            line = (json.dumps(row) + "\n").encode("ascii")
            handle.write(line)
            digest.update(line)
            stats.extend(_stat(row[0], root))
    files.publish_array(folder / STATS, np.asarray(stats, dtype=np.int64).reshape(-1, 4))
    return digest.hexdigest()


def read_media(folder: Path) -> Iterator[MediaRow]:
    """The rows of the table."""
    hint = "measure again with overwrite=True"
    with (
        files.reading(folder / TABLE, "a table of media", hint),
        open(folder / TABLE, encoding="ascii", errors="replace") as handle,
    ):
        for line in handle:
            name, size, header = json.loads(line)
            yield str(name), int(size), str(header)


def changed_media(
    folder: Path, root: str | None, *, verify_content: bool = False, noted_only: bool = False
) -> list[str]:
    """Names of media that are no longer what was measured.

    A file whose stamp is as noted is taken as unchanged unless `verify_content`; any other, and
    what lies behind a URL, is identified anew by size and header digest (so a copied or touched file is
    not a change). `noted_only` passes over media without noted size and time: those behind URLs.
    """
    changed: list[str] = []
    noted = _noted(folder)
    plain = "" if root is None or is_url(root) else os.path.join(os.path.abspath(root), "")
    for name, size, header in read_media(folder):
        held = next(noted, _ABSENT)
        same = held[0] >= 0 and held == _stat(name, root, plain)[: len(held)]
        if (same and not verify_content) or (noted_only and held[0] < 0):
            continue
        if _identify(name, root) != (size, header):
            changed.append(name)
    return changed


def _noted(folder: Path) -> Iterator[tuple[int, ...]]:
    """The stamp of each row, as far as it was noted: earlier versions have size and time alone."""
    try:
        stats: NDArray[np.int64] = np.load(folder / STATS, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return
    if stats.ndim == 2 and stats.shape[1] in (2, 4):
        for start in range(0, len(stats), _ROWS):
            for row in stats[start : start + _ROWS].tolist():
                yield tuple(row)


def _stat(name: str, root: str | None, plain: str = "") -> files.Stamp:
    """The stamp of the file, or of the tar that holds it; size -1 when there is none, or a URL.

    Args:
        plain: the root as a prefix: what a plain relative name needs, and most are.
    """
    try:
        if plain and ":" not in name and "!" not in name and not os.path.isabs(name):
            status = os.stat(plain + name)
        else:
            status = os.stat(file_of(ref_of(name, root)))
    except (OSError, ValueError):
        return _ABSENT
    return files.Stamp.of(status)


def _identify(name: str, root: str | None) -> tuple[int, str]:
    try:
        _, size, header = identity(ref_of(name, root), root)
    except SampleError:
        return -1, ""
    return size, header
