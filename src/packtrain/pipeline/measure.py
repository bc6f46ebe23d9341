"""Measure a source once, in parallel and resumable, into a lengths folder.

The folder's marker is `lengths.json`; until it is there, finished ranges lie in `partial/` (see
`store.parts`), so a stopped measurement goes on where it was. Ranges are cut by id and written back by
id: the bytes of the folder depend on the source and the template only, never on workers or stops.
A folder that holds another source or template is refused, naming what differs; one that holds an earlier
state of a source that has grown is brought up to date on request (`append`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import extend, files
from ..checks import whole
from ..errors import ForeignArtefactError, FormatError, InputError, SourceError
from ..measuring.audit import audit_hints
from ..measuring.encoding import no_template
from ..measuring.run import CUT, MediaRow, Part, measure_range, walk_media
from ..moved import also_named
from ..planning.lengths import Lengths
from ..remote.outputs import clearing_up, output
from ..store import lengths as lengths_store
from ..store import parts
from ..store._folders import refuse_other_kind
from ..waiting.claim import PLACE, Claim, alone
from .publish import (
    KEYS,
    REFUSED,
    Identity,
    Measurement,
    Progress,
    UnreadKeys,
    cut,
    details,
    may_have_grown,
    origin_of,
    publish,
    read_keys,
    read_layout,
    refuse_changed_media,
    refuse_media,
    refuse_unread,
)

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


# --------------------------------------------------------------------------------------------
# Lengths of a grown source: what was measured before is copied, only the rest is measured
# --------------------------------------------------------------------------------------------
# The result has the bytes of a fresh measurement. New parts lie in `partial/`, as those of any measurement;
# the new lengths are written whole into `next/` and then exchanged for the old ones, which stay as they are
# until that moment. The exchange takes out the old marker, moves the files and brings the new marker last; a
# stop in between is finished by the next run (`finish_exchange`). So readers find the old lengths, the new
# ones, or for the time of some renames none: never a mixture.
#
# Media: where the source has only grown, the old table is merged with the rows of what is new. Otherwise the
# media of copied ids are identified again, without measuring; media of files that left do not matter.
_NEXT = "next"


def append_lengths(folder: Path, job: Measurement, *, verify_content: bool = False) -> None:
    """Bring the lengths in `folder` up to date with the source.

    The caller has made sure that the template is the same.

    Raises:
        ForeignArtefactError: the source is not the measured one grown, or media of ids that would be copied
            have changed; the folder stays as it is.
    """
    identity, samples = job.identity, len(job.source)
    lengths, marker = lengths_store.verify(folder), lengths_store.read(folder)[1]
    before = read_layout(folder)
    if before is None or before["fingerprint"] != marker["key"]["source"]:
        raise ForeignArtefactError(
            f"{folder} does not say which files its ids come from",
            hint="only a JSONL file or a source of several files can grow; measure again with overwrite=True",
        )
    old = _Old(folder, lengths)
    pieces = _pieces(folder, before, job.source, identity, old)
    grown = is_whole(before, pieces)
    if grown:
        refuse_changed_media(folder, identity, verify_content)
    key = {**identity.key, "from": marker["fingerprint"]}
    everything = {**key, "everything": True}
    if parts.key_of(folder) == everything:
        pieces, grown, key = [Piece(0, samples, None)], False, everything
    _measure(folder, job, pieces, grown, old, key)
    paths = parts.finished(folder)
    if not grown and set(lengths.costs) - set(parts.read_arrays(paths).costs):
        # A cost that is 0 wherever it was copied: only measuring tells whether these samples have it.
        _log.warning("%s: a cost was in changed files only; measuring all files", folder)
        _measure(folder, job, [Piece(0, samples, None)], False, old, everything)
        paths = parts.finished(folder)
    media = parts.media_rows(paths)
    if grown:
        media = parts.merged(lengths_store.read_media(folder), media)
    clear_next(folder)
    before_keys = read_keys(folder) if grown else {}
    publish(folder / _NEXT, paths, identity, media=media, origin=origin_of(job.origin), keys=before_keys)
    _exchange(folder)
    parts.clear_parts(folder)


def finish_exchange(folder: Path) -> None:
    """Finish an exchange that was stopped after the old marker had gone."""
    if (folder / _NEXT / lengths_store.MARKER).is_file() and not (folder / lengths_store.MARKER).exists():
        _exchange(folder)
        parts.clear_parts(folder)


def clear_next(folder: Path) -> None:
    """Remove new lengths that were not exchanged for the old ones."""
    place = folder / _NEXT
    if place.is_dir():
        files.remove(place / lengths_store.MARKER)
        for path in sorted(place.iterdir()):
            files.remove(path)
        place.rmdir()


# --------------------------------------------------------------------------------------------
class _Old:
    """What was measured before, by range of ids."""

    def __init__(self, folder: Path, lengths: Lengths) -> None:
        self.lengths = lengths
        self.details = details(folder)
        self.faults = sorted({*lengths.reasons, *self.details})
        self.folder = folder
        self._media: NDArray[np.uint64] | None = None

    def faulty(self, start: int, stop: int) -> bool:
        return bisect_left(self.faults, start) < bisect_left(self.faults, stop)

    def check_media(self, rows: list[MediaRow]) -> None:
        """ForeignArtefactError when a medium is not what was measured before."""
        if self._media is None:  # 8 bytes a medium
            held = array("Q", map(_row_digest, lengths_store.read_media(self.folder)))
            self._media = np.sort(np.asarray(held, dtype=np.uint64), kind="stable")
        for row in rows:
            place = int(np.searchsorted(self._media, np.uint64(_row_digest(row))))
            if place == len(self._media) or int(self._media[place]) != _row_digest(row):
                refuse_media(self.folder, [row[0]])

    def part(self, piece: Piece, start: int, stop: int, *, zeros: bool) -> Part:
        """The ids [start, stop) of a copied piece; costs that are all 0 only with `zeros`."""
        assert piece.old is not None
        shift = start - piece.start + piece.old
        place = slice(shift, shift + stop - start)
        costs = {name: values[place].astype(np.int64) for name, values in self.lengths.costs.items()}
        faults = self.faults[bisect_left(self.faults, place.start) : bisect_left(self.faults, place.stop)]
        return Part(
            start=start,
            stop=stop,
            tokens=self.lengths.tokens[place].astype(np.int64),
            status=np.array(self.lengths.status[place]),
            costs={name: values for name, values in costs.items() if zeros or values.any()},
            told=[
                (i - shift + start, self.lengths.reasons.get(i, CUT), self.details.get(i, "")) for i in faults
            ],
        )


def _row_digest(row: MediaRow) -> int:
    return int.from_bytes(hashlib.sha256(files.canonical_json(row)).digest()[:8], "little")


def _pieces(
    folder: Path, before: dict[str, Any], source: extend.Source, identity: Identity, old: _Old
) -> list[Piece]:
    found: list[Piece] = []
    if identity.layout is not None and may_have_grown(before, identity.layout):
        found = pieces_of(before, source, identity.layout, old.faulty)
    kept = sum(piece.stop - piece.start for piece in found if piece.old is not None)
    if not kept:
        raise ForeignArtefactError(
            f"{folder} holds lengths of a source that this one did not grow from: none of its files is the "
            "same (a single JSONL file may have got more lines)",
            hint="choose another folder, or measure again with overwrite=True",
        )
    _log.info("%s: %d of %d samples were measured before", folder, kept, len(source))
    return found


def _measure(
    folder: Path, job: Measurement, pieces: list[Piece], grown: bool, old: _Old, key: dict[str, Any]
) -> None:
    """Add the parts of all pieces that are not there yet."""
    done, unlike = parts.open_parts(folder, key)
    if unlike is not None:  # parts of another state of the source: the lengths themselves are not touched
        parts.clear_parts(folder)
        done, _ = parts.open_parts(folder, key)
    for part in job.gathered(_results(job, pieces, grown, old, done), 0, len(job.source)):
        parts.add_part(folder, part)


def _results(job: Measurement, pieces: list[Piece], grown: bool, old: _Old, done: int) -> Iterator[Part]:
    """Parts of all ids from `done` on, in order: measured, or copied."""
    todo: list[tuple[Piece, int, int]] = []
    for piece in pieces:
        start = max(done, piece.start)
        step = job.size(len(job.source)) if grown and piece.old is not None else None
        todo += [(piece, *edges) for edges in cut(start, piece.stop, step)] if start < piece.stop else []
    ranges = [(start, stop) for piece, start, stop in todo if piece.old is None or not grown]
    context = (job.source, job.template, pieces)
    answers = job.map(_measured_or_walked, ranges, context) if ranges else iter(())
    for piece, start, stop in todo:
        if piece.old is None:
            yield next(answers)
            continue
        part = old.part(piece, start, stop, zeros=grown)
        if not grown:
            part.media, part.keys = next(answers)
            old.check_media(part.media)
        yield part


def _measured_or_walked(
    context: tuple[extend.Source, extend.Template, list[Piece]], shard: tuple[int, int]
) -> Part | tuple[list[MediaRow], dict[str, int]]:
    """Work function: a measured range, or only the media and keys of one that is copied."""
    source, template, pieces = context
    piece = pieces[bisect_right(pieces, shard[0], key=lambda piece: piece.start) - 1]
    return measure_range((source, template), shard) if piece.old is None else walk_media(source, shard)


def _exchange(folder: Path) -> None:
    """Move the whole lengths in `next/` to their place; the marker comes last."""
    place = folder / _NEXT
    marker = files.read_json(place / lengths_store.MARKER)
    arrays = marker.get("arrays") if isinstance(marker, dict) else None
    if not isinstance(arrays, dict):
        raise FormatError(f"{place / lengths_store.MARKER} is torn", hint="remove the folder, run it again")
    files.remove(folder / lengths_store.MARKER)
    if not (place / KEYS).is_file():
        files.remove(folder / KEYS)
    wanted = {f"{stem}.npy" for stem in arrays} | {"media_stat.npy"}
    for path in sorted(folder.glob("*.npy")):
        if path.name not in wanted:
            files.remove(path)
    for path in sorted(place.iterdir(), key=lambda path: (path.name == lengths_store.MARKER, path.name)):
        files.move(path, folder / path.name)
    place.rmdir()


# --------------------------------------------------------------------------------------------
# What of a grown or partly changed source was measured before: ids matched by the content of their files
# --------------------------------------------------------------------------------------------
# A file with the same content keeps its lengths wherever its ids have moved to. Where samples of it cannot
# be used their messages name the file, so a file that was renamed is then measured again. A single JSONL file
# may have got more lines: the SHA-256 of its first bytes must be that of the earlier file. Sources of several
# files have `shards`; a mixture or a folder of pairs has none and is measured anew.
@dataclass(frozen=True)
class Piece:
    """Ids start .. stop - 1: measured before under the ids from `old` on, or not at all (None)."""

    start: int
    stop: int
    old: int | None


def pieces_of(
    before: Mapping[str, Any],
    source: extend.Source,
    now: Mapping[str, Any],
    faulty: Callable[[int, int], bool],
) -> list[Piece]:
    """The ids of a source in order, in pieces that were measured before or were not.

    Args:
        before: the earlier layout.
        source: the source as it is now.
        now: its layout.
        faulty: whether any of the earlier ids [start, stop) cannot be used.
    """
    old, new = before["shards"], now["shards"]
    if len(old) == len(new) == 1 and old[0]["fingerprint"] != new[0]["fingerprint"]:
        return _longer(old[0], source, new[0], faulty)
    known: dict[str, list[Mapping[str, Any]]] = {}
    for shard in old:
        known.setdefault(shard["fingerprint"], []).append(shard)
    pieces: list[Piece] = []
    for shard in new:
        same = sorted(known.get(shard["fingerprint"], ()), key=lambda held: held["name"] != shard["name"])
        usable = (s for s in same if s["name"] == shard["name"] or not faulty(s["start"], s["stop"]))
        found = next(usable, None)
        if shard["stop"] > shard["start"]:
            pieces.append(Piece(shard["start"], shard["stop"], None if found is None else found["start"]))
    return pieces


def is_whole(before: Mapping[str, Any], pieces: list[Piece]) -> bool:
    """Whether every earlier sample is among the pieces: the source has only grown."""
    held = {piece.old for piece in pieces}
    if len(before["shards"]) == 1:
        return 0 in held
    return all(s["start"] in held for s in before["shards"] if s["stop"] > s["start"])


def _longer(
    old: Mapping[str, Any],
    source: Any,
    new: Mapping[str, Any],
    faulty: Callable[[int, int], bool],
) -> list[Piece]:
    """One JSONL file that may be the earlier one with more lines."""
    while hasattr(source, "source"):
        source = source.source
    count, begins = int(old["stop"]), getattr(source, "begins_with", None)
    same = old["name"] == new["name"] or not faulty(0, count)
    if same and begins is not None and "size" in old and begins(old["size"], old["sha256"], count):
        more = [Piece(count, new["stop"], None)] if new["stop"] > count else []
        return [Piece(0, count, 0), *more]
    return [Piece(0, new["stop"], None)]
