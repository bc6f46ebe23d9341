"""Measured ranges of an unfinished lengths folder, so that a stopped measurement goes on where it was.

`<folder>/partial/` holds `key.json` (what is being measured) and, per range, `part_<start>_<stop>.media`
(one JSON row a medium, ascending) and `part_<start>_<stop>.npz` (the rest; written last, so a part
without it does not count). Parts are contiguous from 0 and their borders do not affect the finished
bytes: arrays are joined by id, media rows are merged. The folder goes when the lengths are published.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files

__all__ = [
    "MediaRow",
    "Part",
    "add_part",
    "clear_parts",
    "finished",
    "joined",
    "media_rows",
    "open_parts",
    "read_parts",
]

_KEY = "key.json"

MediaRow = tuple[str, int, str]  # name, size in bytes, digest of the header bytes


@dataclass(kw_only=True)
class Part:
    """The measured ids [start, stop).

    Attributes:
        tokens: int64[stop-start].
        status: uint8[stop-start], see `Lengths.status`.
        costs: name -> int64[stop-start].
        reasons: (id, reason, detail) of every sample that is not ok, ascending.
        media: rows of every medium used, ascending, each once. Empty on a part that was read back.
    """

    start: int
    stop: int
    tokens: NDArray[np.int64]
    status: NDArray[np.uint8]
    costs: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    reasons: list[tuple[int, str, str]] = field(default_factory=list)
    media: list[MediaRow] = field(default_factory=list)


def joined(many: list[Part], start: int = 0) -> Part:
    """Contiguous parts as one. A cost that a part does not know counts 0 there."""
    names = sorted({name for part in many for name in part.costs})
    zeros = {id(part): np.zeros(part.stop - part.start, np.int64) for part in many}
    return Part(
        start=many[0].start if many else start,
        stop=many[-1].stop if many else start,
        tokens=np.concatenate([np.zeros(0, np.int64), *(part.tokens for part in many)]),
        status=np.concatenate([np.zeros(0, np.uint8), *(part.status for part in many)]),
        costs={n: np.concatenate([part.costs.get(n, zeros[id(part)]) for part in many]) for n in names},
        reasons=[row for part in many for row in part.reasons],
        media=sorted({row for part in many for row in part.media}),
    )


def open_parts(folder: Path, key: Mapping[str, Any]) -> tuple[int, str | None]:
    """How many samples are measured under `key`, or the name of a field in which the stored key differs.

    Files of a part that was not finished are removed.
    """
    partial = folder / "partial"
    files.remove_leftovers(partial)
    if (partial / _KEY).is_file():
        stored = files.read_json(partial / _KEY)
        for name in sorted(set(stored) | set(key)):
            if stored.get(name) != key.get(name):
                return 0, name
    else:
        clear_parts(folder)
        files.publish_json(partial / _KEY, dict(key))
    kept = {path.stem for path in finished(folder)}
    for path in sorted(partial.glob("part_*")):
        if path.stem not in kept:
            files.remove(path)
    return max((int(stem.split("_")[2]) for stem in kept), default=0), None


def add_part(folder: Path, part: Part) -> None:
    """Publish one measured range; its `.npz` is the marker and comes last."""
    stem = folder / "partial" / f"part_{part.start:012d}_{part.stop:012d}"
    files.publish_text(stem.with_suffix(".media"), "".join(json.dumps(row) + "\n" for row in part.media))
    arrays: dict[str, NDArray[Any]] = {f"cost_{name}": values for name, values in part.costs.items()}
    arrays["reasons"] = np.frombuffer(json.dumps(part.reasons).encode("ascii"), dtype=np.uint8)
    with files.publish(stem.with_suffix(".npz")) as handle:
        np.savez(handle, tokens=part.tokens, status=part.status, **arrays)  # type: ignore[arg-type]


def finished(folder: Path) -> list[Path]:
    """The `.npz` files of the contiguous finished parts, in order."""
    found: list[Path] = []
    reached = 0
    for path in sorted((folder / "partial").glob("part_*.npz")):
        start, stop = (int(number) for number in path.stem.split("_")[1:])
        if start == reached:
            found.append(path)
            reached = stop
    return found


def read_parts(folder: Path) -> Part:
    """All finished parts as one, without its media rows."""
    return joined([_read(path) for path in finished(folder)])


def media_rows(folder: Path) -> Iterator[MediaRow]:
    """The media rows of all finished parts, ascending, each once; memory does not grow with their number."""
    streams = [_lines(path.with_suffix(".media")) for path in finished(folder)]
    last: MediaRow | None = None
    for row in heapq.merge(*streams):
        if row != last:
            yield row
        last = row


def clear_parts(folder: Path) -> None:
    """Remove the partial folder; the key goes last, so that a stop in between leaves no orphan part."""
    partial = folder / "partial"
    if not partial.is_dir():
        return
    files.remove_leftovers(partial)
    for path in sorted(partial.glob("part_*")):
        files.remove(path)
    files.remove(partial / _KEY)
    partial.rmdir()


def _lines(path: Path) -> Iterator[MediaRow]:
    with open(path, encoding="ascii") as handle:
        for line in handle:
            name, size, header = json.loads(line)
            yield str(name), int(size), str(header)


def _read(path: Path) -> Part:
    start, stop = (int(number) for number in path.stem.split("_")[1:])
    with np.load(path) as stored:
        return Part(
            start=start,
            stop=stop,
            tokens=stored["tokens"],
            status=stored["status"],
            costs={name[5:]: stored[name] for name in stored.files if name.startswith("cost_")},
            reasons=[(int(i), str(r), str(d)) for i, r, d in json.loads(stored["reasons"].tobytes())],
        )
