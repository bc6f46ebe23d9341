"""Raw shards in a folder, and which of them are complete.

A shard is a file of records (JSONL, JSON, Parquet, a tar …) or a folder of sound clips with transcripts; a
folder of clips may also be the input itself. Names that start with a dot or an underscore, and names of
unfinished copies (`.tmp`, `.part` …), are passed over. A shard counts as complete:

    rename   as soon as it is seen: whoever writes it renames it into place
    marker   when NAME.done lies beside it (or `_SUCCESS` in it, or in the input folder)
    stable   when its size and times have not changed for so many seconds of this process's own clock

Times of files are compared for equality only, never with a clock.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from .. import files
from ..checks import number, one_of
from ..errors import SourceError
from ..extend import lookup, names
from ..sources._paths import natural
from ..waiting.poll import Clock, Watch, fresh_names

logger = logging.getLogger(__name__)

_READY = ("rename", "marker", "stable")

_UNFINISHED = (".tmp", ".part", ".partial", ".crdownload", ".download", ".swp", ".lock", "~")
_DONE = ".done"
_SUCCESS = "_SUCCESS"
#: Kinds of sources that are one file.
_FILE_KINDS = ("jsonl", "json", "parquet", "webdataset")

#: A file in the input folder that says: nothing follows.
_LAST = ("END", "_END")

Signature = tuple[tuple[str | int, ...], ...]


class RawFolder:
    """The input of a producer.

    Args:
        folder: where raw shards appear; or one file.
        ready: see the module.
        stable_s: seconds for `stable`.
    """

    def __init__(self, folder: str | Path, *, ready: str, stable_s: float, clock: Clock) -> None:
        one_of("ready", ready, _READY)
        number("stable_s", stable_s, 0)
        self.folder = Path(folder)
        self._ready, self._stable_s, self._clock = ready, stable_s, clock
        self._watches: dict[str, Watch] = {}
        self._told: set[str] = set()
        clips = lookup("sources", "audio_dir")
        self._tables, self._sounds = tuple(clips.TABLES), tuple(clips.SUFFIXES_OF_CLIPS)
        self._suffixes = tuple(
            suffix
            for kind in _FILE_KINDS
            if kind in names("sources")
            for suffix in lookup("sources", kind).SUFFIXES
        )

    def path(self, name: str) -> Path:
        """Where a shard lies; the input folder itself has the name `.`."""
        return self.folder if name == "." else self.folder / name

    def visible(self) -> list[str]:
        """Names of all shards, complete or not, in natural order."""
        if self.folder.is_file():
            return ["."]
        self.check_link(".")
        if not self.folder.exists():
            raise SourceError(f"{self.folder} does not exist", hint="make the folder that raw shards come to")
        listed = [name for name in fresh_names(self.folder) if not name.startswith((".", "_"))]
        if self._is_audio(self.folder, listed):
            return ["."]
        shards = [name for name in listed if name not in _LAST and self._is_shard(name)]
        return sorted(shards, key=natural)

    def complete(self, names: Iterable[str] | None = None) -> list[str]:
        """Those of `names` (default: of all shards) that are complete, in natural order."""
        listed = set(fresh_names(self.folder)) if self.folder.is_dir() else set()
        names = self.visible() if names is None else names
        return [name for name in names if self._is_complete(name, listed)]

    def expected(self) -> list[str]:
        """Shards that have to be taken before the input counts as read: all that are visible, or are marked.

        A shard whose marker never comes is left out, and named in the log.
        """
        visible = self.visible()
        if self._ready != "marker":
            return visible
        listed = set(fresh_names(self.folder)) if self.folder.is_dir() else set()
        complete = [name for name in visible if self._is_marked(name, listed)]
        for name in sorted(set(visible) - set(complete)):
            logger.warning("%s has no marker %s%s: it is left out", self.path(name), name, _DONE)
        return complete

    def check_link(self, name: str) -> None:
        """SourceError where a shard (or the input itself) is a link to what is not there; names both."""
        path = self.path(name)
        if _is_dangling(path):
            raise SourceError(
                f"{path} is a link to {os.readlink(path)}, which does not exist",
                hint="restore what it points to, or remove the link",
            )

    @property
    def says_last(self) -> bool:
        """Does a marker say that nothing follows?"""
        return any(name in _LAST for name in fresh_names(self.folder))

    def _is_shard(self, name: str) -> bool:
        lower = name.lower()
        if lower.endswith((*_UNFINISHED, _DONE)) or lower in self._tables:
            return False
        path = self.folder / name
        if path.is_dir():
            inner = fresh_names(path)
            if self._is_audio(path, inner):
                return True
            if any(one.lower().endswith(self._suffixes) for one in inner):
                self._tell(name, "holds files of records, and is passed over: folders are not entered")
            return False
        if _is_dangling(path):
            return "." not in name or lower.endswith(self._suffixes)  # without: a folder of clips, perhaps
        if not path.is_file():
            if path.exists():
                self._tell(name, "is no file and no folder, and is passed over")
            return False
        return lower.endswith(self._suffixes)

    def _tell(self, name: str, what: str) -> None:
        """A warning, once for each name."""
        if name not in self._told:
            self._told.add(name)
            logger.warning("%s %s", self.path(name), what)

    def _is_audio(self, path: Path, listed: list[str]) -> bool:
        """A folder of clips: it has a table of them, or transcripts beside them."""
        if not path.is_dir():
            return False
        lower = [name.lower() for name in listed]
        if path == self.folder and any(
            name.endswith(self._suffixes) and name not in self._tables for name in lower
        ):
            return False  # records, whose media may lie beside them
        stems = {os.path.splitext(name)[0] for name in lower if name.endswith((".txt", ".lab"))}
        clips = {os.path.splitext(name)[0] for name in lower if name.endswith(self._sounds)}
        spoken = any(name.endswith(".trans.txt") for name in lower) or bool(stems & clips)
        table = [name for name in lower if name in self._tables]
        return (spoken and bool(clips)) or (bool(table) and self._names_clips(path, table[0], clips))

    def _names_clips(self, path: Path, table: str, clips: set[str]) -> bool:
        if clips or table.endswith(".csv"):
            return True
        return any(name.lower().endswith(self._sounds) for _, _, many in os.walk(path) for name in many)

    def _is_complete(self, name: str, listed: set[str]) -> bool:
        path = self.path(name)
        if _is_dangling(path):
            self._tell(name, f"is a link to {os.readlink(path)}, which does not exist")
            return False
        if self._ready == "rename":
            return True
        if self._ready == "marker":
            return self._is_marked(name, listed)
        watch = self._watches.setdefault(name, Watch(self._clock))
        return watch.quiet(signature(path)) >= self._stable_s and watch.changes >= 0

    def _is_marked(self, name: str, listed: set[str]) -> bool:
        path = self.path(name)
        inner = fresh_names(path) if path.is_dir() else []
        return f"{name}{_DONE}" in listed or _SUCCESS in listed or _SUCCESS in inner


def _is_dangling(path: Path) -> bool:
    """Is this a link to what is not there?"""
    return path.is_symlink() and not path.exists()


def signature(path: Path) -> Signature:
    """Names, sizes and times of a shard's files: equal as long as nobody writes to it."""
    found = []
    for relative, file in _files(path):
        try:
            status = os.stat(file)
        except OSError:
            continue
        found.append((relative, *files.Stamp.of(status)))
    return tuple(found)


def stamp_of(path: Path) -> str:
    """Digest of `signature`."""
    return files.digest_json(signature(path))


def content_digest(path: Path) -> tuple[str, int]:
    """(SHA-256 over names and bytes of a shard's files, bytes)."""
    whole, size = hashlib.sha256(), 0
    for relative, file in _files(path):
        if file != path and _is_dangling(file):  # a clip that is missing: for the ledger
            whole.update(f"{relative}\0missing\n".encode())
            continue
        with open(file, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256")
            size += handle.tell()
        whole.update(f"{relative if path.is_dir() else ''}\0{digest.hexdigest()}\n".encode())
    return whole.hexdigest(), size


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.is_dir():
        yield path.name, path
        return
    for folder, folders, many in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(many):
            if not name.startswith("."):
                file = Path(folder) / name
                yield os.path.relpath(file, path), file
