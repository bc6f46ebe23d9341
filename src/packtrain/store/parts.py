"""Measured ranges of an unfinished lengths folder, so that a stopped measurement goes on where it was.

`<folder>/partial/` holds `key.json` (what is being measured) and files `part_<start>_<stop>.npz`,
each whole or absent. Parts are contiguous from 0; their borders do not affect the finished bytes.
The folder disappears when the measurement is published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files

__all__ = ["Part", "add_part", "clear_parts", "open_parts"]

_KEY = "key.json"


@dataclass(kw_only=True)
class Part:
    """The measured ids [start, stop).

    Attributes:
        tokens: int64[stop-start].
        status: uint8[stop-start], see `Lengths.status`.
        costs: name -> int64[stop-start].
        reasons: (id, reason, detail) of every sample that is not ok.
        media: (name, size in bytes, header digest, mtime_ns) of every media reference, in order of use.
    """

    start: int
    stop: int
    tokens: NDArray[np.int64]
    status: NDArray[np.uint8]
    costs: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    reasons: list[tuple[int, str, str]] = field(default_factory=list)
    media: list[tuple[str, int, str, int]] = field(default_factory=list)

    def extend(self, other: Part) -> None:
        """Append the range that follows this one; a cost unknown on one side counts 0 there."""
        mine, theirs = self.stop - self.start, other.stop - other.start
        for name in sorted(set(self.costs) | set(other.costs)):
            self.costs[name] = np.concatenate(
                [
                    self.costs.get(name, np.zeros(mine, np.int64)),
                    other.costs.get(name, np.zeros(theirs, np.int64)),
                ]
            )
        self.tokens = np.concatenate([self.tokens, other.tokens])
        self.status = np.concatenate([self.status, other.status])
        self.reasons = [*self.reasons, *other.reasons]
        self.media = [*self.media, *other.media]
        self.stop = other.stop


def empty_part(start: int = 0) -> Part:
    return Part(start=start, stop=start, tokens=np.zeros(0, np.int64), status=np.zeros(0, np.uint8))


def open_parts(folder: Path, key: Mapping[str, Any]) -> tuple[Part, str | None]:
    """What is measured so far under `key`, and the name of a differing field when it is another's work.

    Returns the contiguous prefix (an empty part when there is none). A second value that is not None
    means the partial work belongs to another key; nothing of it is returned.
    """
    partial = folder / "partial"
    files.remove_leftovers(partial)
    if (partial / _KEY).is_file():
        stored = files.read_json(partial / _KEY)
        for name in sorted(set(stored) | set(key)):
            if stored.get(name) != key.get(name):
                return empty_part(), name
    else:
        files.publish_json(partial / _KEY, dict(key))
    done = empty_part()
    for path in sorted(partial.glob("part_*.npz")):
        part = _read(path)
        if part.start != done.stop:
            break
        done.extend(part)
    return done, None


def add_part(folder: Path, part: Part) -> None:
    """Publish one measured range."""
    meta = json.dumps({"reasons": part.reasons, "media": part.media}).encode("utf-8")
    arrays: dict[str, NDArray[Any]] = {f"cost_{name}": values for name, values in part.costs.items()}
    arrays["meta"] = np.frombuffer(meta, dtype=np.uint8)
    path = folder / "partial" / f"part_{part.start:012d}_{part.stop:012d}.npz"
    with files.publish(path) as handle:
        np.savez(handle, tokens=part.tokens, status=part.status, **arrays)  # type: ignore[arg-type]


def clear_parts(folder: Path) -> None:
    """Remove the partial folder; the key goes last, so that a stop in between leaves no orphan part."""
    partial = folder / "partial"
    if not partial.is_dir():
        return
    files.remove_leftovers(partial)
    for path in sorted(partial.glob("part_*.npz")):
        files.remove(path)
    files.remove(partial / _KEY)
    partial.rmdir()


def _read(path: Path) -> Part:
    start, stop = (int(field) for field in path.stem.split("_")[1:])
    with np.load(path) as stored:
        meta = json.loads(stored["meta"].tobytes().decode("utf-8"))
        return Part(
            start=start,
            stop=stop,
            tokens=stored["tokens"],
            status=stored["status"],
            costs={name[5:]: stored[name] for name in stored.files if name.startswith("cost_")},
            reasons=[(int(i), str(r), str(d)) for i, r, d in meta["reasons"]],
            media=[(str(n), int(s), str(h), int(t)) for n, s, h, t in meta["media"]],
        )
