"""Measured ranges of an unfinished lengths folder, so that a stopped measurement goes on where it was.

`<folder>/partial/` holds `key.json` (what is being measured) and, per range, `part_<start>_<stop>.media`
(one JSON row a medium, ascending) and `part_<start>_<stop>.npz` (the rest; written last, so a part
without it does not count). Parts are contiguous from the first id and their borders do not affect the
finished bytes: arrays are joined by id, media rows are merged. The folder goes when the lengths are
published. Joining reads one part at a time: only the joined arrays (4 bytes a sample and cost) are held.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..errors import InputError
from ..measuring.run import MediaRow, Part, Reason

_KEY = "key.json"

#: Lies among parts of which a sample, or the template, was refused: whatever mends that makes another key.
_REFUSED = "refused.json"

#: Bytes of a media file that are held while many are merged.
_HELD = 1 << 14


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
        told=[row for part in many for row in part.told],
        media=sorted({row for part in many for row in part.media}),
        keys=_summed(part.keys for part in many),
    )


def key_of(folder: Path) -> dict[str, Any] | None:
    """What the unfinished measurement in `folder` is of; None where there is none."""
    path = folder / "partial" / _KEY
    if not path.is_file():
        return None
    with files.reading(path, "the key of a measurement", "measure again with overwrite=True"):
        return dict(files.read_json(path))


def open_parts(folder: Path, key: Mapping[str, Any], start: int = 0) -> tuple[int, str | None]:
    """The first id from `start` on that is not measured under `key`, or the name of a field in which the
    stored key differs. Parts of another key that were refused (`guarded`) give way.

    Files of a part that was not finished are removed.
    """
    partial = folder / "partial"
    files.remove_leftovers(partial)
    stored = key_of(folder)
    if stored is not None and stored != dict(key) and (partial / _REFUSED).is_file():
        stored = None
    if stored is not None:
        for name in sorted(set(stored) | set(key)):
            if stored.get(name) != key.get(name):
                return start, name
    else:
        clear_parts(folder)
        files.publish_json(partial / _KEY, dict(key))
    kept = {path.stem for path in finished(folder, start)}
    for path in sorted(partial.glob("part_*")):
        if path.stem not in kept:
            files.remove(path)
    return max((_edges(Path(stem))[1] for stem in kept), default=start), None


def guarded(folder: Path, made: Iterable[Part]) -> Iterator[Part]:
    """The parts of a measurement; where it ends in an error of its input, another may take its place."""
    mark = folder / "partial" / _REFUSED
    try:
        yield from made
    except InputError:
        files.publish_json(mark, {})
        raise
    files.remove(mark)


def add_part(folder: Path, part: Part) -> None:
    """Publish one measured range; its `.npz` is the marker and comes last."""
    stem = folder / "partial" / f"part_{part.start:012d}_{part.stop:012d}"
    files.publish_text(stem.with_suffix(".media"), "".join(json.dumps(row) + "\n" for row in part.media))
    arrays: dict[str, NDArray[Any]] = {f"cost_{name}": values for name, values in part.costs.items()}
    arrays["reasons"] = np.frombuffer(json.dumps(part.told).encode("ascii"), dtype=np.uint8)
    arrays["keys"] = np.frombuffer(json.dumps(part.keys).encode("ascii"), dtype=np.uint8)
    with files.publish(stem.with_suffix(".npz")) as handle:
        np.savez(handle, tokens=part.tokens, status=part.status, **arrays)  # type: ignore[arg-type]


def finished(folder: Path, start: int = 0) -> list[Path]:
    """The `.npz` files of the finished parts that are contiguous from `start`, in order."""
    found: list[Path] = []
    reached = start
    for path in sorted((folder / "partial").glob("part_*.npz")):
        first, stop = _edges(path)
        if first == reached:
            found.append(path)
            reached = stop
    return found


def read_arrays(paths: Sequence[Path]) -> Part:
    """The arrays of contiguous parts, joined: int32 where every value is below 2**31, read-only.

    A cost that a part does not know counts 0 there. The arrays alone: `told`, `media` and `keys` are empty.
    """
    start, stop = (_edges(paths[0])[0], _edges(paths[-1])[1]) if paths else (0, 0)
    tokens: NDArray[Any] = np.zeros(stop - start, np.int32)
    status = np.zeros(stop - start, np.uint8)
    costs: dict[str, NDArray[Any]] = {}
    for path in paths:
        place = slice(*(edge - start for edge in _edges(path)))
        with np.load(path) as stored:
            status[place] = stored["status"]
            tokens = _filled(tokens, place, stored["tokens"])
            for name in (name for name in stored.files if name.startswith("cost_")):
                held = costs.get(name[5:])
                held = np.zeros(stop - start, np.int32) if held is None else held
                costs[name[5:]] = _filled(held, place, stored[name])
    for array in (tokens, status, *costs.values()):
        array.flags.writeable = False
    ordered = {name: costs[name] for name in sorted(costs)}
    return Part(start=start, stop=stop, tokens=tokens, status=status, costs=ordered)


def reason_rows(paths: Sequence[Path]) -> Iterator[Reason]:
    """(id, reason, detail) of every sample of the parts there is something to say of, in the parts' order."""
    for path in paths:
        with np.load(path) as stored:
            rows = json.loads(stored["reasons"].tobytes())
        for i, reason, detail in rows:
            yield int(i), str(reason), str(detail)


def key_counts(paths: Sequence[Path]) -> dict[str, int]:
    """The counts of keys of all parts together, by name."""
    found = []
    for path in paths:
        with np.load(path) as stored:
            if "keys" in stored.files:
                found.append(json.loads(stored["keys"].tobytes()))
    return _summed(found)


def _summed(many: Iterable[Mapping[str, int]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for held in many:
        for name, count in held.items():
            counts[name] = counts.get(name, 0) + count
    return dict(sorted(counts.items()))


def media_rows(paths: Sequence[Path]) -> Iterator[MediaRow]:
    """The media rows of parts, ascending, each once; memory does not grow with their number."""
    return merged(*(_lines(path.with_suffix(".media")) for path in paths))


def merged(*streams: Iterable[MediaRow]) -> Iterator[MediaRow]:
    """Ascending streams of media rows as one, each row once."""
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
    files.remove(partial / _REFUSED)
    files.remove(partial / _KEY)
    partial.rmdir()


def _edges(path: Path) -> tuple[int, int]:
    start, stop = path.stem.split("_")[1:]
    return int(start), int(stop)


def _filled(array: NDArray[Any], place: slice, values: NDArray[np.int64]) -> NDArray[Any]:
    """`array` with values in place; as int64 from the first value on that needs it."""
    if array.dtype == np.int32 and len(values) and int(values.max()) >= 1 << 31:
        array = array.astype(np.int64)
    array[place] = values
    return array


def _lines(path: Path) -> Iterator[MediaRow]:
    """Rows of a media file, read block by block without keeping it open: there may be thousands."""
    offset, rest = 0, b""
    while True:
        with open(path, "rb") as handle:
            handle.seek(offset)
            block = handle.read(_HELD)
        offset += len(block)
        whole, _, rest = (rest + block).rpartition(b"\n")
        for line in whole.split(b"\n") if whole else ():
            name, size, header = json.loads(line)
            yield str(name), int(size), str(header)
        if not block:
            return
