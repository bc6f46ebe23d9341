"""One measurement spread over the tasks of an array job, each with a work folder of its own.

    OUT/shard_00003_of_00008/partial/     the parts of task 3, as in any measurement
    OUT/shard_00003_of_00008/shard.json   marker: range, key, template, media root, files with their SHA-256

Tasks never write to the same file and need not run at the same time. `merge` checks that all shards are
there, finished, of one measurement and as their markers say, and publishes what a single run would have
published, byte for byte; it needs neither the source nor the processor. The shard folders go last, so a
stopped merge is simply run again.
"""

from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import extend, files
from ..checks import check_shard
from ..errors import ChecksumError, ForeignArtefactError, FormatError, InputError
from ..measuring.run import CUT
from ..planning.lengths import Lengths
from ..remote.outputs import output
from ..store import lengths as lengths_store
from ..store import parts
from ..store._folders import refuse_other_kind
from .publish import Identity, Measurement, Progress, origin_of, publish

_log = logging.getLogger(__name__)

SCHEMA = "packtrain.shard/1"
MARKER = "shard.json"

_NAME = re.compile(r"shard_(\d{5,})_of_(\d{5,})")
_SHOWN = 5  # shards named in a message


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The ids start .. stop - 1: number `number` (from 0) of `of` shards."""

    folder: Path
    number: int
    of: int
    start: int
    stop: int


def measure_shard(
    source: extend.Source,
    template: extend.Template,
    out: str | Path,
    shard: tuple[int, int],
    *,
    executor: str = "local",
    executor_options: dict[str, Any] | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    persist_every: int | None = None,
    origin: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Shard:
    """Measure one of several shards of a source, resumable, into its work folder below `out`.

    Args:
        source: as for `measure`; every task opens the same one.
        template: as for `measure`.
        out: the lengths folder that `merge` will complete.
        shard: (number from 0, how many).
        overwrite: measure this shard anew, whatever `out` holds.
        executor, executor_options, workers, persist_every, origin, progress: as for `measure`.

    Raises:
        InputError: no such shard.
        ForeignArtefactError: `out` holds lengths, or this shard, of another source or template.
    """
    check_shard(*shard)
    who = (executor, executor_options or {}, workers, persist_every, progress)
    job = Measurement(source, template, *who, origin)
    with output(out) as whole:
        refuse_other_kind(whole, lengths_store.MARKER)
        return _measured(job, whole, shard, overwrite=overwrite)


def _measured(job: Measurement, out: Path, shard: tuple[int, int], *, overwrite: bool) -> Shard:
    """The shard in its folder below `out`, which is there or is made."""
    (number, of), total, identity = shard, len(job.source), job.identity
    folder = out / f"shard_{number:05d}_of_{of:05d}"
    made = Shard(
        folder=folder, number=number, of=of, start=number * total // of, stop=(number + 1) * total // of
    )
    if overwrite:
        files.remove(folder / MARKER)
        parts.clear_parts(folder)
    elif (out / lengths_store.MARKER).is_file():
        _refuse_other(out, lengths_store.read(out)[1].get("key") or {}, identity.key)
        _log.info("%s is merged already", out)
        return made
    key = {**identity.key, "shard": [number, of]}
    done, unlike = parts.open_parts(folder, key, made.start)
    if unlike is not None:
        raise ForeignArtefactError(
            f"{folder} holds a shard of another {unlike}",
            hint="choose another folder, or measure the shards anew with overwrite=True",
        )
    if done == made.stop and (folder / MARKER).is_file():
        return made
    for part in parts.guarded(folder, job.parts(done, made.start, made.stop)):
        parts.add_part(folder, part)
    marker = {
        "schema": SCHEMA,
        "shard": [number, of],
        "range": [made.start, made.stop],
        "identity": asdict(identity),
        "files": _described(folder, made.start),
        "origin": origin_of(job.origin),
    }
    files.remove_leftovers(folder)
    files.publish_json(folder / MARKER, marker)
    return made


def shard_lengths(shard: Shard) -> Lengths:
    """The lengths of a finished shard alone; entry 0 is its first id."""
    paths = parts.finished(shard.folder, shard.start)
    whole = parts.read_arrays(paths)
    reasons = {i - shard.start: reason for i, reason, _ in parts.reason_rows(paths) if reason != CUT}
    return Lengths(whole.tokens, whole.costs, whole.status, reasons)


def merge(out: str | Path, *, overwrite: bool = False) -> Lengths:
    """Join the shards below `out` into its lengths and remove them.

    Args:
        out: the folder the tasks were given.
        overwrite: replace lengths of another measurement that `out` holds.

    Raises:
        InputError: a shard is missing or not finished, or shards do not fit together; names them.
        ForeignArtefactError: shards, or lengths in `out`, are of another measurement.
        ChecksumError: a file of a shard is not what its marker says.
    """
    with output(out) as folder:
        return _merged(folder, overwrite)


def _merged(folder: Path, overwrite: bool) -> Lengths:
    found = sorted(_folders(folder))
    held = lengths_store.read(folder)[1].get("key") if (folder / lengths_store.MARKER).is_file() else None
    if held is not None and all(_key(place) in (held, None) for _, _, place in found):
        for _, _, place in found:  # merged before; only the tidying up was stopped
            _clear(place)
        return Lengths.load(folder)
    if not found:
        raise FormatError(
            f"{folder} holds no shards",
            hint="name the folder given to packtrain measure --shard, or to packtrain export --shard",
        )
    refuse_other_kind(folder, lengths_store.MARKER)
    markers = _checked(folder, found)
    identity = Identity(**markers[0]["identity"])
    if held is not None and not overwrite:
        _refuse_other(folder, held, identity.key)
    places = [place for _, _, place in found]
    paths = [path for held in map(_verified, places, markers) for path in held]
    publish(folder, paths, identity, media=parts.media_rows(paths), origin=markers[0]["origin"] | origin_of())
    parts.clear_parts(folder)
    for place in places:
        _clear(place)
    return Lengths.load(folder)


# --------------------------------------------------------------------------------------------
def _folders(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """(number, how many, work folder) of every shard that was begun."""
    for path in folder.glob("shard_*_of_*"):
        name = _NAME.fullmatch(path.name)
        if name is not None and path.is_dir():
            yield int(name[1]), int(name[2]), path


def _key(place: Path) -> dict[str, Any] | None:
    """The key a shard was measured under; None for an empty folder."""
    if (place / MARKER).is_file():
        return dict(_marker(place)["identity"]["key"])
    stored = parts.key_of(place)
    return None if stored is None else {name: stored[name] for name in stored if name != "shard"}


def _marker(place: Path) -> dict[str, Any]:
    """The marker of a shard; FormatError where it was edited."""
    from pydantic import TypeAdapter

    path, again = place / MARKER, "measure this shard again with overwrite=True"
    told = files.read_json(path)
    with files.reading(path, "the marker of a shard", again):
        if told["schema"] != SCHEMA:
            raise FormatError(f"{path} has schema {told['schema']!r}, expected {SCHEMA!r}")
        identity = TypeAdapter(Identity).validate_python(told["identity"])
        first, last = map(operator.index, told["range"])
        held = {name: (operator.index(size), str(sha)) for name, (size, sha) in told["files"].items()}
        key, origin = dict(identity.key), dict(told["origin"])
        if not 0 <= first <= last <= operator.index(key["samples"]) or any(map(os.path.dirname, held)):
            raise FormatError(f"{path} names ids or files that a shard does not have", hint=again)
    return {**told, "identity": asdict(identity), "range": [first, last], "files": held, "origin": origin}


def _checked(folder: Path, found: list[tuple[int, int, Path]]) -> list[dict[str, Any]]:
    """The markers of the shards, in order, when they are one whole measurement."""
    counts = sorted({of for _, of, _ in found})
    if len(counts) > 1:
        told = " and ".join(f"{sum(of == n for _, of, _ in found)} of {n}" for n in counts)
        raise ForeignArtefactError(
            f"{folder} holds shards of different measurements: {told}",
            hint="remove the folders shard_*_of_* that are not meant",
        )
    there = {number for number, _, _ in found}
    missing = [f"{number}/{counts[0]}" for number in range(counts[0]) if number not in there]
    open_ = [f"{n}/{of}" for n, of, place in found if not (place / MARKER).is_file()]
    if missing or open_:
        told = "; ".join(
            f"{what}: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''} ({len(names)} in all)"
            for what, names in (("missing", missing), ("not finished", open_))
            if names
        )
        raise InputError(
            f"{folder} lacks shards: {told}",
            hint=f"run packtrain measure with --shard {(missing + open_)[0]} again: it goes on where it was",
        )
    markers = [_marker(place) for _, _, place in found]
    reached, first = 0, markers[0]
    for (number, of, _), marker in zip(found, markers, strict=True):
        key = marker["identity"]["key"]
        differs = [name for name, value in first["identity"]["key"].items() if key.get(name) != value]
        if differs:
            raise ForeignArtefactError(
                f"shard {number}/{of} is of another {', '.join(differs)} than shard {found[0][0]}/{of}",
                hint="measure it again with overwrite=True",
            )
        start, stop = marker["range"]
        if start != reached or (number == of - 1 and stop != key["samples"]):
            raise ForeignArtefactError(
                f"shard {number}/{of} holds the ids {start} to {stop - 1}, expected them from {reached} on"
                f" and {key['samples']} in all"
            )
        reached = stop
    return markers


def _described(folder: Path, start: int) -> dict[str, list[Any]]:
    """Size and SHA-256 of every file of the finished parts."""
    named = [p for path in parts.finished(folder, start) for p in (path, path.with_suffix(".media"))]
    return {path.name: [path.stat().st_size, files.sha256_file(path)] for path in named}


def _verified(place: Path, marker: dict[str, Any]) -> list[Path]:
    """The parts of a shard, each file as its marker says."""
    start, stop = marker["range"]
    for name, (size, digest) in sorted(marker["files"].items()):
        path = place / "partial" / name
        there = path.is_file()
        if not there or path.stat().st_size != size or files.sha256_file(path) != digest:
            raise ChecksumError(
                f"{path} is {f'not what {MARKER} says' if there else 'missing'}",
                hint="measure this shard again with overwrite=True",
            )
    paths = parts.finished(place, start)
    listed = [path for path in paths if path.name in marker["files"]]
    if sum(name.endswith(".npz") for name in marker["files"]) != len(listed) or len(listed) != len(paths):
        raise ChecksumError(
            f"{place} does not hold the ids {start} to {stop - 1} that {MARKER} lists",
            hint="measure this shard again with overwrite=True",
        )
    return paths


def _clear(place: Path) -> None:
    """Remove a shard's work folder; its marker goes last."""
    parts.clear_parts(place)
    files.remove_leftovers(place)
    files.remove(place / MARKER)
    place.rmdir()


def _refuse_other(folder: Path, held: dict[str, Any], key: dict[str, Any]) -> None:
    differs = [name for name in key if held.get(name) != key[name]]
    if differs:
        raise ForeignArtefactError(
            f"{folder} holds lengths of another {', '.join(differs)}",
            hint="choose another folder, or replace them with overwrite=True",
        )
