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
Where a copy lies and what is noted of it: `remote.places`. Folders that are written: `remote.outputs`.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .. import files, world
from ..errors import InputError, SampleError, SourceError, counted
from ..files import StrPath
from . import places
from .ranges import Remote, as_source, fresh, stamp_of, system_of, tried

log = logging.getLogger(__name__)

TRIES = 7
LOOKS = 4  # at a folder of which files go while they are read
PIECE = 1 << 24  # bytes of one request
ENDS = 1 << 16
AT_ONCE = 8  # files
_MOST = 1_000_000  # files that braces may stand for
OLD = 3600.0  # seconds without a write after which a fetch was stopped

MAGIC = re.compile(r"[*?\[]|\{[^{}]*\}")
SIGNS = re.compile(r"beat\.json|claim\.\d+")  # of a writer, which change as long as it lives
_swept: set[str] = set()
_taken: dict[str, tuple[float, float]] = {}  # bytes of copies when last counted and fetched since
_listings: dict[str, dict[str, Mapping[str, Any]]] = {}  # the last look at a folder, by its place


def bring(
    path: StrPath,
    cache_dir: StrPath | None = None,
    *,
    later: Callable[[str], object] | None = None,
    writing: bool = False,
) -> str:
    """The local path that stands for a URL, with copies of what it means; any other path as it is.

    Args:
        path: a file, a folder (with all in it), a glob or braces; or the place of its copies.
        cache_dir: default `world.cache_dir()`.
        later: name below the folder -> its file is fetched when it is opened.
        writing: a folder that is written: it may be absent, and copies do not stand for it.

    Raises:
        SourceError: it is not there, may not be read, cannot be reached, or takes more than copies may.
        MissingExtraError: fsspec, or the package of this scheme, is not installed.
    """
    with as_source():
        for left in reversed(range(LOOKS)):
            try:
                return _brought(path, cache_dir, later, writing)
            except SampleError as error:
                if not left or error.reason != "missing_media":
                    raise  # else a writer at work removed it since it was listed
    raise AssertionError  # the loop returns or raises


def _brought(
    path: StrPath, cache_dir: StrPath | None, later: Callable[[str], object] | None, writing: bool
) -> str:
    text, url = os.fspath(path), places.told_url(path)
    if url is None:
        return text
    place = places.place_for(url, cache_dir)
    listed = places.note_path(place, ".listed.json")
    _sweep(os.path.dirname(listed))
    _sweep(os.path.dirname(place))
    told = places.named(url)
    try:
        base, found = _found(url)
    except SampleError as error:
        return _without(error, place, listed, writing=writing)
    root, is_file = places.place_for(base, cache_dir), set(found) == {""}
    if writing and is_file:
        raise InputError(f"{told} is a file, not a folder", hint="choose another folder")
    _check_room(told, place, [info for name, info in found.items() if not (later and later(name))])
    if not is_file:
        _forget(place, root, found)
        _listings[root] = dict(found)
    jobs = {os.path.join(root, name): (f"{base}/{name}", found[name]) for name in found}
    jobs = {root: (url, found[""])} if is_file else jobs
    for at, (one, _) in jobs.items():
        places.remember(at, one)
    todo = [at for at, name in zip(jobs, found, strict=True) if not (later and later(name))]
    for at in jobs.keys() - set(todo):
        _let_go_if_changed(at, jobs[at][1])
    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(todo)))) as pool:
        for _ in pool.map(lambda at: _fetch(at, *jobs[at]), todo):
            pass
    if not all(map(os.path.isfile, todo)):
        raise SourceError(
            f"{told}: its copies do not fit beside those that others use in {places.root_of(place)}",
            hint="set PACKTRAIN_REMOTE_GB to what all of them take",
        )
    if later is None and not writing:
        files.publish_json(listed, {"names": sorted(os.path.relpath(at, place) for at in todo)})
    return place


