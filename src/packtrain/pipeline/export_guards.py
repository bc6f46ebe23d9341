"""What an export may write to and from: its key, foreign content, a source that is still the measured one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import files
from ..errors import ForeignArtefactError
from ..export._job import Job
from ..planning.lengths import Lengths
from ..store import shards
from ..store.media import changed_media
from .publish import origin_of

__all__ = ["clear_other", "key_of", "put_key", "refuse_changed", "refuse_foreign"]


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
            f"the source changed since {job.lengths_folder} was measured: {len(job.source)} samples now, "
            f"{told.get('samples')} then",
            hint="measure and plan again, or restore the source",
        )
    if not (job.lengths_folder / "media.jsonl").is_file():
        return
    root = getattr(job.source, "media_root", None)
    changed = changed_media(job.lengths_folder, root, verify_content=verify_content)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ForeignArtefactError(
            f"media changed since {job.lengths_folder} was measured: {changed[0]}{more}",
            hint="restore them, or measure and plan again",
        )


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
    if not out.is_dir():
        return
    if shards.is_export(out):
        held = files.read_json(shards.key_path(out))
        differs = [name for name in key if held.get(name) != key[name]]
        if differs and not overwrite:
            raise ForeignArtefactError(
                f"{out} holds an export of another {', '.join(differs)}",
                hint="choose another folder, or replace it with --overwrite",
            )
        return
    others = [path.name for path in sorted(out.iterdir()) if path.name != shards.FOLDER]
    if others:
        raise ForeignArtefactError(
            f"{out} holds files that are no export: {others[0]} ({len(others)} in all)",
            hint="choose an empty folder",
        )


def put_key(out: Path, key: dict[str, Any], job: Job) -> None:
    """Write the key and where plan and source are, before anything else; of several writers one does."""
    path = shards.key_path(out)
    if path.is_file():
        return
    lengths = None if job.lengths_folder is None else str(job.lengths_folder)
    origin: dict[str, Any] = {"plan": str(job.plan_folder), "lengths": lengths}
    if lengths is not None and (Path(lengths) / "origin.json").is_file():
        measured = files.read_json(Path(lengths) / "origin.json")
        origin.update({name: measured[name] for name in ("inputs",) if name in measured})
    files.publish_json(shards.hidden(out, "origin.json"), origin_of(origin))
    text = files.canonical_json(key).decode("ascii") + "\n"
    if not files.publish_new(path, text):
        refuse_foreign(out, key, overwrite=False)


def forget_unbegun(out: Path, key: dict[str, Any]) -> None:
    """A refused export that wrote no part leaves no key: the corrected command needs no --overwrite."""
    hidden = shards.hidden(out)
    if not any(hidden.glob("part-*.json")) and not any(hidden.glob("shard-*")):
        clear_other(out, key)


def clear_other(out: Path, key: dict[str, Any]) -> None:
    """Remove an export; its key goes last, so that a stopped removal is gone on with."""
    if not shards.is_export(out):
        return
    files.remove(shards.hidden(out, shards.EXPORT))
    for path in sorted(shards.hidden(out).glob("part-*.json")):
        files.remove(path)
    for pattern in ("ps_*", "pack-*.tar*", "chunk_*", ".ps_*", ".pack-*", ".chunk_*"):
        for path in sorted(out.glob(pattern)):
            files.remove(path)
    files.remove_tree(out / ".nv-meta")
    files.remove_tree(shards.hidden(out, "plan"))
    files.remove(shards.key_path(out))
