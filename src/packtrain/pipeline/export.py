"""Export a plan: packs become files of a format, part by part, resumable, in parallel.

The key of the folder comes first, the marker last; between them every part is there with its manifest or is
written again. `shard=(i, n)` writes some of the parts, on as many machines as one likes; `finish_export` then
needs only the folder. What is written depends on plan, source, format and settings alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from .. import extend, files
from ..checks import check_shard, whole
from ..errors import (
    ConfigError,
    ForeignArtefactError,
    FormatError,
    InputError,
    SourceError,
    UnknownNameError,
    counted,
)
from ..export._job import Job
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan
from ..remote.copies import entries, opened, place_of
from ..remote.outputs import clearing_up, output, sending
from ..remote.places import spelled, told_url
from ..store import plans as plans_store
from ..store import shards
from ..store.lengths import changed_media
from ..store.pack_records import SPELLINGS, TASKS, task_of
from ..waiting.claim import alone
from .inputs import Inputs, lengths_of_plan, read_origin
from .publish import origin_of

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def export(
    plan_folder: str | Path,
    out: str | Path,
    *,
    format: str = "webdataset",
    task: str = "auto",
    maxcount: int = 1000,
    maxsize: int = 3_000_000_000,
    options: Mapping[str, Any] | None = None,
    source: extend.Source | None = None,
    template: extend.Template | None = None,
    shard: tuple[int, int] | None = None,
    executor: str = "local",
    executor_options: Mapping[str, Any] | None = None,
    workers: int | None = 1,
    overwrite: bool = False,
    verify_content: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the packs of a plan as files.

    Args:
        plan_folder: a plan, or its URL; it says where its lengths and source are.
        out: the folder to write, or its URL. Complete and equal: nothing is done. Of another plan: refused.
        format: `raw`, `webdataset`, `energon`, `chunks`, `mds`, `litdata`, `lance`, `datasets` or
            `megatron`.
        task: how plain readers take the samples: `captions`, `vqa`, `multi_turn`, or `auto`: the narrowest
            that holds all.
        maxcount: packs of a part and at most of a shard.
        maxsize: bytes after which the next pack opens a new shard.
        options: of the format: `prompts` (prompt, prompts), `layout` (packtrain, llava; of `megatron`:
            parquet, npy), `media`; `context_parallel` (ranks that share a row of `megatron`: samples are
            padded to a multiple of twice as many) and the `pad_token_id` that pads.
        source, template: instead of those that the plan names.
        shard: (number from 0, how many): only these parts; `finish_export` completes the folder.
        executor, executor_options, workers: as for `measure`.
        overwrite: replace another export in `out`.
        verify_content: hash the headers of all media instead of trusting size and time.
        progress: called with (packs done, packs in all).

    Returns:
        Figures: format, packs, samples, shards, bytes, task, and where.

    Raises:
        ForeignArtefactError: `out` holds something else, or the source changed since it was measured.
        DriftError: a sample encodes to another length than planned (`chunks`, `megatron`).
        InputError: a planned sample cannot be exported; it is named, and nothing stands in for it.
    """
    for name, value in (("maxcount", maxcount), ("maxsize", maxsize)):
        whole(name, value, 1)
    if shard is not None:
        check_shard(*shard)
    if workers is not None:
        whole("workers", workers, 1)
    write = partial(extend.lookup("execute", executor).map_shards, _write_one, workers=workers)
    with output(out) as place:
        module, settings = format_of(format, options or {}, place)
        job = _job(opened(plan_folder), place, format, module, source, template)
        refuse_changed(job, verify_content)
        job = replace(job, maxcount=maxcount, maxsize=maxsize, options=settings, task=_task(job, task))
        if hasattr(module, "check_job"):
            module.check_job(job)
        write = partial(write, context=job, **dict(executor_options or {}))
        return _exported(job, shard, overwrite, write, progress or (lambda done, total: None))