def _without(error: SampleError, place: str, listed: str, *, writing: bool) -> str:
    """The place that stands for a URL whose file system does not answer, or says that nothing is there."""
    if writing and error.reason == "missing_media":
        return _empty(place)
    held = places.read_json(listed).get("names")
    away = error.reason == "unreachable_media" and not writing
    if not (away and isinstance(held, list) and _all_there(place, held)):
        hint = "run it again when it is up" if error.reason == "unreachable_media" else error.hint
        raise SourceError(error.message, hint=hint) from None
    log.warning("%s; the copies in %s are used", error.message, place)
    return place


def _check_room(told: str, place: str, found: Sequence[Mapping[str, Any]]) -> None:
    """Refuse files that take more than copies may."""
    root, need = places.root_of(place), sum(int(info.get("size") or 0) for info in found)
    if need > (limit := 0.9 * world.copies_limit(root)):
        raise SourceError(
            f"{told} takes {need / 1e9:,.1f} GB, copies may take {limit / 1e9:,.1f} GB in {root}",
            hint="set PACKTRAIN_REMOTE_GB, or PACKTRAIN_CACHE to a larger disk, or name fewer files",
        )


def place_of(path: StrPath) -> str:
    """The place of copies that stands for a URL, with nothing fetched; any other path as it is."""
    url = places.told_url(path)
    return os.fspath(path) if url is None else places.place_for(url, None)


def present(path: StrPath) -> bool:
    """Whether a file that is not there is a copy, which is fetched now.

    Raises:
        SourceError: it is not behind the URL either, or cannot be reached.
    """
    text = os.fspath(path)
    if (url := places.url_of(text)) is None:
        return False
    if not os.path.isfile(text):
        with as_source():
            _fetch(text, url, None)
    return True


def renew(path: StrPath) -> None:
    """Fetch a copy again where the file behind it has changed; a path that is none stays as it is.

    Raises:
        SourceError: as `present`.
    """
    text = os.fspath(path)
    if (url := places.url_of(text)) is not None:
        listed = _listings.get(os.path.dirname(text), {}).get(os.path.basename(text))
        with as_source():
            _fetch(text, url, listed)


def names(folder: StrPath) -> list[str] | None:
    """What a folder of copies holds now behind its URL, sorted; None for a folder that is none.

    Raises:
        SourceError: it cannot be reached.
    """
    text = os.fspath(folder)
    if (url := places.url_of(text)) is None:
        return None
    with as_source():
        system, path = system_of(url, url)
        try:
            rows = tried(url, lambda: fresh(system).ls(path, detail=True), TRIES)
        except SampleError as error:
            if error.reason != "missing_media":
                raise
            rows = []
    found = {str(row["name"]).rstrip("/").rpartition("/")[2]: row for row in rows}
    _listings[text] = {name: row for name, row in found.items() if row.get("type") != "directory"}
    return sorted(name for name in found if places.is_name(name))


def opened(path: StrPath) -> Path:
    """The folder or file that is read: its copies where a URL is given, or where they are gone.

    Raises:
        SourceError: as `bring`.
    """
    local = Path(place_of(path))
    return local if os.path.exists(local) and os.fspath(local) == os.fspath(path) else Path(bring(path))


def entries(folder: StrPath) -> list[str]:
    """The names in a folder, sorted, as `names` where it is one of copies; none where it is not there.

    Raises:
        SourceError: it cannot be reached.
    """
    far = names(folder)
    if far is not None:
        return far
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def size_of(path: StrPath) -> int:
    """Bytes of a file, or of the file that a copy stands for, as the last look at its folder said.

    Raises:
        OSError: it is not there.
    """
    listed = listed_as(os.fspath(path))
    if listed is not None and listed.get("size") is not None:
        return int(listed["size"])
    return os.stat(path).st_size


def listed_as(place: str) -> Mapping[str, Any] | None:
    """What the last look at the folder of a copy, or at one above it, said of its file."""
    folder, name = os.path.split(place)
    while name and folder and not folder.endswith(os.sep):
        if (held := _listings.get(folder, {}).get(name.replace(os.sep, "/"))) is not None:
            return held
        folder, head = os.path.split(folder)
        name = os.path.join(head, name)
    return None


