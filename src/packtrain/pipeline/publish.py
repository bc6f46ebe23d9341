"""Parts become a lengths folder: arrays joined by id, reasons and media merged by streaming, the marker last.

Whoever measured the parts (one process, the tasks of an array job, an earlier run) does not show in the
bytes. `source.json` says which files the ids come from; like `origin.json` it is outside every digest, and
lets a grown source be recognised. `keys.json` holds the counts of the account (`sources._account`): keys that
nothing reads, and spellings that were read as a field; it is absent where there is nothing to tell.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import extend, files
from ..errors import ForeignArtefactError, InputError, PlanError, counted, told_with_hint
from ..measuring.run import CUT, MediaRow, Part, measure_range
from ..planning.lengths import STATUS_OK, Lengths
from ..remote.outputs import output
from ..sources._account import UNREAD, check_share
from ..sources._account import UnreadKeys as UnreadKeys
from ..sources._account import told as told
from ..store import lengths as lengths_store
from ..store import parts
from ..store.lengths import changed_media, save_media

#: File that holds the counts of keys that nothing read.
KEYS = "keys.json"

#: File that says which files the ids come from.
LAYOUT = "source.json"

#: Lies in a lengths folder of which too many samples could not be used; other lengths may take its place.
REFUSED = "refused.json"

#: What reads lengths of this folder must agree on; raised when equal inputs would give other lengths.
_KEY_SCHEMA = 1


def layout_of(source: extend.Source) -> dict[str, Any] | None:
    """The layout of a source: its fingerprint, options and files; None when its ids are not of files."""
    inner: Any = source
    options: list[Any] = []
    while callable(getattr(inner, "fields", None)) and isinstance(
        getattr(inner, "source", None), extend.Source
    ):
        if len(inner.source) != len(source):
            return None
        options.append({name: value for name, value in inner.fields().items() if name != "source"})
        inner = inner.source
    shards = getattr(inner, "shards", None)
    if shards is None or not callable(getattr(inner, "fields", None)):
        return None
    fields = dict(inner.fields())
    held = fields.get("files") or []
    rows = [{"name": s.name, "start": s.start, "stop": s.stop, "fingerprint": s.fingerprint} for s in shards]
    if len(rows) == 1 and len(held) == 1:
        rows[0].update(held[0])
    options.append({n: value for n, value in fields.items() if n not in ("files", "records", "shards")})
    return {"fingerprint": source.fingerprint, "options": options, "shards": rows}


def read_layout(folder: Path) -> dict[str, Any] | None:
    """The layout stored beside lengths; None where there is none."""
    path = folder / LAYOUT
    return dict(files.read_json(path)) if path.is_file() else None


def may_have_grown(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> bool:
    """Whether two layouts are of sources read in the same way."""
    return before is not None and now is not None and before["options"] == now["options"]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What lengths are of, as plain JSON.

    Attributes:
        key: schema, number of samples, fingerprint of the source, digest of the template's config.
        template: `Template.config()`.
        root: folder or URL of relative media names, or None.
        layout: `layout_of` the source, or None.
    """

    key: dict[str, Any]
    template: dict[str, Any]
    root: str | None
    layout: dict[str, Any] | None

    @classmethod
    def of(cls, source: extend.Source, template: extend.Template) -> Identity:
        config = template.config()
        found = cls.of_source(source)
        return replace(found, key={**found.key, "template": files.digest_json(config)}, template=config)

    @classmethod
    def of_source(cls, source: extend.Source) -> Identity:
        """All but the template."""
        root = getattr(source, "media_root", None)
        return cls(
            key={"key_schema": _KEY_SCHEMA, "samples": len(source), "source": source.fingerprint},
            template={},
            root=None if root is None else os.fspath(root),
            layout=layout_of(source),
        )


