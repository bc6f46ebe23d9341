"""One folder holds one artefact: where lengths or a plan are not written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .. import files
from ..errors import ForeignArtefactError, FormatError
from ..waiting.claim import PLACE

#: Marker of a folder -> what such a folder holds.
_KINDS = {"lengths.json": "lengths", "plan.json": "plan", "run.json": "run"}


def refuse_other_kind(folder: str | Path, marker: str, own: Iterable[str] = ()) -> None:
    """One folder holds one artefact: refuse to write lengths or a plan where anything else lies.

    Files without a marker are ours only where a stopped writer left a sign of itself. Folders and hidden
    files beside them hurt nobody: nothing is written under their names.

    Args:
        own: names of files that a stopped writer may have left without a sign.

    Raises:
        ForeignArtefactError: the marker of another kind is there, or files that are of none.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ForeignArtefactError(f"{folder} is a file, not a folder", hint="choose another folder")
    for other in _KINDS:
        if other != marker and (folder / other).is_file():
            raise ForeignArtefactError(
                f"{folder} holds {other}: it is the folder of another artefact", hint="choose another folder"
            )
    if not folder.is_dir() or _is_ours(folder, marker):
        return
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    strange = [name for name in names if (folder / name).is_file() and name not in set(own)]
    if strange:
        raise ForeignArtefactError(
            f"{folder} holds files that are no {_KINDS[marker]}: {strange[0]} ({len(strange)} in all)",
            hint="choose an empty folder",
        )


def _is_ours(folder: Path, marker: str) -> bool:
    """Does `folder` hold this artefact, or what a writer of it left that was stopped?"""
    signs = (f"{PLACE}/claim.*", "partial/key.json", "shard_*_of_*/")
    if any(any(folder.glob(sign)) for sign in signs):
        return True
    try:
        if (folder / marker).is_file():
            told = files.read_json(folder / marker)
            return isinstance(told, dict) and str(told.get("schema")).startswith("packtrain.")
        told = files.read_json(folder / "origin.json") if (folder / "origin.json").is_file() else {}
    except FormatError:
        return (folder / marker).is_file()  # a torn marker is told of where it is read, and may be replaced
    return isinstance(told, dict) and {"made", "machine", "folder"} <= told.keys()