def put_listed(place: str, info: Mapping[str, Any] | None) -> None:
    """Put what is behind the URL of a place now into the looks at its folders; None: nothing is."""
    for folder, held in list(_listings.items()):
        if place.startswith(folder + os.sep):
            name = place[len(folder) + 1 :].replace(os.sep, "/")
            if info is None:
                held.pop(name, None)
            else:
                held[name] = info


# --------------------------------------------------------------------------------------------
def _found(url: str) -> tuple[str, dict[str, Mapping[str, Any]]]:
    """(URL, name below it -> what the file system says) of the files that a URL means; "": it is a file."""
    told = places.named(url)
    system, path = system_of(url, told)
    system = fresh(system)
    web = url.lower().startswith("http")
    magic = MAGIC.search(url.partition("?")[0] if web else url)
    if magic is None:
        info = tried(told, lambda: system.info(path), TRIES)
        page = web and info.get("mimetype") == "text/html" and not path.endswith((".html", ".htm"))
        if info.get("type") != "directory" and not url.endswith("/") and not page:
            return url, {"": info}
        base, rows = url.rstrip("/"), tried(told, lambda: system.find(path, detail=True), TRIES)
    else:
        base = url[: magic.start()].rpartition("/")[0]
        rows = {}
        for one in braces(url):
            rows |= tried(told, lambda one=one: system.glob(one, detail=True), TRIES)  # type: ignore[misc]
    start = str(system._strip_protocol(base)).rstrip("/") + "/"
    found = {}
    for name, info in rows.items():
        below = str(name)[len(start) :] if str(name).startswith(start) else ""
        if info.get("type") != "directory" and below and all(map(places.is_name, below.split("/"))):
            found[below] = info
    if not found:
        raise SampleError("missing_media", f"{told} {'matches' if magic else 'holds'} no files")
    return base.rstrip("/"), found


