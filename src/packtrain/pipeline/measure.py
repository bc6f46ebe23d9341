"""Measure a source once, in parallel and resumable, into a lengths folder.

The folder's marker is `lengths.json`; until it is there, finished ranges lie in `partial/` (see
`store.parts`), so a stopped measurement goes on where it was. Ranges are cut by id and written back by
id: the bytes of the folder depend on the source and the template only, never on workers or stops.
A folder that holds another source or template is refused, naming what differs.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import extend, files
from ..errors import ForeignArtefactError, InputError
from ..measuring.run import RangeResult, measure_range
from ..planning.lengths import STATUS_OK, Lengths
from ..store import lengths as lengths_store
from ..store import parts
from ..store.media import changed_media, save_media

__all__ = ["details", "measure", "origin_of"]

_log = logging.getLogger(__name__)

#: Samples a worker measures at once: small enough for progress and balance, large enough to batch.
UNIT = 256

#: Up to this many samples are measured in this process: a worker takes seconds to start.
SERIAL = 2048

#: What reads lengths of this folder must agree on; raised when equal inputs would give other lengths.
KEY_SCHEMA = 1

Progress = Callable[[int, int], None]


def measure(
    source: extend.Source,
    template: extend.Template,
    out: str | Path,
    *,
    executor: str = "local",
    workers: int | None = None,
    overwrite: bool = False,
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
        executor: option name of an executor (`local`).
        workers: processes; 1 = this process; None = this process for up to 2,048 samples (a worker takes
            seconds to start), else one per core.
        overwrite: replace the lengths that `out` holds.
        verify_content: hash every media header again instead of trusting size and modification time.
        persist_every: samples per published part; None = max(4096, n / 64).
        origin: how to open the source and template again; kept beside the artefact, outside its digests.
        progress: called with (samples done, samples in all).

    Returns:
        `Lengths` with one entry per sample, memory-mapped from `out`.

    Raises:
        ForeignArtefactError: `out` holds lengths of another source, template or media.
        SourceError: the source is empty, or changed while it was read.
        InputError: no sample at all can be used.
    """
    folder = Path(out)
    total = len(source)
    key = {
        "key_schema": KEY_SCHEMA,
        "samples": total,
        "source": source.fingerprint,
        "template": files.digest_json(template.config()),
    }
    if overwrite:
        files.remove(folder / lengths_store.MARKER)
        parts.clear_parts(folder)
    elif (folder / lengths_store.MARKER).is_file():
        stored = _reopen(folder, key, template, _root(source), verify_content)
        parts.clear_parts(folder)
        return stored
    done, differs = parts.open_parts(folder, key)
    if differs is not None:
        raise ForeignArtefactError(
            f"{folder} holds an unfinished measurement of another {differs}",
            hint="choose another folder, or start afresh with --overwrite",
        )
    if done:
        _log.info("%s: %d of %d samples were measured before", folder, done, total)
    every = persist_every or max(4096, -(-total // 64))
    ranges = [(start, min(start + UNIT, total)) for start in range(done, total, UNIT)]
    results = extend.lookup("execute", executor).map_shards(
        measure_range, ranges, workers=workers or _fitting(total - done), context=(source, template)
    )
    for part in _gathered(results, every, done, total, progress):
        parts.add_part(folder, part)
    _publish(folder, source, template, key, origin)
    parts.clear_parts(folder)
    return Lengths.load(folder)


def details(folder: str | Path) -> dict[int, str]:
    """One line for people per sample that cannot be used: where it stands and what is wrong."""
    path = Path(folder) / "details.jsonl"
    if not path.is_file():
        return {}
    with open(path, encoding="utf-8") as handle:
        return {int(i): str(text) for i, text in map(json.loads, handle)}


def origin_of(fields: dict[str, Any] | None = None) -> dict[str, Any]:
    """Where and when something was made: for `origin.json`, which no digest covers."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {**(fields or {}), "made": now, "machine": platform.node(), "folder": os.getcwd()}


def _gathered(
    results: Iterator[RangeResult], every: int, done: int, total: int, progress: Progress | None
) -> Iterator[parts.Part]:
    """Join ranges to parts of at least `every` samples."""
    waiting: list[parts.Part] = []
    for result in results:
        waiting.append(_part(result))
        if progress is not None:
            progress(result.stop, total)
        if result.stop - waiting[0].start >= every or result.stop == total:
            yield parts.joined(waiting)
            waiting = []


def _part(result: RangeResult) -> parts.Part:
    return parts.Part(
        start=result.start,
        stop=result.stop,
        tokens=result.tokens,
        status=result.status,
        costs=dict(result.costs),
        reasons=[(i, reason, result.details.get(i, "")) for i, reason in sorted(result.reasons.items())],
        media=list(result.media),
    )


def _publish(
    folder: Path,
    source: extend.Source,
    template: extend.Template,
    key: dict[str, Any],
    origin: dict[str, Any] | None,
) -> None:
    """Join the parts into the lengths folder; its marker comes last."""
    whole = parts.read_parts(folder)
    if len(whole.status) and not (whole.status == STATUS_OK).any():
        first = whole.reasons[0]
        raise InputError(
            f"none of the {len(whole.status):,} samples can be used; the first: {first[1]}: {first[2]}",
            hint="check the processor, the columns and the media folder",
        )
    lengths = Lengths(whole.tokens, whole.costs, whole.status, {i: reason for i, reason, _ in whole.reasons})
    files.remove(folder / lengths_store.MARKER)
    media = save_media(folder, parts.media_rows(folder), _root(source))
    lines = (json.dumps([i, text], ensure_ascii=False) + "\n" for i, _, text in whole.reasons)
    files.publish_text(folder / "details.jsonl", "".join(lines))
    lengths_store.save(
        lengths,
        folder,
        fingerprint=files.digest_json({**key, "media": media}),
        template=template.config(),
        fields={"key": key, "media": media},
        origin=origin_of(origin),
    )


def _reopen(
    folder: Path, key: dict[str, Any], template: extend.Template, root: str | None, verify_content: bool
) -> Lengths:
    """The lengths of a complete folder, when they are those of `key` and its media are unchanged."""
    lengths, marker = lengths_store.read(folder)
    stored = marker.get("key") or {}
    differs = [name for name in key if stored.get(name) != key[name]]
    if differs:
        if "template" in differs:
            differs[differs.index("template")] = _named(marker.get("template") or {}, template.config())
        raise ForeignArtefactError(
            f"{folder} holds lengths of another {', '.join(differs)}",
            hint="choose another folder, or measure again with --overwrite",
        )
    changed = changed_media(folder, root, verify_content=verify_content)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ForeignArtefactError(
            f"{folder} was measured from other media: {changed[0]}{more} changed since",
            hint="measure again with --overwrite",
        )
    _log.info("%s: lengths of %d samples are there", folder, len(lengths))
    return lengths


def _named(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Which settings of the template differ."""
    names = [name for name in sorted(set(before) | set(now)) if before.get(name) != now.get(name)]
    return f"template ({', '.join(names)})"


def _root(source: extend.Source) -> str | None:
    root = getattr(source, "media_root", None)
    return None if root is None else os.fspath(root)


def _fitting(samples: int) -> int | None:
    return 1 if samples <= SERIAL else None
