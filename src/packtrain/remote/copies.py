"""Copies of remote files in the cache folder: the one way by which a URL becomes a path.

    bring("s3://bucket/set/part-*.jsonl")  ->  CACHE/packtrain-remote/s3/bucket/set/part-*.jsonl

A copy is whole: fetched range by range, each tried `TRIES` times with pauses that double, counted, hashed and
renamed into its place. Beside the tree of copies lies what is known of each (`.notes`): the size and the mark
(ETag, time) that the file system gave, and the digest. `bring` asks the file system once for what a URL
means; a copy whose size and mark are as noted is taken, any other is fetched again, and other content under
the same name is told ("the file changed"). Where the file system gives no mark, the ends of the file are
compared. Where it cannot be reached, copies of all that the URL meant when it was last brought are used.

Copies take at most `world.copies_limit()` bytes; those used last stay. One that went away, or that was left
for later (`later`), comes back when it is opened: whoever opens a file asks `present` where it is not there.
What a copy was made from is told by its place (`url_of`), so it needs no table, and no process needs another.
A URL's query and password stand in no copy, note or message.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from .. import files, world
from ..errors import FormatError, SampleError, SourceError, counted
from .ranges import SCHEMES, Remote, is_remote, stamp_of, system_of, tried

__all__ = ["FOLDER", "bring", "names", "place_of", "present", "renew", "send", "size_of", "url_of"]

log = logging.getLogger(__name__)

FOLDER = "packtrain-remote"
TRIES = 7
PIECE = 1 << 24  # bytes of one request
ENDS = 1 << 16
AT_ONCE = 8  # files
OLD = 3600.0  # seconds without a write after which a fetch was stopped

_MAGIC = re.compile(r"[*?\[]|\{[^{}]*\}")
_full: dict[str, str] = {}  # copies whose URL has a query or a password, of this process
_swept: set[str] = set()
_taken: dict[str, tuple[float, float]] = {}  # bytes of copies when last counted and fetched since
_listings: dict[str, dict[str, Mapping[str, Any]]] = {}  # the last look at a folder, by its place


class Note(NamedTuple):
    """What is known of a copy."""

    size: int
    stamp: str
    sha256: str
    ends: str


def bring(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    later: Callable[[str], object] | None = None,
) -> str:
    """The local path that stands for a URL, with copies of what it means; any other path as it is.

    Args:
        path: a file, a folder (with all in it), a glob or braces; or the place of its copies.
        cache_dir: default `world.cache_dir()`.
        later: name below the folder -> its file is fetched when it is opened.

    Raises:
        SourceError: it is not there, may not be read, cannot be reached, or takes more than copies may.
        MissingExtraError: fsspec, or the package of this scheme, is not installed.
    """
    text, url = os.fspath(path), _url(path)
    if url is None:
        return text
    place = _place(url, cache_dir)
    listed = _note_path(place, ".listed.json")
    _sweep(os.path.dirname(listed))
    _sweep(os.path.dirname(place))
    told = _named(url)
    try:
        root, found = _found(url, cache_dir)
    except SampleError as error:
        held = _read_json(listed).get("names")
        if error.reason != "unreachable_media" or not isinstance(held, list) or not _all_there(place, held):
            hint = None if error.reason == "missing_media" else error.hint and "run it again when it is up"
            raise SourceError(error.message, hint=hint) from None
        log.warning("%s; the copies in %s are used", error.message, place)
        return place
    need = sum(int(info.get("size") or 0) for name, info in found.items() if not (later and later(name)))
    if need > (limit := 0.9 * world.copies_limit(_root(place))):
        raise SourceError(
            f"{told} takes {need / 1e9:,.1f} GB, copies may take {limit / 1e9:,.1f} GB in {_root(place)}",
            hint="set PACKTRAIN_REMOTE_GB, or PACKTRAIN_CACHE to a larger disk, or name fewer files",
        )
    _forget(place, root, found)
    if set(found) != {""}:
        _listings[root] = dict(found)
    jobs = {os.path.join(root, name) if name else root: (_below(url, name), found[name]) for name in found}
    _full.update({at: one for at, (one, _) in jobs.items() if url_of(at) != one})
    todo = [at for at, name in zip(jobs, found, strict=True) if not (later and later(name))]
    for at in jobs.keys() - set(todo):
        _let_go_if_changed(at, jobs[at][1])
    with _as_source(), ThreadPoolExecutor(min(AT_ONCE, max(1, len(todo)))) as pool:
        for _ in pool.map(lambda at: _fetch(at, *jobs[at]), todo):
            pass
    if not all(map(os.path.isfile, todo)):
        raise SourceError(
            f"{told}: its copies do not fit beside those that others use in {_root(place)}",
            hint="set PACKTRAIN_REMOTE_GB to what all of them take",
        )
    if later is None:
        files.publish_json(listed, {"names": sorted(os.path.relpath(at, place) for at in todo)})
    return place


def place_of(path: str | os.PathLike[str]) -> str:
    """The place of copies that stands for a URL, with nothing fetched; any other path as it is."""
    url = _url(path)
    return os.fspath(path) if url is None else _place(url, None)


def present(path: str | os.PathLike[str]) -> bool:
    """Whether a file that is not there is a copy, which is fetched now.

    Raises:
        SourceError: it is not behind the URL either, or cannot be reached.
    """
    text = os.fspath(path)
    if (url := url_of(text)) is None:
        return False
    if not os.path.isfile(text):
        with _as_source():
            _fetch(text, url, None)
    return True


def renew(path: str | os.PathLike[str]) -> None:
    """Fetch a copy again where the file behind it has changed; a path that is none stays as it is.

    Raises:
        SourceError: as `present`.
    """
    text = os.fspath(path)
    if (url := url_of(text)) is not None:
        listed = _listings.get(os.path.dirname(text), {}).get(os.path.basename(text))
        with _as_source():
            _fetch(text, url, listed)


def names(folder: str | os.PathLike[str]) -> list[str] | None:
    """What a folder of copies holds now behind its URL, sorted; None for a folder that is none.

    Raises:
        SourceError: it cannot be reached.
    """
    text = os.fspath(folder)
    if (url := url_of(text)) is None:
        return None
    with _as_source():
        system, path = system_of(url, url)
        try:
            rows = tried(url, lambda: _fresh(system).ls(path, detail=True), TRIES)
        except SampleError as error:
            if error.reason != "missing_media":
                raise
            rows = []
    found = {str(row["name"]).rstrip("/").rpartition("/")[2]: row for row in rows}
    _listings[text] = {name: row for name, row in found.items() if row.get("type") != "directory"}
    return sorted(name for name in found if _is_name(name))


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of a file, or of the file that a copy stands for, as the last look at its folder said.

    Raises:
        OSError: it is not there.
    """
    text = os.fspath(path)
    listed = _listings.get(os.path.dirname(text), {}).get(os.path.basename(text))
    if listed is not None and listed.get("size") is not None:
        return int(listed["size"])
    return os.stat(text).st_size


