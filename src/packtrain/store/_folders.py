"""Array folders: a marker that names its arrays, arrays checked against it, and where none is written.

Used by the folders of lengths and plans. Nothing is loaded: arrays are memory maps whose header, type,
shape and file size are checked, so a torn copy is found without reading it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..errors import ChecksumError, ForeignArtefactError, FormatError, InputError
from ..planning.lengths import block_digests
from ..waiting.claim import PLACE

#: Marker of a folder -> what such a folder holds.
_KINDS = {"lengths.json": "lengths", "plan.json": "plan", "run.json": "run"}

#: Marker of a folder of packs -> what it is; the plan and lengths of one lie elsewhere.
_PACKS = {".packtrain/key.json": ": it is an export", "stream.json": ": it is a directory of chunks"}


def read_marker(folder: Path, name: str, schema: str) -> dict[str, Any]:
    """The marker of a folder, or FormatError that says what is there instead."""
    path = folder / name
    if not os.path.isdir(folder):  # False for a name that no folder can have
        hint = files.recipe_hint(folder) or f"expected a folder with {name}"
        raise FormatError(f"{folder} is not a folder", hint=hint)
    if not os.path.isfile(path):
        holds = {**{one: f", but {one}" for one in _KINDS}, **_PACKS}
        other = next((told for one, told in holds.items() if (folder / one).is_file()), "")
        raise FormatError(
            f"{folder} holds no {name}{other}",
            hint=f"name the folder of {name}" if other else "was its writer stopped? Run it again",
        )
    held = files.read_json(path)
    marker: dict[str, Any] = dict(held) if isinstance(held, dict) else {}
    _check_schema(path, marker, schema)
    return marker


def _check_schema(path: Path, marker: Mapping[str, Any], schema: str) -> None:
    if marker.get("schema") != schema:
        raise FormatError(
            f"{path} has schema {marker.get('schema')!r}, this version reads {schema!r}",
            hint="make it again, or read it with the version that wrote it",
        )


def marker_there(folder: Path, name: str, schema: str) -> dict[str, Any] | None:
    """The marker of a folder; None where it is not there, torn by a stopped writer, or of another version."""
    try:
        return read_marker(folder, name, schema)
    except FormatError:
        return None


def sealed(marker: Mapping[str, Any]) -> dict[str, Any]:
    """The marker with a digest of all its other fields, so that `verify` finds an edited one."""
    return {**marker, "seal": files.digest_json(dict(marker))}


def check_seal(folder: Path, name: str, schema: str | None = None) -> dict[str, Any]:
    """The marker of a folder; ChecksumError where it was edited, FormatError where it has another schema."""
    held = files.read_json(folder / name)
    marker: dict[str, Any] = dict(held) if isinstance(held, dict) else {}
    if schema is not None:
        _check_schema(folder / name, marker, schema)
    with files.reading(folder / name, "a marker"):
        digest = files.digest_json({key: value for key, value in marker.items() if key != "seal"})
    if marker.pop("seal", None) != digest:
        raise ChecksumError(
            f"{folder / name} was edited: it differs from its own digest", hint="make it again"
        )
    return marker


@contextlib.contextmanager
def publishing(
    folder: Path,
    name: str,
    marker: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    origin: Mapping[str, Any] | None,
) -> Iterator[None]:
    """Write the origin and the arrays of a folder, then what the block writes, and its marker last.

    Args:
        name: of the marker, which is removed first.
        origin: kept beside the artefact; without a marker it says whose the arrays of a stopped writer are.
    """
    files.make_folder(folder)
    files.remove_leftovers(folder)
    files.remove(folder / name)
    if origin is not None:
        files.publish_json(folder / "origin.json", dict(origin))
    for stem, array in arrays.items():
        files.publish_array(folder / f"{stem}.npy", array)
    yield
    files.publish_json(folder / name, sealed(marker))


def describe(array: NDArray[Any]) -> dict[str, Any]:
    """What the marker says about an array: type and length."""
    return {"dtype": np.lib.format.dtype_to_descr(array.dtype), "length": len(array)}


def open_array(folder: Path, stem: str, described: Mapping[str, Any]) -> NDArray[Any]:
    """Memory-map `stem`.npy and check it against its description."""
    path = folder / f"{stem}.npy"
    descr = described["dtype"]
    want = np.dtype(descr if isinstance(descr, str) else [tuple(field) for field in descr])
    try:
        mode: Any = "r" if int(described["length"]) else None  # nothing cannot be mapped
        array: NDArray[Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
    except FileNotFoundError:
        raise FormatError(f"{path} is missing", hint="the folder is incomplete; make it again") from None
    except PermissionError:
        raise InputError(f"no permission to read {path}") from None
    except (ValueError, EOFError, OSError, SyntaxError, tokenize.TokenError) as error:
        # a damaged header is parsed as Python
        raise FormatError(f"{path} is torn or not an array: {error}", hint="make the folder again") from None
    header = array.offset if isinstance(array, np.memmap) else path.stat().st_size - array.nbytes
    if path.stat().st_size != header + array.nbytes:
        raise FormatError(f"{path} has bytes behind its array", hint="make the folder again")
    if array.dtype != want or array.shape != (int(described["length"]),):
        raise FormatError(
            f"{path} holds {array.dtype}{list(array.shape)}, the marker says {want}[{described['length']}]",
            hint="the file belongs to another artefact; make the folder again",
        )
    return array


def check_blocks(folder: Path, stem: str, array: NDArray[Any], want: list[str]) -> None:
    """Hash an array against its block digests; ChecksumError names file and block."""
    found = [digest.hex() for digest in block_digests(array)]
    for k, (a, b) in enumerate(itertools.zip_longest(found, want)):
        if a != b:
            raise ChecksumError(
                f"the file changed: {folder / stem}.npy: block {k} (64 MiB each) differs from its digest",
                hint="restore it, or make the folder again",
            )


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
    other = next((one for one in _KINDS if one != marker and (folder / one).is_file()), None)
    if folder.is_file() or other is not None:
        what = f"holds {other}: it is the folder of another artefact" if other else "is a file, not a folder"
        raise ForeignArtefactError(f"{folder} {what}", hint="choose another folder")
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
