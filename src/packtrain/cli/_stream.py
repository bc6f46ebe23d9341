"""What a growing directory holds, for `show`, `verify` and `produce`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import files
from ..errors import FormatError, LawError, counted
from ..measuring.run import CUT
from ..pipeline.unread import told
from ..store.growing import PRODUCER, View, chunk_name, completed, number_of, read_stream, readers
from ..waiting.claim import look
from ._show import artefact_kind

Progress = Callable[[int, int], None]


def stream_figures(folder: Path, view: View | None = None) -> dict[str, Any]:
    """Counts of the stream, how far readers are, and what the producer is doing."""
    with files.reading(folder, "a growing directory as it was written", "verify it"):
        return _figures(folder, view or View(folder))


def _stream_of(folder: Path, view: View) -> dict[str, Any]:
    """What the stream in a folder says of itself, as it is now."""
    view.refresh()
    if view.stream is None:
        raise FormatError(
            f"{folder} holds no stream of packs", hint="name the OUT of packtrain produce, once it has begun"
        )
    return view.stream


def _figures(folder: Path, view: View) -> dict[str, Any]:
    stream = _stream_of(folder, view)
    newest = len(view.counts) - 1
    told: dict[str, Any] = {"pack_length": stream["config"].get("pack_length")}
    if view.end is not None:
        told = dict(view.end["stats"])
    elif newest >= 0:
        told = dict(files.read_json((folder / chunk_name(newest)).with_suffix(".json"))["meta"]["stats"])
    told["chunks"], told["packs"] = len(view.counts), sum(view.counts)
    slots = told["packs"] * (told["pack_length"] or 0) + told.get("beyond", 0)
    told["efficiency"] = round(told.get("tokens", 0) / slots, 6) if slots else 0.0
    told["samples_per_pack"] = round(told.get("packed", 0) / told["packs"], 4) if told["packs"] else 0.0
    told["lag_samples"] = told.get("read", 0) - told.get("packed", 0) - sum(told.get("dropped", {}).values())
    marks = readers(folder, stream["stream"])
    slots = min((0 if told is None else int(told["slots"]) for told in marks.values()), default=0)
    present = [name for name in view.names if name.startswith("chunk_") and name.endswith(".arrow")]
    told["chunks_on_disk"] = len(present)
    told["chunks_completed"] = len(set.intersection(*map(completed, marks))) if marks else 0
    told["readers"] = len(marks)
    told["packs_acknowledged"] = min(slots, told["packs"])
    told["ended"] = view.is_complete
    told["producer"] = _doing(folder)
    return {"stream": stream["stream"], "out": str(folder), **told}


def _doing(folder: Path) -> str:
    held = look(folder / PRODUCER)
    if held is None or held.owner is None:
        return "none"
    state = str(held.beat.get("state", "working"))
    if state == "failed":
        return f"failed: {(held.beat.get('error') or {}).get('message', '')}"
    if state == "released":
        return "stopped"
    return "gone without a word" if held.owner.is_dead else f"{held.owner}: {held.beat.get('stage', state)}"


def stream_rows(figures: dict[str, Any]) -> dict[str, str]:
    """Figures as text."""
    rows = {
        "samples": f"{figures.get('packed', 0):,} packed of {figures.get('read', 0):,} read, "
        f"{figures['lag_samples']:,} waiting",
        "packs": f"{figures['packs']:,} of {figures['pack_length'] or 0:,} tokens, "
        f"{counted(figures['chunks'], 'chunks')}",
        "tokens": f"{figures.get('tokens', 0):,}",
        "efficiency": f"{figures['efficiency']:.2%} of slots are real tokens",
        "samples per pack": f"{figures['samples_per_pack']:.2f}",
        "raw shards": f"{figures.get('shards', 0):,}"
        + (f", {figures['duplicates']:,} twice" if figures.get("duplicates") else "")
        + (f", {figures['faulty']:,} unreadable" if figures.get("faulty") else ""),
        "ledger": f"{sum(figures.get('dropped', {}).values()):,} samples",
    }
    rows.update({f"  {reason}": f"{count:,}" for reason, count in figures.get("dropped", {}).items()})
    if keys := told(figures.get("keys", {})):
        rows["keys"] = keys
    if figures.get("truncated"):
        rows["truncation"] = (
            f"{counted(figures['truncated'], 'samples')} lost answers, or a part of one: show --ledger"
        )
    if "producer" in figures:
        rows["readers"] = (
            f"{figures['readers']:,}; "
            f"{counted(figures['packs_acknowledged'], 'packs')} acknowledged by all; chunks: "
            f"{figures['chunks_completed']:,} used up, {figures['chunks_on_disk']:,} on disk"
        )
        rows["producer"] = str(figures["producer"])
        rows["ended"] = "yes" if figures["ended"] else "no"
    return rows


def kind_to_follow(folder: Path) -> str:
    """The kind of a folder; one that holds nothing as yet may become a stream."""
    try:
        return artefact_kind(folder)
    except FormatError:
        if folder.is_dir() and not (folder / PRODUCER).is_dir() and any(folder.iterdir()):
            raise
        return "stream"


def follow_stream(folder: Path, interval: float) -> Iterator[dict[str, Any]]:
    """Figures each time they change, until the stream has ended; waits for it to begin."""
    view, last = View(folder), None
    while read_stream(folder) is None:
        time.sleep(interval)
    while True:
        figures = stream_figures(folder, view)
        if figures != last:
            yield figures
            last = figures
        if figures["ended"]:
            return
        time.sleep(interval)


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    """Every sample that is in no pack, or lost answers to truncation, as far as manifests are there."""
    rows: list[dict[str, Any]] = []
    for path in [*sorted(folder.glob("chunk_*.json")), folder / "END"]:
        if not path.is_file() or (path.name != "END" and number_of(path.name) is None):
            continue
        with files.reading(path, "a manifest"):
            told = files.read_json(path)
            rows += told["ledger"] if path.name == "END" else told["meta"].get("ledger", [])
    return rows


def verify_stream(folder: Path, progress: Progress = lambda done, total: None) -> dict[str, str]:
    """Hash every chunk and check the laws over all of them.

    Args:
        progress: called with (chunks done, chunks in all).

    Raises:
        LawError: a sample is in two packs, a pack is over its cap, or the counts do not add up.
    """
    with files.reading(folder, "a growing directory as it was written", "produce it again"):
        return _verified(folder, progress)


def _verified(folder: Path, progress: Progress) -> dict[str, str]:
    from ..export.producer import Housekeeping

    view = View(folder)
    stream = _stream_of(folder, view)
    cap = int(stream["config"]["pack_length"])
    seen: set[Any] = set()
    chunks = 0
    if view.end is not None and not view.is_complete:
        raise FormatError(f"{view.fault}, though the stream has ended", hint="copy it again")
    used = Housekeeping(folder, stream["stream"], view.counts).used_up()
    for number in range(len(view.counts)):
        progress(number, len(view.counts))
        path = folder / chunk_name(number)
        if number in used and not path.exists() and not path.with_suffix(".json").exists():
            continue  # acknowledged and removed
        chunks += 1
        _verify_chunk(path, cap, seen)
    rows = [row for row in ledger_of(folder) if row["reason"] != CUT]
    left = {row["id"] for row in rows}
    if left & seen or len(left) != len(rows):
        raise LawError(f"sample {sorted(left & seen)[:1]} is in a pack and in the ledger")
    done = {"chunks": f"{chunks:,} equal to their digests", "capacity": f"holds at {cap:,} tokens"}
    if view.end is None or chunks < len(view.counts):
        done["partition"] = f"no sample of {len(seen):,} twice; the stream is not all here"
        return done
    if seen | left != set(range(int(view.end["stats"]["read"]))):
        raise LawError(
            f"{folder} holds {counted(len(seen), 'samples')} and {len(left)} in its ledger, "
            f"{view.end['stats']['read']} were read"
        )
    done["partition"] = f"{len(seen):,} packed and {len(left):,} in the ledger are all that was read"
    return done


def _verify_chunk(path: Path, cap: int, seen: set[Any]) -> None:
    """Hash a chunk and hold its packs against the cap and the samples `seen` so far; its own join them."""
    from ..store.chunks import ChunkReader

    reader = ChunkReader(path)
    reader.verify()
    for row in range(len(reader)):
        lengths = reader.lengths(row)
        if len(lengths) > 1 and int(lengths.sum()) > cap:
            raise LawError(f"pack {row} of {path.name} holds {int(lengths.sum())} tokens, the cap is {cap}")
        for one in reader.sample_ids(row):
            if one in seen:
                raise LawError(f"sample {one} is in two packs, one of them pack {row} of {path.name}")
            seen.add(one)