def send(path: str | os.PathLike[str]) -> None:
    """Put a file that was written at the place of a copy behind its URL; one that is no copy stays local.

    Raises:
        SourceError: it may not be written, or cannot be reached.
    """
    text = os.fspath(path)
    if (url := url_of(text)) is None:
        return
    with _as_source():
        system, remote = system_of(url, url)
        tried(url, lambda: system.put_file(text, remote), TRIES)
        size = tried(url, lambda: _fresh(system).info(remote), TRIES).get("size")
    if size != os.path.getsize(text):
        raise SourceError(f"{url} has {size} bytes after {os.path.getsize(text):,} were written")


def url_of(path: str | os.PathLike[str]) -> str | None:
    """The URL that a place of copies stands for; None for any other path."""
    text = os.fspath(path)
    if text in _full:
        return _full[text]
    _, mark, rest = text.partition(f"{os.sep}{FOLDER}{os.sep}")
    scheme, _, place = rest.partition(os.sep)
    if not mark or not place or scheme.startswith("."):
        return None
    return f"{scheme}://{place.replace(os.sep, '/')}"


# --------------------------------------------------------------------------------------------
def _url(path: str | os.PathLike[str]) -> str | None:
    """The URL that a path is, or that its copies stand for."""
    text = os.fspath(path)
    if isinstance(path, Path) and (cut := re.match(r"([a-z0-9]+):/(?!/)", text)) and cut[1] in SCHEMES:
        text = f"{cut[1]}://{text[cut.end() :]}"  # a Path makes one slash of two
    return text if is_remote(text) else url_of(text)


