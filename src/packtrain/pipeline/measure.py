"""Measure a source once, in parallel and resumable, into a lengths folder.

The folder's marker is `lengths.json`; until it is there, finished ranges lie in `partial/` (see
`store.parts`), so a stopped measurement goes on where it was. Ranges are cut by id and written back by
id: the bytes of the folder depend on the source and the template only, never on workers or stops.
A folder that holds another source or template is refused, naming what differs; one that holds an earlier
state of a source that has grown is brought up to date on request (`append`, see `pipeline.append`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import extend, files
from ..checks import whole
from ..errors import ForeignArtefactError, InputError, SourceError
from ..measuring.audit import audit_hints
from ..measuring.encoding import no_template
from ..moved import also_named
from ..planning.lengths import Lengths
from ..remote.outputs import clearing_up, output
from ..store import lengths as lengths_store
from ..store import parts
from ..store._folders import refuse_other_kind
from ..waiting.claim import PLACE, Claim, alone
from .append import append_lengths, clear_next, finish_exchange
from .publish import (
    REFUSED,
    Identity,
    may_have_grown,
    origin_of,
    publish,
    read_layout,
    refuse_changed_media,
)
from .ranges import Measurement, Progress
from .unread import UnreadKeys, refuse_unread

_log = logging.getLogger(__name__)


@also_named("measure")
def measure(
    source: extend.Source,
    template: extend.Template,
    out: str | Path,
    *,
    executor: str = "local",
    executor_options: Mapping[str, Any] | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    append: bool = False,
    verify_content: bool = False,
    persist_every: int | None = None,
    origin: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Lengths:
    """The lengths of every sample of `source` under `template`, from metadata only.

    Args:
        source: indexable samples, such as a `ChatSource`.
        template: fills `extend.Template`; only its `measure` and `config` are used.
        out: the lengths folder. Complete and equal: opened. Complete and different: refused.
        executor: option name of an executor (`local`, `ray`).
        executor_options: further options of that executor, such as `address`.
        workers: processes; 1 = this process; None = this process for up to 2,048 samples (a worker takes
            seconds to start), else one per core.
        overwrite: replace the lengths that `out` holds.
        append: where `out` holds an earlier state of this source, measure only what is new or changed.
        verify_content: hash every media header again instead of trusting size and modification time.
        persist_every: samples per published part; None = max(4096, n / 128).
        origin: how to open the source and template again; kept beside the artefact, outside its digests.
        progress: called with (samples done, samples in all).

    Returns:
        `Lengths` with one entry per sample, memory-mapped from `out`.

    Raises:
        ForeignArtefactError: `out` holds lengths of another source, template or media.
        ChecksumError: a file of `out` changed since it was written.
        DriftError: the template trusts sizes given in the data, and some are not those of the media.
        SourceError: the source is empty, or changed while it was read.
        InputError: no sample at all can be used, too many hold keys that change training and are not read,
            or another process works in `out`.
    """
    _check_source(source)
    if not (hasattr(template, "measure") and hasattr(template, "config")) or isinstance(template, type):
        raise no_template(template)
    if workers is not None:
        whole("workers", workers, 1, hint="1 measures in this process")
    who = (executor, executor_options or {}, workers, persist_every, progress)
    job = Measurement(source, template, *who, origin)
    with output(out) as folder:
        return _measured(job, folder, overwrite=overwrite, append=append, verify_content=verify_content)


def _check_source(source: Any) -> None:
    """SourceError where no samples can be measured, with what makes a source of it."""
    who, why = type(source).__name__, ""
    if isinstance(source, str | Path):
        who, hint = f"the {who} {str(source)!r}", "packtrain.open_chats(path) opens a file of chats"
    elif hasattr(source, "measure") and not hasattr(source, "fingerprint"):
        why, hint = ", but measures one", "measure(source, template, out)"
    elif not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        why = ": samples must be indexable and counted"
        hint = "write a one-shot generator to a JSONL file first, and open that"
    elif not hasattr(source, "fingerprint"):
        who, why = f"a {who}", ": it has no fingerprint"
        hint = "packtrain.sources.chat.ChatSource(rows) makes one of records in memory"
    else:
        return
    raise SourceError(f"{who} is no source{why}", hint=hint)


#: Fields of the key by what people call them.
_FIELDS = {"samples": "number of samples"}


def refuse_other_source(folder: Path, source: extend.Source) -> None:
    """Before a template is loaded: lengths of another source are there, and stay.

    Raises:
        ForeignArtefactError: says so.
    """
    if (folder / REFUSED).is_file() or not (folder / lengths_store.MARKER).is_file():
        return
    identity = Identity.of_source(source)
    marker = lengths_store.read(folder)[1]
    if differs := _differences(marker, identity):
        raise _foreign(folder, marker, identity, differs)


def _measured(
    job: Measurement, folder: Path, *, overwrite: bool, append: bool, verify_content: bool
) -> Lengths:
    """The lengths in `folder`, which are there or are made."""
    refuse_other_kind(folder, lengths_store.MARKER)
    overwrite = overwrite or _was_refused(folder, job.identity)
    marker = folder / lengths_store.MARKER
    reads_only = marker.is_file() and not (folder / PLACE).exists() and not (overwrite or append)
    with contextlib.nullcontext() if reads_only else alone(folder) as claim:
        if overwrite:
            files.remove(marker)
            files.remove(folder / REFUSED)
            clear_next(folder)
            parts.clear_parts(folder)
        finish_exchange(folder)
        if marker.is_file():
            lengths, held = lengths_store.read(folder)
            differs = _differences(held, job.identity)
            if differs and append and differs <= {"samples", "source"}:
                append_lengths(folder, job, verify_content=verify_content)
                return Lengths.load(folder)
            if differs:
                raise _foreign(folder, held, job.identity, differs)
            refuse_changed_media(folder, job.identity, verify_content)
            lengths_store.verify(folder)
            _log.info("%s: lengths of %d samples are there", folder, len(lengths))
            with clearing_up():
                clear_next(folder)
                parts.clear_parts(folder)
            return lengths
        try:
            _measure_all(job, folder, claim)
        except UnreadKeys:
            parts.clear_parts(folder)  # the option that settles it makes another source
            raise
        paths = parts.finished(folder)
        try:
            publish(folder, paths, job.identity, media=parts.media_rows(paths), origin=origin_of(job.origin))
        except InputError:
            parts.clear_parts(folder)  # and so does whatever makes one sample usable
            raise
        with clearing_up():
            parts.clear_parts(folder)
        return Lengths.load(folder)


def _measure_all(job: Measurement, folder: Path, claim: Claim | None) -> None:
    """Publish the parts that are not measured yet."""
    if getattr(job.template, "trust_hints", False):
        audit_hints(job.source)
    total = len(job.source)
    done, unlike = parts.open_parts(folder, job.identity.key)
    if unlike is not None:
        raise ForeignArtefactError(
            f"{folder} holds an unfinished measurement of another {_FIELDS.get(unlike, unlike)}",
            hint="choose another folder, or start afresh with overwrite=True",
        )
    if done:
        _log.info("%s: %d of %d samples were measured before", folder, done, total)
    for part in parts.guarded(folder, job.parts(done, 0, total)):
        refuse_unread(part.told, total)  # early where one part says enough
        parts.add_part(folder, part)
        if claim is not None:
            claim.pulse()
            claim.check()


def _was_refused(folder: Path, identity: Identity) -> bool:
    """Does `folder` hold lengths of something else, of which too many samples could not be used?"""
    if not (folder / REFUSED).is_file() or not (folder / lengths_store.MARKER).is_file():
        return False
    marker = lengths_store.read(folder)[1]
    if not _differences(marker, identity):
        return False
    _log.info("%s: what was measured there was refused, and is measured anew", folder)
    return True


def _differences(marker: dict[str, Any], identity: Identity) -> set[str]:
    """Fields of the key in which what is stored differs."""
    stored = marker.get("key") or {}
    return {name for name in identity.key if stored.get(name) != identity.key[name]}


def _foreign(folder: Path, marker: dict[str, Any], identity: Identity, differs: set[str]) -> InputError:
    names = [name for name in identity.key if name in differs]
    before, now = marker.get("template") or {}, identity.template
    settings = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    words = {**_FIELDS, "template": f"template ({', '.join(settings)})"}
    names = [words.get(name, name) for name in names]
    hint = "choose another folder, or measure again with overwrite=True"
    if differs <= {"samples", "source"} and may_have_grown(read_layout(folder), identity.layout):
        hint = f"if the source has grown, append=True measures only what is new; else {hint}"
    return ForeignArtefactError(f"{folder} holds lengths of another {', '.join(names)}", hint=hint)