def braces(text: str) -> list[str]:
    """The paths or URLs that `{a,b}` and `{000..123}` stand for.

    Raises:
        SourceError: a range that counts down, or of very many.
    """
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        return [text]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", found[1])
    choices = found[1].split(",")
    if span is not None:
        first, last = int(span[1]), int(span[2])
        if not 0 <= last - first < _MOST:
            raise SourceError(f"{text}: {found[1]} is no range of files")
        choices = [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
    return [text[: found.start()] + one + rest for one in choices for rest in braces(text[found.end() :])]


def _fetch(place: str, url: str, info: Mapping[str, Any] | None) -> None:
    """See that the copy at `place` is what is behind its URL now."""
    root, told = places.root_of(place), places.named(url)
    if info is not None and info.get("size") and stamp_of(info) and _is_of(place, info):
        return  # nothing is asked
    number = hashlib.sha256(os.fsencode(place)).hexdigest()[:2]
    with files.locked(Path(root) / ".locks" / number):  # one process of a machine at a time fetches a file
        remote = _remote(url, info if info and info.get("size") else None)
        note, stamp = places.note_of(place), stamp_of(remote.info)
        same = _is_of(place, {**remote.info, "size": remote.size})
        if same and (stamp or note is None or note.ends == _ends_of(remote)):
            return  # another process fetched it
        make_room(root, remote.size)
        _sweep(os.path.dirname(place))
        log.info("fetching %s (%s)", told, counted(remote.size, "bytes"))
        digest, before = hashlib.sha256(), _mark(url) if remote.size > PIECE else ""
        first = last = b""
        with files.publish(place, here=True) as handle:
            for offset in range(0, remote.size, PIECE):
                block = remote.read(offset, PIECE, TRIES)
                digest.update(block)
                handle.write(block)
                first, last = first + block[: ENDS - len(first)], (last + block)[-ENDS:]
            ends = "" if stamp else _ends_of(remote)
            moved = ends and ends != hashlib.sha256(first + last).hexdigest()
            if moved or (before and _mark(url) != before):  # between its ranges
                raise SourceError(f"{told} changed while it was read", hint="open it again")
            fetched = places.Note(remote.size, stamp, digest.hexdigest(), ends)
            handle.flush()
            places.set_time(handle.fileno(), fetched)
        places.put_note(place, fetched)
    if note is not None and note.sha256 != fetched.sha256 and not SIGNS.fullmatch(os.path.basename(place)):
        log.warning("the file changed: %s holds other content than when it was brought here", told)


def _remote(url: str, info: Mapping[str, Any] | None) -> Remote:
    system, path = system_of(url, places.named(url))
    return Remote(fresh(system), path, places.named(url), info, TRIES)


def _sweep(folder: str) -> None:
    """Remove what fetches that were stopped left in a folder an hour ago or more; once in a process."""
    if folder in _swept or not os.path.isdir(folder):
        return
    _swept.add(folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if files.is_leftover(entry.name) and time.time() - entry.stat().st_ctime > OLD:
                    files.remove(entry.path, here=True)


def _mark(url: str) -> str:
    """Size and mark of a file now."""
    remote = _remote(url, None)
    return f"{remote.size} {stamp_of(remote.info)}"


def _ends_of(remote: Remote) -> str:
    return ends_of(remote.size, lambda offset, count: remote.read(offset, count, TRIES))


def ends_of(size: int, read: Callable[[int, int], bytes]) -> str:
    """Digest of the first and last 64 KiB of a file, read by (offset, bytes)."""
    return hashlib.sha256(read(0, ENDS) + read(max(0, size - ENDS), ENDS)).hexdigest()


def _is_of(place: str, info: Mapping[str, Any]) -> bool:
    """Whether a copy is of the size and mark that a file system tells; it is used now then."""
    note = places.note_of(place)
    if (
        note is None
        or (note.size, note.stamp) != (info["size"], stamp_of(info))
        or not places.is_copy(place, note)
    ):
        return False
    with contextlib.suppress(OSError):
        os.utime(places.note_path(place))
    return True


def _empty(place: str) -> str:
    """The place of a folder that is not behind its URL, without copies."""
    _forget(place, place, {})
    _listings[place] = {}
    return place


def _forget(place: str, root: str, found: Mapping[str, Any]) -> None:
    """Remove copies of files that a URL means no more."""
    if MAGIC.search(place):
        held = [path for one in braces(place) for path in glob.glob(one, recursive=True)]
    else:
        held = [os.path.join(folder, name) for folder, _, inner in os.walk(root) for name in inner]
    for path in held:
        gone = os.path.relpath(path, root).replace(os.sep, "/") not in found
        if (
            gone and os.path.isfile(path) and places.note_of(path) is not None
        ):  # else it never was behind the URL
            files.remove(path, here=True)


def _let_go_if_changed(place: str, info: Mapping[str, Any]) -> None:
    note, stamp = places.note_of(place), stamp_of(info)
    if note is not None and stamp and (note.size, note.stamp) != (info.get("size"), stamp):
        files.remove(place, here=True)


def _all_there(place: str, held: list[Any]) -> bool:
    paths = [os.path.normpath(os.path.join(place, str(name))) for name in held]
    return all((note := places.note_of(path)) is not None and places.is_copy(path, note) for path in paths)


def make_room(root: str, size: int) -> None:
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
                held.append((os.stat(places.note_path(path)).st_mtime, os.stat(path).st_size, path))
    total, gone = sum(bytes_ for _, bytes_, _ in held) + size, False
    for _, bytes_, path in sorted(held):
        if total <= (limit if not gone else 0.95 * limit):
            break
        gone = True
        with contextlib.suppress(OSError):
            files.remove(path, here=True)
            log.info("%s is let go: copies take at most %.1f GB", path, limit / 1e9)
        total -= bytes_
    _taken[root] = (total, 0)
