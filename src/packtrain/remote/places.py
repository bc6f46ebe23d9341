"""Where the copy of a remote file lies in the cache folder, and what is known of it.

    s3://bucket/set/a.jsonl  <->  CACHE/packtrain-remote/s3/bucket/set/a.jsonl       the file
                                  CACHE/packtrain-remote/.notes/3f….json             size, mark, digest

What a copy was made from is told by its place (`url_of`), so it needs no table, and no process needs another.
A URL's query and password stand in no copy, note or message.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any, NamedTuple

from .. import files, world
from ..errors import FormatError, InputError, SourceError
from ..files import StrPath
from .ranges import SCHEMES, is_remote

FOLDER = "packtrain-remote"

_full: dict[str, str] = {}  # copies whose URL has a query or a password, of this process

#: Folders of which the parts that nobody reads (`_OURS`) stay on this disk: writing a file there is a commit.
stays_here: set[str] = set()
_OURS = {"claim", "producer", "partial"}
_MARK = f"{os.sep}{FOLDER}{os.sep}"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")
_WORDS = re.compile(r"([\s'\"(]+)")


class Note(NamedTuple):
    """What is known of a copy."""

    size: int
    stamp: str
    sha256: str
    ends: str


def told_url(path: StrPath) -> str | None:
    """The URL that a path is, or that its copies stand for; None for any other path.

    Raises:
        InputError: a URL of a scheme that nothing is read from: its files would lie in a folder `foo:` here.
    """
    text = os.fspath(path)
    cut = _SCHEME.match(text)
    if cut is not None:
        if isinstance(path, Path) and not cut[2]:
            slashes = ":///" if cut[1] == "file" else "://"
            text = cut[1] + slashes + text[cut.end() :]  # a Path makes one slash of two
        if "://" not in text:
            return url_of(path)
        if not is_remote(text):
            if os.path.lexists(f"{cut[1]}:"):
                return None
            known = ", ".join(f"{name}://" for name in SCHEMES)
            raise InputError(
                f"{named(text)}: unknown scheme {cut[1]!r}",
                hint="a path of this machine has none" if cut[1] == "file" else f"known: {known}",
            )
    return text if is_remote(text) else url_of(text)


def url_of(path: StrPath) -> str | None:
    """The URL that a place of copies stands for; None for any other path."""
    text = os.fspath(path)
    if text in _full:
        return _full[text]
    for root in stays_here:
        if text.startswith(root + os.sep) and _OURS & set(text[len(root) :].split(os.sep)):
            return None
    return url_by_place(text)


def url_by_place(text: str) -> str | None:
    """The URL that a place itself says, as what lies below it does; None for any other path."""
    _, mark, rest = text.partition(_MARK)
    scheme, _, place = rest.partition(os.sep)
    if not mark or not place or scheme.startswith("."):
        return None
    return f"{scheme}://{place.replace(os.sep, '/')}"


def place_for(url: str, cache_dir: StrPath | None = None) -> str:
    """Where the copy of a URL lies, its query and password left out."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    if scheme.lower() in ("http", "https"):
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    parts = [part for part in (host.rpartition("@")[2], *path.split("/")) if part]
    if not parts or not all(map(is_name, parts)):
        raise SourceError(f"{named(url)} names no file", hint="a URL is scheme://host/path")
    root = os.path.abspath(cache_dir if cache_dir is not None else world.cache_dir())
    place = os.path.join(root, FOLDER, scheme.lower(), *parts)
    if url_of(place) != url.rstrip("/"):
        _full[place] = url
    return place


def remember(place: str, url: str) -> None:
    """Keep the whole URL of a place, where its place does not say it."""
    if url_of(place) != url:
        _full[place] = url


def named(url: str) -> str:
    """A URL for messages, without its query and password."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if scheme.lower().startswith("http"):
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def spelled(text: StrPath) -> str:
    """A text for people, in which places of copies are the URLs that they stand for.

    >>> spelled("/home/me/.cache/packtrain/packtrain-remote/s3/bucket/out holds no export")
    's3://bucket/out holds no export'
    """
    told = os.fspath(text)
    if _MARK not in told:
        return told
    return "".join(map(_spelled, _WORDS.split(told)))


def typed(place: StrPath) -> str:
    """A place in a command that somebody copies into a shell.

    >>> typed("my runs/a")
    "'my runs/a'"
    """
    return shlex.quote(spelled(place))


def _spelled(word: str) -> str:
    scheme, cut, below = word.partition(_MARK)[2].partition(os.sep)
    return f"{scheme}://{below}" if cut and scheme.isalnum() else word


def kept(path: StrPath) -> str:
    """A path as it is kept for later: a URL, or absolute."""
    url = told_url(path)
    return os.path.realpath(path) if url is None else url


def is_name(name: str) -> bool:
    """Whether a part of a URL can be the name of a file here."""
    plain = name not in ("", ".", "..") and "\0" not in name and os.sep not in name
    return plain and len(os.fsencode(name)) < 256


def root_of(place: str) -> str:
    """The folder of all copies that a place lies in."""
    return place[: place.index(_MARK)] + f"{os.sep}{FOLDER}"


def note_path(place: str, ending: str = ".json") -> str:
    root = root_of(place)
    key = hashlib.sha256(os.fsencode(os.path.relpath(place, root))).hexdigest()[:32]
    return os.path.join(root, ".notes", key + ending)


def note_of(place: str) -> Note | None:
    told = read_json(note_path(place))
    try:
        note = Note(**told)
        return note if type(note.size) is int and int(note.sha256[:7], 16) >= 0 else None
    except (TypeError, ValueError):
        return None


def put_note(place: str, note: Note) -> None:
    files.publish_json(note_path(place), note._asdict())


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file, empty where there is none."""
    try:
        told = files.read_json(path)
    except (FormatError, OSError):
        return {}
    return told if isinstance(told, dict) else {}


def is_copy(place: str, note: Note) -> bool:
    """Is the file at `place` the one that the note is of?"""
    with contextlib.suppress(OSError):
        status = os.stat(place)
        return status.st_size == note.size and status.st_mtime_ns == time_of(note)
    return False


def set_time(file: int | StrPath, note: Note) -> None:
    """Give a file the time by which it is known as the copy of `note`."""
    os.utime(file, ns=(time.time_ns(), time_of(note)))


def time_of(note: Note) -> int:
    """The time of a copy is of its content, so that one that was fetched again is the same file."""
    return (1_000_000_000 + int(note.sha256[:7], 16)) * 10**9
