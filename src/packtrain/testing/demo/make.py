"""Make the demo set: a few hundred samples of real work for a vision-language model, with faults planted.

    folder/
      train.jsonl  val.jsonl  images/…  processor/…  faults.json
      README.md    written first: says that the folder is ours to rewrite
      demo.json    the marker, written last: parameters, and the size of every file

The set is a pure function of (version, samples, seed): the same JSONL and picture sizes anywhere,
the same picture bytes on one machine. A second call with the same parameters reads the marker and
returns; other parameters rebuild the folder. A folder that holds anything else is refused. Processes
that make the same set at the same time write the same bytes and do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import files
from ...errors import ForeignArtefactError, FormatError, InputError
from .schedule import FEWEST, PACK_LENGTH
from .writer import Writer

__all__ = ["DemoSet", "make_demo"]

VERSION = 1
_OURS = "This folder was made by packtrain's demo, which may rewrite it.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSet:
    """Where a demo set lies. `faults`: ledger reason -> ids of train.jsonl that must carry it."""

    train_jsonl: Path
    val_jsonl: Path
    processor_dir: Path
    faults: dict[str, list[int]]


def make_demo(
    folder: str | Path,
    *,
    samples: int = 320,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> DemoSet:
    """Make the set in `folder`, or return at once when it is there already.

    Args:
        samples: records of train.jsonl, planted faults included; val.jsonl gets a tenth as many.
        seed: of every draw.
        progress: called as progress(done, total), in samples.

    Raises:
        InputError: fewer than 60 samples.
        ForeignArtefactError: the folder holds files that are not a demo set.
        MissingExtraError: matplotlib (extra `report`) or tokenizers (extra `train`) is not installed.
    """
    if samples < FEWEST:
        raise InputError(f"a demo set of {samples} samples is too small", hint=f"samples >= {FEWEST}")
    folder = Path(folder)
    wanted = {"version": VERSION, "samples": samples, "seed": seed, "pack_length": PACK_LENGTH}
    before = _marker(folder)
    if before is not None and before["parameters"] == wanted and _whole(folder, before["files"]):
        return _opened(folder)
    leftovers = _claim(folder)
    writer = Writer(folder, f"{VERSION}/{seed}", samples + samples // 10, progress)
    writer.train(samples)
    writer.val(samples // 10)
    old = set(before["files"] if before else ()) - set(writer.sizes)
    for path in [folder / name for name in sorted(old)] + leftovers:
        files.remove(path)
    files.publish_json(folder / "demo.json", {"parameters": wanted, "files": writer.sizes})
    return _opened(folder)


def _opened(folder: Path) -> DemoSet:
    return DemoSet(
        train_jsonl=folder / "train.jsonl",
        val_jsonl=folder / "val.jsonl",
        processor_dir=folder / "processor",
        faults=files.read_json(folder / "faults.json"),
    )


def _marker(folder: Path) -> dict[str, Any] | None:
    try:
        found = files.read_json(folder / "demo.json")
    except FormatError:
        return None
    return found if isinstance(found, dict) and found.keys() >= {"parameters", "files"} else None


def _whole(folder: Path, sizes: dict[str, int]) -> bool:
    """Every file of the marker is there with its size: pictures may have been tidied away since."""
    paths = [(folder / name, size) for name, size in sizes.items()]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _claim(folder: Path) -> list[Path]:
    """Make the folder ours, or refuse it; an old marker goes first.

    Returns temporary files that are there now. Those still there when all is written belong to a
    stopped process; one that works on the same set at the same time has long renamed its own.
    """
    note = folder / "README.md"
    if not note.is_file() or note.read_bytes() != _OURS.encode():
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ForeignArtefactError(
                f"{folder} holds files that are not a demo set", hint="choose an empty or a new folder"
            )
        files.publish_text(note, _OURS)
    files.remove(folder / "demo.json")
    return sorted(path for path in folder.rglob(".*.tmp.*") if path.is_file())