def publish(
    folder: Path,
    paths: Sequence[Path],
    identity: Identity,
    *,
    media: Iterable[MediaRow],
    origin: dict[str, Any] | None,
    keys: Mapping[str, int] | None = None,
) -> None:
    """Write the lengths folder of finished parts.

    Args:
        folder: gets the lengths; what it holds is replaced.
        paths: the parts of all ids, in order.
        identity: what was measured.
        media: every media row, ascending, each once.
        origin: how to open the inputs again, when and where this was made.
        keys: counts of keys beside those of the parts.

    Raises:
        InputError: no sample at all can be used; too many hold keys that change training and are not read.
    """
    whole = parts.read_arrays(paths)
    refuse_unread(parts.reason_rows(paths), len(whole.status))
    if len(whole.status) and not (whole.status == STATUS_OK).any():
        _, reason, detail = next(parts.reason_rows(paths))
        said, hint = told_with_hint(detail)
        if reason == "missing_media":
            hint = "media_root names the folder of relative media paths"
        raise InputError(
            f"none of the {counted(len(whole.status), 'samples')} can be used; the first: {reason}: " + said,
            hint=hint or "check the processor, the columns and the media folder",
        )
    reasons = {i: sys.intern(reason) for i, reason, _ in parts.reason_rows(paths) if reason != CUT}
    files.remove(folder / lengths_store.MARKER)
    digest = save_media(folder, media, identity.root)
    _write_details(folder, ((i, detail) for i, _, detail in parts.reason_rows(paths)))
    if identity.layout is None:
        files.remove(folder / LAYOUT)
    else:
        files.publish_json(folder / LAYOUT, identity.layout)
    counts = Counter(parts.key_counts(paths))
    counts.update(keys or {})
    save_keys(folder, counts)
    lengths_store.save(
        Lengths(whole.tokens, whole.costs, whole.status, reasons),
        folder,
        fingerprint=files.digest_json({**identity.key, "media": digest}),
        template=identity.template,
        fields={"key": identity.key, "media": digest},
        origin=origin,
    )


def refuse_changed_media(folder: Path, identity: Identity, verify_content: bool) -> None:
    """ForeignArtefactError when a medium is no longer what was measured."""
    refuse_media(folder, changed_media(folder, identity.root, verify_content=verify_content))


def refuse_media(folder: Path, changed: Sequence[str]) -> None:
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ForeignArtefactError(
            f"{folder} was measured from other media: {changed[0]}{more} changed since",
            hint="measure again with overwrite=True",
        )


@contextlib.contextmanager
def refusal_marked(folder: str | Path) -> Iterator[None]:
    """Lengths that are refused inside are marked, so that a wrong option blocks no folder."""
    with output(folder, look=False) as place:
        mark = place / REFUSED
        try:
            yield
        except PlanError as error:
            if (place / lengths_store.MARKER).is_file():
                files.publish_json(mark, {"because": error.message})
            raise
        if mark.is_file():
            files.remove(mark)


def publish_details(folder: str | Path, told: Mapping[int, str]) -> None:
    """Write what `details` reads, where there is something to tell."""
    if told:
        _write_details(Path(folder), sorted(told.items()))


def _write_details(folder: Path, told: Iterable[tuple[int, str]]) -> None:
    with files.publish(folder / "details.jsonl") as handle:
        for i, detail in told:
            line = json.dumps([i, detail], ensure_ascii=False) + "\n"
            handle.write(line.encode("utf-8", "backslashreplace"))


def details(folder: str | Path) -> dict[int, str]:
    """One line for people per sample that cannot be used, or that lost answers: where it stands, and what."""
    path = Path(folder) / "details.jsonl"
    if not path.is_file():
        return {}
    with open(path, encoding="utf-8") as handle:
        return {int(i): str(text) for i, text in map(json.loads, handle)}


def placed(line: str, where: str | None) -> tuple[str, str]:
    """(where, what is wrong) of a line of `details`.

    Args:
        where: as the source says it, which may hold a colon of its own; None: the source is not at hand.

    >>> placed("mix: a.json[3]: is cut", "mix: a.json[3]"), placed("a.json[3]: is cut", None)
    (('mix: a.json[3]', 'is cut'), ('a.json[3]', 'is cut'))
    """
    if where is not None and line.startswith(f"{where}: "):
        return where, line[len(where) + 2 :]
    told, _, detail = line.partition(": ")
    return told, detail