def _exported(
    job: Job,
    shard: tuple[int, int] | None,
    overwrite: bool,
    write: Callable[[list[int]], Iterable[int]],
    progress: Progress,
) -> dict[str, Any]:
    """Write what is not there of an export, or of a shard of it."""
    out, key = job.out, key_of(job)
    place = shards.hidden(out) if shard is None else shards.hidden(out, f"shard-{shard[0]}-of-{shard[1]}")
    refuse_foreign(out, key, overwrite)
    if (overwrite or not _is_made(job)) and hasattr(module := extend.lookup("export", job.format), "library"):
        module.library()  # not there: said before the other export goes
    with alone(place) as claim:
        refuse_foreign(out, key, overwrite)  # another run may have come and gone meanwhile
        if overwrite:
            clear_other(out)
        begins = not shards.is_export(out)
        put_key(out, key, job)
        if _is_made(job):
            return export_figures(out)
        chosen = range(job.parts)
        if shard is not None:
            chosen = range(shard[0] * job.parts // shard[1], (shard[0] + 1) * job.parts // shard[1])
        todo = _lacking(out, chosen)
        total = sum(len(job.packs_of(part)) for part in chosen)
        done = total - sum(len(job.packs_of(part)) for part in todo)
        try:
            for packs in write(todo):
                done += packs
                claim.pulse()
                claim.check()
                progress(done, total)
        except Exception:
            if begins and shard is None:
                claim.check()  # what another process writes by now is left alone
                with suppress(SourceError, OSError):  # what cannot be reached stays
                    shards.look_again(out)
                    forget_unbegun(out, key)
            raise
        if todo:
            refuse_meanwhile(job, todo)
        if shard is not None:
            told = {"format": job.format, "shard": list(shard), "parts": len(chosen)}
            return {"out": spelled(out), **told}
        shards.look_again(out)
        _finish(job)
    return export_figures(out)


def finish_export(out: str | Path) -> dict[str, Any]:
    """Complete an export whose parts were written as shards.

    Raises:
        InputError: parts are missing; names them.
    """
    with output(out) as place:
        return _finished(place)


def _finished(out: Path) -> dict[str, Any]:
    done = shards.hidden(out, shards.EXPORT).is_file()
    if done and not _lacking(out, range(int(shards.export_of(out)["parts"]))):
        return export_figures(out)
    if not shards.is_export(out):
        raise FormatError(f"{out} holds no export", hint="name the OUT of packtrain export --shard")
    key = files.read_json(shards.key_path(out))
    try:
        origin = files.read_json(shards.hidden(out, "origin.json"))
        plan_folder = opened(origin["plan"])
        PackPlan.load(plan_folder)
    except (FormatError, SourceError, KeyError, TypeError) as error:
        raise FormatError(
            f"{out} does not say where its plan is, or it is gone: {error}",
            hint="run packtrain export with any --shard again: it says so anew",
        ) from None
    job = Job(
        out=out,
        format=key["format"],
        plan_folder=plan_folder,
        lengths_folder=None if origin.get("lengths") is None else opened(origin["lengths"]),
        source=None,
        task=key["task"],
        maxcount=key["maxcount"],
        maxsize=key["maxsize"],
        options=key["options"],
    )
    if job.plan.checksum != key["plan"]:
        raise ForeignArtefactError(f"{job.plan_folder} holds another plan than {out} was begun with")
    if missing := _lacking(out, range(job.parts)):
        told = ", ".join(map(str, missing[:5])) + (" …" if len(missing) > 5 else "")
        raise InputError(
            f"{out} lacks {len(missing)} of {counted(job.parts, 'parts')}: {told}",
            hint="run packtrain export with the missing --shard again: it goes on where it was",
        )
    with alone(shards.hidden(out)):
        _finish(job)
    return export_figures(out)


def _write_one(job: Job, part: int) -> int:
    """Work function: one part and its manifest; returns its number of packs."""
    packs = job.packs_of(part)
    with sending(job.out):  # also in the process of a worker
        rows = extend.lookup("export", job.format).write_part(job, part)
        shards.publish_part(job.out, part, {"packs": [packs.start, packs.stop], "files": rows})
    return len(packs)


def format_of(name: str, given: Mapping[str, Any], out: Path | None = None) -> tuple[Any, dict[str, Any]]:
    """The module of a format, and its settings with the options that were given.

    Args:
        out: where an export goes on with the media that it was begun with.

    Raises:
        UnknownNameError, ConfigError: an option that it does not have or take.
    """
    module = extend.lookup("export", name)
    settings = dict(module.OPTIONS)
    if out is not None and "media" in settings and shards.is_export(out):  # begun with another default
        held = held_key(out, True).get("options")
        settings["media"] = (held if isinstance(held, dict) else {}).get("media", settings["media"])
    for option, value in given.items():
        if value is None:
            continue
        if option not in (known := [*module.OPTIONS, *getattr(module, "FURTHER", ())]):
            takes = ", ".join(f"{one}=…" for one in known)
            raise ConfigError(f"{name} takes no {option}={value!r}", hint=f"it takes {takes}")
        settings[option] = value
    if settings.get("prompts") not in (None, *SPELLINGS):
        raise UnknownNameError("prompts", str(settings["prompts"]), SPELLINGS)
    if hasattr(module, "check_options"):
        module.check_options(settings)
    return module, settings


def _job(plan_folder: Path, out: Path, name: str, module: Any, source: Any, template: Any) -> Job:
    if (plan_folder / "run.json").is_file():
        plan_folder = plan_folder / "plan"
    plans_store.undamaged(plan_folder)
    try:
        lengths: Path | None = lengths_of_plan(plan_folder)
    except FormatError:
        if source is None:
            raise
        lengths = None
    if source is None:
        inputs = Inputs.of_artefact(plan_folder)
        source = inputs.open_source()
        template = inputs.open_template(source) if module.needs_template else None
    if module.needs_template and template is None:
        raise InputError(f"format {name} needs a template", hint="pass template=")
    if getattr(source, "encoded", False) and not module.needs_template:
        raise InputError(
            f"the samples are encoded already: format {name} needs texts and media",
            hint="use format='chunks'",
        )
    return Job(
        out=out,
        format=name,
        plan_folder=plan_folder.absolute(),
        lengths_folder=None if lengths is None else lengths.absolute(),
        source=source,
        template=template,
    )


def _task(job: Job, asked: str) -> str:
    if asked != "auto":
        if asked not in TASKS:
            raise UnknownNameError("task", asked, ("auto", *TASKS))
        return asked
    if job.template is not None and extend.lookup("export", job.format).needs_template:
        return "multi_turn"
    found = "captions"
    for number in range(len(job.plan)):
        found = max(found, task_of(job.read(number).samples), key=TASKS.index)
        if found == TASKS[-1]:  # nothing is wider: no need to look further
            break
    return found


def _is_made(job: Job) -> bool:
    return shards.hidden(job.out, shards.EXPORT).is_file() and not _lacking(job.out, range(job.parts))


def _lacking(out: Path, parts: Iterable[int]) -> list[int]:
    """Those of `parts` that are not there with their files."""
    return [part for part in parts if shards.part_of(out, part) is None]


def _finish(job: Job) -> None:
    """Plan, metadata and marker, when all parts are there with their files."""
    if lost := _lacking(job.out, range(job.parts)):
        raise InputError(
            f"{job.out}: files of part {lost[0]} ({len(lost)} of {counted(job.parts, 'parts')}) were removed "
            "or changed while the export was at work",
            hint="run the same command again: it makes what is missing",
        )
    parts = shards.read_parts(job.out, job.parts)
    extra = extend.lookup("export", job.format).finish(job, parts)
    job.plan.save(shards.hidden(job.out, "plan"))
    rows = [row for part in parts for row in part["files"]]
    refuse_strays(job.out, job.format, {row["name"] for row in [*rows, *extra]})
    told = {
        "key": files.read_json(shards.key_path(job.out)),
        "parts": len(parts),
        "packs": len(job.plan),
        "samples": len(job.plan.indices),
        "tokens": int(job.plan.pack_tokens.sum()),
        "shards": sum("count" in row for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "files": extra,
    }
    hidden = shards.hidden(job.out)
    files.remove_leftovers(job.out)
    files.remove_leftovers(hidden)
    with clearing_up():
        for name in entries(hidden):
            if fnmatchcase(name, "shard-*-of-*"):
                files.remove_tree(hidden / name)  # claims of shares that were stopped
    shards.publish_export(job.out, told)


def export_figures(out: Path) -> dict[str, Any]:
    """What machines are told of a finished export."""
    told = shards.export_of(out)
    names = ("packs", "samples", "tokens", "shards", "bytes")
    key = told["key"]
    return {"out": spelled(out), "format": key["format"], "task": key["task"], **{n: told[n] for n in names}}


# --------------------------------------------------------------------------------------------
# What an export may write to and from: its key, foreign content, a source that is still the measured one
# --------------------------------------------------------------------------------------------
#: Of the names in an export, whatever its format; with a dot: what a stopped writer left.
_BEGINNINGS = ("ps_", "pack-", "chunk_", ".ps_", ".pack-", ".chunk_", ".version.")


def refuse_changed(job: Job, verify_content: bool) -> None:
    """The source and its media are what was measured, and the plan is of those lengths."""
    if job.lengths_folder is None:
        return
    folder, hint = job.lengths_folder, "restore them, or measure and plan again"
    digest = Lengths.load(folder).digest
    told = files.read_json(folder / "lengths.json").get("key") or {}
    if digest != job.plan.lengths_digest:
        why, hint = f"{job.plan_folder} was planned from other lengths than {folder}", "plan again"
    elif told.get("source") not in (None, job.source.fingerprint):
        then = f"{counted(len(job.source), 'samples')} now, {told.get('samples')} then"
        why = f"the source changed since {folder} was measured: {then}"
    elif changed := _changed(job, verify_content=verify_content):
        why = f"media changed since {folder} was measured: {changed}"
    else:
        return
    raise ForeignArtefactError(why, hint=hint)


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
    held, fault = None, f"{shards.key_path(out)} is no object"
    try:
        held = files.read_json(shards.key_path(out))
    except FormatError as error:
        fault = error.message
    if isinstance(held, dict):
        return held
    if overwrite:
        return {}
    raise FormatError(fault, hint="write the export anew with overwrite=True")


def put_key(out: Path, key: dict[str, Any], job: Job) -> None:
    """Write the key and where plan and source are, before anything else; of several writers one does."""
    path = shards.key_path(out)
    if not _is_there(shards.hidden(out, "origin.json")):
        _put_origin(out, job)
    text = files.canonical_json(key).decode("ascii") + "\n"
    if not path.is_file() and not files.publish_new(path, text):
        refuse_foreign(out, key, overwrite=False)


def _is_there(origin: Path) -> bool:
    """Does it name a plan that is still there?"""
    try:
        return os.path.isdir(place_of(files.read_json(origin)["plan"]))
    except (FormatError, KeyError, TypeError):
        return False


def _put_origin(out: Path, job: Job) -> None:
    lengths = job.lengths_folder
    told = None if lengths is None else _told(lengths)
    origin: dict[str, Any] = {"plan": _told(job.plan_folder), "lengths": told}
    if lengths is not None and "inputs" in (measured := read_origin(lengths)):
        origin["inputs"] = measured["inputs"]
    files.publish_json(shards.hidden(out, "origin.json"), origin_of(origin))


def _told(folder: Path) -> str:
    """A folder as it is kept: by its URL where it has one."""
    return told_url(folder) or str(folder)


def forget_unbegun(out: Path, key: dict[str, Any]) -> None:
    """A refused export that wrote no part leaves nothing: the corrected command needs no --overwrite."""
    if not any(name.startswith(("part-", "shard-")) for name in entries(shards.hidden(out))):
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
