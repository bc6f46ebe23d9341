"""The lengths folder: `lengths.json` (marker, written last), `tokens.npy`, `<cost>.npy`, `status.npy`,
`reasons.jsonl`, and `origin.json`, which is outside every digest.

Loading memory-maps the arrays and checks their headers and sizes; `verify` hashes them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..errors import ChecksumError, ForeignArtefactError, FormatError, LengthError
from ..planning.lengths import Lengths
from ..remote.copies import opened
from ..remote.outputs import output
from ._folders import check_blocks, check_seal, describe, open_array, read_marker, sealed

__all__ = ["MARKER", "SCHEMA", "load", "read", "save", "verify"]

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
        "arrays": {
            stem: describe(array)
            for stem, array in {"tokens": lengths.tokens, **lengths.costs, "status": lengths.status}.items()
        },
        "blocks": lengths.array_digests(),
    }
    with output(folder) as place:
        _save(lengths, place, marker, origin, overwrite)


def _save(
    lengths: Lengths,
    folder: Path,
    marker: Mapping[str, Any],
    origin: Mapping[str, Any] | None,
    overwrite: bool,
) -> None:
    _refuse_foreign(folder, marker, overwrite)
    files.make_folder(folder)
    files.remove_leftovers(folder)
    files.remove(folder / MARKER)
    files.publish_array(folder / "tokens.npy", lengths.tokens)
    for name, array in lengths.costs.items():
        files.publish_array(folder / f"{name}.npy", array)
    files.publish_array(folder / "status.npy", lengths.status)
    with files.publish(folder / "reasons.jsonl") as handle:
        for i in sorted(lengths.reasons):
            line = json.dumps([i, lengths.reasons[i]], ensure_ascii=False) + "\n"
            handle.write(line.encode("utf-8", "backslashreplace"))
    if origin is not None:
        files.publish_json(folder / "origin.json", dict(origin))
    files.publish_json(folder / MARKER, sealed(marker))


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
    with files.reading(folder / MARKER, "a marker of lengths", "make the folder again"), _told(folder):
        described = marker["arrays"]
        arrays = {stem: open_array(folder, stem, described[stem]) for stem in described}
        reasons = _read_reasons(folder / "reasons.jsonl", int(marker["reasons"]))
        lengths = Lengths(
            arrays["tokens"],
            {name: arrays[name] for name in marker["costs"]},
            arrays["status"],
            reasons,
        )
        digest = str(marker["digest"])
    lengths._digest = digest
    return lengths, marker


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except LengthError as error:
        raise FormatError(f"{folder} does not hold lengths: {error.message}") from None


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
    try:
        with open(path, encoding="utf-8") as handle:
            out = {int(i): sys.intern(str(reason)) for i, reason in map(json.loads, handle)}
    except FileNotFoundError:
        raise FormatError(f"{path} is missing", hint="the folder is incomplete; make it again") from None
    except (ValueError, TypeError) as error:
        raise FormatError(f"{path} is torn: {error}", hint="make the folder again") from None
    if len(out) != count:
        raise FormatError(f"{path} holds {len(out)} reasons, the marker says {count}")
    return out


def _refuse_foreign(folder: Path, marker: Mapping[str, Any], overwrite: bool) -> None:
    """Refuse to write over other lengths; a torn marker is a leftover and may be replaced."""
    if overwrite or not (folder / MARKER).is_file():
        return
    try:
        held = read_marker(folder, MARKER, SCHEMA)
    except FormatError:
        return
    differs = [key for key in ("fingerprint", "template", "n", "digest") if held.get(key) != marker[key]]
    if differs:
        raise ForeignArtefactError(
            f"{folder} holds other lengths: {', '.join(differs)} differ",
            hint="choose another folder or pass overwrite",
        )
