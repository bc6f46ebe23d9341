"""What of a grown or partly changed source was measured before: ids matched by the content of their files.

A *layout* says which ids come from which file: plain JSON, kept as `source.json` beside the lengths. A file
with the same content keeps its lengths wherever its ids have moved to. Where samples of it cannot be used
their messages name the file, so a file that was renamed is then measured again. A single JSONL file may
have got more lines: the SHA-256 of its first bytes must be that of the earlier file.

Sources of several files have `shards`; a mixture or a folder of pairs has none and is measured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import extend, files

#: File that says which files the ids come from.
LAYOUT = "source.json"


@dataclass(frozen=True)
class Piece:
    """Ids start .. stop - 1: measured before under the ids from `old` on, or not at all (None)."""

    start: int
    stop: int
    old: int | None


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
