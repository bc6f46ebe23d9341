"""The folder of an export: packs as files, and the manifests that vouch for them.

    OUT/pack-000000-000.tar           shards (webdataset, energon); ps_00000000.json … (raw); chunks
        pack-000000-000.tar.idx       energon: where its samples start
        .packtrain/key.json           what is exported: plan, source, format and its settings; first
                   part-000000.json   packs [first, stop) are there: the files with size, SHA-256, first and
                                      last key, and per pack its place and CRC-32; last of its part
                   plan/              the plan itself, so that the folder stands alone
                   origin.json        where plan and source were; outside every digest
                   export.json        marker: the counts of all parts; last of all

Our own files lie in a hidden folder because readers of such folders take every `.json` they see. A part holds
`maxcount` packs whoever writes it, so its bytes do not depend on workers, stops or the order of parts.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from .. import extend, files
from ..errors import ChecksumError, FormatError, InputError, UnknownNameError
from ..remote.copies import bring, entries, size_of
from ..remote.places import url_of
from ._folders import check_seal, sealed

SCHEMA_EXPORT = "packtrain-export-1"
FOLDER, EXPORT = ".packtrain", "export.json"

#: What readers of a format take for its data, and what an export names its files.
_TAR = (re.compile(r".*\.tar(\.idx)?"), re.compile(r"pack-\d{6,}-\d{3,}\.tar(\.idx)?"))
_FILES = {
    "raw": (re.compile(r".*"), re.compile(r"ps_\d{8,}\.\w+(\.\w+)?")),
    "webdataset": _TAR,
    "energon": _TAR,
    "chunks": (re.compile(r"chunk_.*|.*\.arrow"), re.compile(r"chunk_\d{8,}\.(arrow|json)")),
}

#: Files that come when they are opened: packs, and what comes and goes while others write.
_LATER = re.compile(r"(pack-\d+-\d+\.tar|chunk_\d+\.arrow|ps_\d+\.[^/]*|(.*/)?(claim|producer)/.*)$")


def hidden(out: Path, *names: str) -> Path:
    """A file of ours in an export."""
    return Path(out).joinpath(FOLDER, *names)


def key_path(out: Path) -> Path:
    return hidden(out, "key.json")


def part_path(out: Path, number: int) -> Path:
    return hidden(out, f"part-{number:06d}.json")


def at(out: str | Path) -> Path:
    """The folder that an export, or another artefact, is read from.

    One behind a URL: the copies of its manifests and plan; those of its packs come when they are opened.
    """
    return Path(bring(out, later=_LATER.match))


def look_again(out: Path) -> None:
    """Bring what others have written since to an export behind a URL."""
    if url_of(out) is not None:
        bring(out, later=_LATER.match, writing=True)


def is_export(folder: Path) -> bool:
    """Is this an export, finished or not?"""
    return key_path(folder).is_file()


def export_of(out: Path) -> dict[str, Any]:
    """The marker of a finished export.

    Raises:
        FormatError: there is none, or it is not finished. ChecksumError: it was edited.
    """
    path = hidden(out, EXPORT)
    if not path.is_file():
        if is_export(out):
            raise FormatError(
                f"{out} is an unfinished export",
                hint="run the same command again; after a share of it: packtrain merge OUT",
            )
        raise FormatError(f"{out} holds no export", hint="name the OUT of packtrain export")
    return check_seal(path.parent, path.name, SCHEMA_EXPORT)


def publish_part(out: Path, number: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest of a part whose files are all there."""
    marker = sealed({"schema": SCHEMA_EXPORT, "part": number, **told})
    files.publish_json(part_path(out, number), marker)
    return marker


def publish_export(out: Path, told: Mapping[str, Any]) -> None:
    """Write the marker of an export whose parts are all there."""
    files.publish_json(hidden(out, EXPORT), sealed({"schema": SCHEMA_EXPORT, **told}))


def part_of(out: Path, number: int) -> dict[str, Any] | None:
    """The manifest of a part that is whole (its files have their sizes), or None."""
    path = part_path(out, number)
    try:
        told = check_seal(path.parent, path.name)
        whole = all(size_of(Path(out) / f["name"]) == f["bytes"] for f in told["files"])
    except (InputError, AssertionError, OSError, KeyError, TypeError):
        return None
    return told if whole else None


def read_parts(out: Path, count: int) -> list[dict[str, Any]]:
    """The manifests of all parts of a finished export.

    Raises:
        FormatError: one is missing. ChecksumError: one was edited.
    """
    return [check_seal(hidden(out), part_path(out, number).name) for number in range(count)]


def check_file(out: Path, row: Mapping[str, Any]) -> None:
    """A file of an export against its row in a manifest.

    Raises:
        ChecksumError: it is missing, was cut or edited.
    """
    path = Path(out) / row["name"]
    if not path.is_file():
        first = f" ({row['first_key']} to {row['last_key']})" if "first_key" in row else ""
        raise ChecksumError(f"{path} is missing{first}", hint="copy it again, or export again")
    size = path.stat().st_size
    if size != row["bytes"] or files.sha256_file(path) != row["sha256"]:
        raise ChecksumError(
            f"{path} was cut or edited: {size:,} of {row['bytes']:,} bytes, or not those exported",
            hint="copy it again, or export again",
        )


def patterns(format: str) -> tuple[re.Pattern[str], re.Pattern[str]] | None:
    """What readers of a format take for its data, and how an export names its files; None: nobody says.

    A format that is a plug-in of its own says it as `FILES`, two patterns.
    """
    if format in _FILES:
        return _FILES[format]
    try:
        taken, ours = extend.lookup("export", format).FILES
    except (UnknownNameError, AttributeError):
        return None
    return re.compile(taken), re.compile(ours)


def strays(out: Path, format: str, listed: Container[str] | None = None) -> list[str]:
    """Files that a reader would take for data of the export, but that are not of it; hidden ones are none.

    Args:
        listed: the names of its files; None: whatever is named as its files are.
    """
    known_as = patterns(format)
    if known_as is None:
        return []
    taken, ours = known_as
    found = []
    for path in [Path(out) / name for name in entries(out)]:
        name = path.name
        known = ours.fullmatch(name) is not None if listed is None else name in listed
        if not name.startswith(".") and not known and taken.fullmatch(name) and not path.is_dir():
            found.append(name)
    return sorted(found)
