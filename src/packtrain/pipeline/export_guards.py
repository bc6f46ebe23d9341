"""What an export may write to and from: its key, foreign content, a source that is still the measured one."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from .. import files
from ..errors import ForeignArtefactError, FormatError, InputError, counted
from ..export._job import Job
from ..planning.lengths import Lengths
from ..remote.copies import entries, place_of
from ..remote.places import told_url
from ..store import shards
from ..store.lengths import changed_media
from .publish import origin_of

#: Of the names in an export, whatever its format; with a dot: what a stopped writer left.
_BEGINNINGS = ("ps_", "pack-", "chunk_", ".ps_", ".pack-", ".chunk_", ".version.")


def refuse_changed(job: Job, verify_content: bool) -> None:
    """The source and its media are what was measured, and the plan is of those lengths."""
    if job.lengths_folder is None:
        return
    lengths = Lengths.load(job.lengths_folder)
    if lengths.digest != job.plan.lengths_digest:
        raise ForeignArtefactError(
            f"{job.plan_folder} was planned from other lengths than {job.lengths_folder}", hint="plan again"
        )
    told = files.read_json(job.lengths_folder / "lengths.json").get("key") or {}
    if told.get("source") not in (None, job.source.fingerprint):
        raise ForeignArtefactError(
            f"the source changed since {job.lengths_folder} was "
            f"measured: {counted(len(job.source), 'samples')} now, {told.get('samples')} then",
            hint="measure and plan again, or restore the source",
        )
    changed = _changed(job, verify_content=verify_content)
    if changed:
        raise ForeignArtefactError(
            f"media changed since {job.lengths_folder} was measured: {changed}",
            hint="restore them, or measure and plan again",
        )


def refuse_meanwhile(job: Job, parts: Iterable[int]) -> None:
    """The media are still what was measured, now that `parts` were written; else those count as unwritten."""
    changed = _changed(job, noted_only=True)
    if changed:
        for part in parts:
            files.remove(shards.part_path(job.out, part))
        raise ForeignArtefactError(
            f"media changed while they were exported: {changed}",
            hint="restore them and run the command again (it writes these parts anew), "
            "or measure and plan again",
        )


def _changed(job: Job, **how: bool) -> str:
    """The first medium that is not what was measured, and how many more; empty: none."""
    if job.lengths_folder is None or not (job.lengths_folder / "media.jsonl").is_file():
        return ""
    changed = changed_media(job.lengths_folder, getattr(job.source, "media_root", None), **how)
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{changed[0]}{more}" if changed else ""


def key_of(job: Job) -> dict[str, Any]:
    """What an export depends on."""
    return {
        "schema": shards.SCHEMA_EXPORT,
        "format": job.format,
        "plan": job.plan.checksum,
        "lengths": job.plan.lengths_digest,
        "source": job.source.fingerprint,
        "task": job.task,
        "maxcount": job.maxcount,
        "maxsize": job.maxsize,
        "options": dict(job.options),
    }


def refuse_foreign(out: Path, key: dict[str, Any], overwrite: bool) -> None:
    """Only an empty folder, this very export, or (with `overwrite`) another export is written to."""
    if out.is_symlink() and not out.exists():
        raise InputError(f"{out} is a link to nowhere", hint="remove it, or choose another folder")
    if not out.is_dir():
        return
    if shards.is_export(out):
        held = held_key(out, overwrite)
        refuse_strays(out, str(held.get("format", key["format"])))
        differs = [name for name in key if held.get(name) != key[name]]
        if differs and not overwrite:
            raise ForeignArtefactError(
                f"{out} holds an export of another {', '.join(differs)}",
                hint="choose another folder, or replace it with overwrite=True",
            )
        return
    others = [name for name in entries(out) if name != shards.FOLDER]
    if others:
        raise ForeignArtefactError(
            f"{out} holds files that are no export: {others[0]} ({len(others)} in all)",
            hint="choose an empty folder",
        )


def refuse_strays(out: Path, format: str, listed: Container[str] | None = None) -> None:
    """Nothing lies in an export that its readers would take for a part of it."""
    found = shards.strays(out, format, listed)
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ForeignArtefactError(
            f"{out} holds {found[0]}{more}, which is not of this export: readers would take it for data",
            hint="move it elsewhere",
        )


def held_key(out: Path, overwrite: bool) -> dict[str, Any]:
    """What the folder says of its export; empty where it cannot be read and is to be replaced."""
    try:
        held = files.read_json(shards.key_path(out))
        if isinstance(held, dict):
            return held
        raise FormatError(f"{shards.key_path(out)} is no object")
    except FormatError as error:
        if overwrite:
            return {}
        raise FormatError(error.message, hint="write the export anew with overwrite=True") from None


def put_key(out: Path, key: dict[str, Any], job: Job) -> None:
    """Write the key and where plan and source are, before anything else; of several writers one does."""
    path = shards.key_path(out)
    if not _is_there(shards.hidden(out, "origin.json")):
        _put_origin(out, job)
    if path.is_file():
        return
    text = files.canonical_json(key).decode("ascii") + "\n"
    if not files.publish_new(path, text):
        refuse_foreign(out, key, overwrite=False)


def _is_there(origin: Path) -> bool:
    """Does it name a plan that is still there?"""
    try:
        return os.path.isdir(place_of(files.read_json(origin)["plan"]))
    except (FormatError, KeyError, TypeError):
        return False


def _put_origin(out: Path, job: Job) -> None:
    lengths = job.lengths_folder
    origin: dict[str, Any] = {
        "plan": _told(job.plan_folder),
        "lengths": None if lengths is None else _told(lengths),
    }
    if lengths is not None and (lengths / "origin.json").is_file():
        measured = files.read_json(lengths / "origin.json")
        origin.update({name: measured[name] for name in ("inputs",) if name in measured})
    files.publish_json(shards.hidden(out, "origin.json"), origin_of(origin))


def _told(folder: Path) -> str:
    """A folder as it is kept: by its URL where it has one."""
    return told_url(folder) or str(folder)


def forget_unbegun(out: Path, key: dict[str, Any]) -> None:
    """A refused export that wrote no part leaves nothing: the corrected command needs no --overwrite."""
    hidden = shards.hidden(out)
    if not any(name.startswith(("part-", "shard-")) for name in entries(hidden)):
        clear_other(out)
        files.remove(shards.hidden(out, "origin.json"))


def clear_other(out: Path) -> None:
    """Remove an export; its key goes last, so that a stopped removal is gone on with."""
    if not shards.is_export(out):
        return
    files.remove(shards.hidden(out, shards.EXPORT))
    for path in sorted(shards.hidden(out).glob("part-*.json")):
        files.remove(path)
    ours = shards.patterns(str(held_key(out, True).get("format")))
    for path in [out / name for name in entries(out)]:
        if path.name.startswith(_BEGINNINGS) or (ours is not None and ours[1].fullmatch(path.name)):
            (files.remove_tree if path.is_dir() else files.remove)(path)
    files.remove_tree(out / ".nv-meta")
    files.remove_tree(shards.hidden(out, "plan"))
    files.remove(shards.key_path(out))