def _place(url: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """Where the copy of a URL lies, its query and password left out."""
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    if scheme.lower() in ("http", "https"):
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    parts = [part for part in (host.rpartition("@")[2], *path.split("/")) if part]
    if not parts or not all(map(_is_name, parts)):
        raise SourceError(f"{_named(url)} names no file", hint="a URL is scheme://host/path")
    root = os.path.abspath(cache_dir if cache_dir is not None else world.cache_dir())
    place = os.path.join(root, FOLDER, scheme.lower(), *parts)
    if url_of(place) != url.rstrip("/"):
        _full[place] = url
    return place


def _found(url: str, cache_dir: str | os.PathLike[str] | None) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """(place, name below it -> what the file system says) of the files that a URL means; "": it is a file."""
    system, path = system_of(url, _named(url))
    system = _fresh(system)
    web = url.lower().startswith("http")
    magic = _MAGIC.search(url.partition("?")[0] if web else url)
    if magic is None:
        info = tried(_named(url), lambda: system.info(path), TRIES)
        page = web and info.get("mimetype") == "text/html" and not path.endswith((".html", ".htm"))
        if info.get("type") != "directory" and not url.endswith("/") and not page:
            return _place(url, cache_dir), {"": info}
        base, rows = url.rstrip("/"), tried(_named(url), lambda: system.find(path, detail=True), TRIES)
    else:
        base = url[: magic.start()].rpartition("/")[0]
        rows = {}
        for one in _braces(url):
            rows |= tried(_named(url), lambda one=one: system.glob(one, detail=True), TRIES)  # type: ignore[misc]
    start = str(system._strip_protocol(base)).rstrip("/") + "/"
    found = {}
    for name, info in rows.items():
        below = str(name)[len(start) :] if str(name).startswith(start) else ""
        if info.get("type") != "directory" and below and all(map(_is_name, below.split("/"))):
            found[below] = info
    if not found:
        raise SampleError("missing_media", f"{_named(url)} {'matches' if magic else 'holds'} no files")
    return _place(base, cache_dir), found


def _braces(url: str) -> list[str]:
    """The URLs that `{a,b}` and `{000..123}` stand for."""
    found = re.search(r"\{([^{}]*)\}", url)
    if found is None:
        return [url]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    choices = found[1].split(",")
    if span is not None:
        choices = [str(one).zfill(len(span[1])) for one in range(int(span[1]), int(span[2]) + 1)]
    return [url[: found.start()] + one + rest for one in choices for rest in _braces(url[found.end() :])]


def _fetch(place: str, url: str, info: Mapping[str, Any] | None) -> None:
    """See that the copy at `place` is what is behind its URL now."""
    root, told = _root(place), _named(url)
    if info is not None and info.get("size") and stamp_of(info) and _is_of(place, info):
        return  # nothing is asked
    with _locked(root, place):
        system, path = system_of(url, told)
        remote = Remote(_fresh(system), path, told, info if info and info.get("size") else None, TRIES)
        note, stamp = _note(place), stamp_of(remote.info)
        same = _is_of(place, {**remote.info, "size": remote.size})
        if same and (stamp or note is None or note.ends == _ends_of(remote)):
            return  # another process fetched it
        _room(root, remote.size)
        _sweep(os.path.dirname(place))
        log.info("fetching %s (%s)", told, counted(remote.size, "bytes"))
        digest, before = hashlib.sha256(), _mark(url) if remote.size > PIECE else ""
        with files.publish(place) as handle:
            for offset in range(0, remote.size, PIECE):
                block = remote.read(offset, PIECE, TRIES)
                digest.update(block)
                handle.write(block)
            if before and _mark(url) != before:  # between its ranges
                raise SourceError(f"{told} changed while it was read", hint="open it again")
            fetched = Note(remote.size, stamp, digest.hexdigest(), "" if stamp else _ends_of(remote))
            handle.flush()
            os.utime(handle.fileno(), ns=(time.time_ns(), _time_of(fetched)))
        files.publish_json(_note_path(place), fetched._asdict())
    if note is not None and note.sha256 != fetched.sha256:
        log.warning("the file changed: %s holds other content than when it was brought here", told)


def _sweep(folder: str) -> None:
    """Remove what fetches that were stopped left in a folder an hour ago or more; once in a process."""
    if folder in _swept or not os.path.isdir(folder):
        return
    _swept.add(folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if files.is_leftover(entry.name) and time.time() - entry.stat().st_ctime > OLD:
                    files.remove(entry.path)


def _mark(url: str) -> str:
    """Size and mark of a file now."""
    system, path = system_of(url, _named(url))
    remote = Remote(_fresh(system), path, _named(url), None, TRIES)
    return f"{remote.size} {stamp_of(remote.info)}"


def _fresh(system: Any) -> Any:
    """The file system, with nothing remembered of what it held."""
    system.invalidate_cache()
    return system


def _ends_of(remote: Remote) -> str:
    held = remote.read(0, ENDS, TRIES) + remote.read(max(0, remote.size - ENDS), ENDS, TRIES)
    return hashlib.sha256(held).hexdigest()


def _is_of(place: str, info: Mapping[str, Any]) -> bool:
    """Whether a copy is of the size and mark that a file system tells; it is used now then."""
    note = _note(place)
    if note is None or (note.size, note.stamp) != (info["size"], stamp_of(info)) or not _is_copy(place, note):
        return False
    with contextlib.suppress(OSError):
        os.utime(_note_path(place))
    return True


def _is_copy(place: str, note: Note) -> bool:
    with contextlib.suppress(OSError):
        status = os.stat(place)
        return status.st_size == note.size and status.st_mtime_ns == _time_of(note)
    return False


def _time_of(note: Note) -> int:
    """The time of a copy is of its content, so that one that was fetched again is the same file."""
    return (1_000_000_000 + int(note.sha256[:7], 16)) * 10**9


def _note(place: str) -> Note | None:
    told = _read_json(_note_path(place))
    try:
        note = Note(**told)
        return note if type(note.size) is int and int(note.sha256[:7], 16) >= 0 else None
    except (TypeError, ValueError):
        return None


def _read_json(path: str) -> dict[str, Any]:
    try:
        told = files.read_json(path)
    except (FormatError, OSError):
        return {}
    return told if isinstance(told, dict) else {}


def _root(place: str) -> str:
    return place[: place.index(f"{os.sep}{FOLDER}{os.sep}")] + f"{os.sep}{FOLDER}"


def _note_path(place: str, ending: str = ".json") -> str:
    root = _root(place)
    key = hashlib.sha256(os.fsencode(os.path.relpath(place, root))).hexdigest()[:32]
    return os.path.join(root, ".notes", key + ending)


def _below(url: str, name: str) -> str:
    """The URL of a file that a folder or pattern means."""
    if not name:
        return url
    magic = _MAGIC.search(url.partition("?")[0] if url.lower().startswith("http") else url)
    base = url if magic is None else url[: magic.start()].rpartition("/")[0]
    return f"{base.rstrip('/')}/{name}"


def _forget(place: str, root: str, found: Mapping[str, Any]) -> None:
    """Remove copies of files that a URL means no more."""
    if set(found) == {""}:
        return
    if _MAGIC.search(place):
        held = [path for one in _braces(place) for path in glob.glob(one, recursive=True)]
    else:
        held = [os.path.join(folder, name) for folder, _, inner in os.walk(root) for name in inner]
    for path in held:
        if os.path.isfile(path) and os.path.relpath(path, root).replace(os.sep, "/") not in found:
            files.remove(path)


def _let_go_if_changed(place: str, info: Mapping[str, Any]) -> None:
    note, stamp = _note(place), stamp_of(info)
    if note is not None and stamp and (note.size, note.stamp) != (info.get("size"), stamp):
        files.remove(place)


def _all_there(place: str, held: list[Any]) -> bool:
    paths = [os.path.normpath(os.path.join(place, str(name))) for name in held]
    return all((note := _note(path)) is not None and _is_copy(path, note) for path in paths)


def _room(root: str, size: int) -> None:
    """Let copies go that were not used for longest, until `size` more bytes fit."""
    limit = world.copies_limit(root)
    taken, since = _taken.get(root, (limit, limit))
    if taken + size <= limit and since < limit / 20:  # others may have fetched something too
        _taken[root] = (taken + size, since + size)
        return
    held: list[tuple[float, int, str]] = []
    for folder, inner, found in os.walk(root):
        inner[:] = [name for name in inner if not (folder == root and name.startswith("."))]
        for path in (os.path.join(folder, name) for name in found):
            with contextlib.suppress(OSError):
                held.append((os.stat(_note_path(path)).st_mtime, os.stat(path).st_size, path))
    total, gone = sum(bytes_ for _, bytes_, _ in held) + size, False
    for _, bytes_, path in sorted(held):
        if total <= (limit if not gone else 0.95 * limit):
            break
        gone = True
        with contextlib.suppress(OSError):
            files.remove(path)
            log.info("%s is let go: copies take at most %.1f GB", path, limit / 1e9)
        total -= bytes_
    _taken[root] = (total, 0)


def _is_name(name: str) -> bool:
    """Whether a part of a URL can be the name of a file here."""
    return name not in ("", ".", "..") and "\0" not in name and os.sep not in name and len(name) < 256


def _named(url: str) -> str:
    """A URL for messages, without its query and password."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if scheme.lower().startswith("http"):
        path = re.split(r"[?#]", path, maxsplit=1)[0]
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


@contextlib.contextmanager
def _as_source() -> Iterator[None]:
    try:
        yield
    except SampleError as error:
        raise SourceError(error.message, hint="run it again when the network is up") from None


@contextlib.contextmanager
def _locked(root: str, place: str) -> Iterator[None]:
    """One process of a machine at a time fetches a file."""
    number = hashlib.sha256(os.fsencode(place)).hexdigest()[:2]
    with files.locked(Path(root) / ".locks" / number):
        yield