def origin_of(fields: dict[str, Any] | None = None) -> dict[str, Any]:
    """Where and when something was made: for `origin.json`, which no digest covers."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {**(fields or {}), "made": now, "machine": platform.node(), "folder": os.getcwd()}


# --------------------------------------------------------------------------------------------
# What a measured source holds that nothing read: refused where it changes training, else counted and kept
# --------------------------------------------------------------------------------------------
def refuse_unread(rows: Iterable[tuple[int, str, str]], total: int) -> int:
    """Stop where more than 1 % of the records have the reason `unread_key`.

    Args:
        rows: (id, reason, detail) of samples that cannot be used.
        total: records of the source.

    Returns:
        How many records there are with that reason.

    Raises:
        UnreadKeys: names the key, a record, and the option that settles it.
    """
    count, first = 0, ""
    for _, reason, detail in rows:
        if reason == UNREAD:
            count, first = count + 1, first or detail
    check_share(count, total, first)
    return count


def save_keys(folder: Path, counts: Mapping[str, int]) -> None:
    """Keep the counts beside the lengths."""
    if counts:
        files.publish_json(folder / KEYS, dict(sorted(counts.items())))
    else:
        files.remove(folder / KEYS)


def read_keys(folder: str | Path) -> dict[str, int]:
    """The counts beside lengths; empty where there are none."""
    path = Path(folder) / KEYS
    return {str(name): int(count) for name, count in files.read_json(path).items()} if path.is_file() else {}


# --------------------------------------------------------------------------------------------
# Ranges of ids mapped over an executor and joined to parts of a size worth publishing
# --------------------------------------------------------------------------------------------
# Ranges are cut by id and come back in id order, so parts do not depend on workers. A part holds at most a
# 128th of the work (4,096 samples where that is more): a stopped measurement repeats less than one percent.
#: Samples a worker measures at once: small enough for progress and balance, large enough to batch.
UNIT = 256

#: Up to this many samples are measured in this process: a worker takes seconds to start.
SERIAL = 2048

#: Parts a whole measurement is published in, and the fewest samples of a part.
PARTS, LEAST = 128, 4096

Progress = Callable[[int, int], None]


@dataclass
class Measurement:
    """What is measured, and by whom; only the source and the template decide a byte of the result.

    Attributes:
        source, template: as for `measure`.
        executor: option name of an executor.
        options: further keyword arguments of its `map_shards`, such as `address`.
        workers: processes; None = this process for up to `SERIAL` samples, else one per core.
        every: samples per published part; None = by the size of the work.
        progress: called with (samples done, samples in all).
        origin: how to open the source and template again.
        identity: of the source and the template.
    """

    source: extend.Source
    template: extend.Template
    executor: str
    options: Mapping[str, Any]
    workers: int | None
    every: int | None
    progress: Progress | None
    origin: dict[str, Any] | None

    def __post_init__(self) -> None:
        self.identity = Identity.of(self.source, self.template)

    def parts(self, done: int, start: int, stop: int) -> Iterator[Part]:
        """The ids from `done` on of all the work, start … stop - 1, in parts worth publishing."""
        context = (self.source, self.template)
        return self.gathered(self.map(measure_range, cut(done, stop), context), start, stop)

    def map(self, work: Any, ranges: list[tuple[int, int]], context: Any) -> Iterator[Any]:
        """`work(context, range)` of each range, in order."""
        few = self.executor == "local" and sum(stop - start for start, stop in ranges) <= SERIAL
        results: Iterator[Any] = extend.lookup("execute", self.executor).map_shards(
            work,
            ranges,
            workers=1 if self.workers is None and few else self.workers,
            context=context,
            **self.options,
        )
        return results

    def size(self, samples: int) -> int:
        """Samples of a part, of so many in all."""
        return self.every or max(LEAST, -(-samples // PARTS))

    def gathered(self, results: Iterable[Part], start: int, stop: int) -> Iterator[Part]:
        """Join the parts of ranges, up to the last id `stop`, to parts worth publishing.

        Args:
            results: in id order, without gaps.
            start: first id of all the work, what was done before included.
            stop: the id after the last.
        """
        size = self.size(stop - start)
        waiting: list[Part] = []
        for part in results:
            waiting.append(part)
            if self.progress is not None:
                self.progress(part.stop - start, stop - start)
            if part.stop - waiting[0].start >= size or part.stop == stop:
                yield parts.joined(waiting)
                waiting = []


def cut(start: int, stop: int, size: int | None = None) -> list[tuple[int, int]]:
    """[start, stop) in ranges of `size` (default `UNIT`)."""
    step = size or UNIT
    return [(first, min(first + step, stop)) for first in range(start, stop, step)]
