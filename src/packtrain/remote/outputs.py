"""Folders that are written behind a URL: every finished file goes there before it has its name on this disk.

    with output("s3://bucket/shards") as folder:          # CACHE/packtrain-remote/s3/bucket/shards
        files.publish_json(folder / "key.json", key)      # s3://bucket/shards/key.json, then the copy here

What a writer does on a disk, one file after the other and the marker last, so happens behind the URL in the
same order, and what is here is always there too: a copy that may go at any time. Whoever goes on, on this
machine or another, asks what is there. A file is sent with the tries and pauses of `remote.copies`, and is
there when its size and its digest are as sent, or, where the file system tells none, its first and last
64 KiB. One that is there already is not sent again. A claim is made only where its name is free there.

Large files that were sent are the first copies to make room.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InputError, SampleError, counted
from ..files import StrPath
from . import places
from .copies import MAGIC, TRIES, bring, ends_of, listed_as, make_room, put_listed
from .ranges import Remote, as_source, fresh, scheme_of, stamp_of, system_of, tried

log = logging.getLogger(__name__)

#: Schemes that nothing is written to, and those where each write is a commit.
_READ_ONLY = ("http", "https")
_COMMITS = ("hf",)

_LARGE = 1 << 20
#: Files of packs, which nobody reads to write others, and claims, which are looked at one by one.
_LATER = re.compile(r"(pack-\d+-\d+\.(idx\.)?\w+|chunk_\d+\.arrow|ps_\d+\.[^/]*|(^|/)(claim|producer)/.*)$")

_open: dict[str, int] = {}  # places that are written, and how often they were opened
_lock = threading.Lock()
_NAMED = 8  # files in a message
_clears = ContextVar("_clears", default=False)  # of each thread: claims are released side by side
_left: dict[str, str] = {}  # what `clearing_up` could not remove: URL -> why


@contextlib.contextmanager
def output(path: StrPath, *, look: bool = True) -> Iterator[Path]:
    """The folder on this disk that stands for one that is written: itself, or the place of its copies.

    Args:
        path: a folder, its URL, or the place of its copies.
        look: bring what is there now, but packs and claims; without it, and inside of another `output` of the
            same folder, what is here is taken for it.

    Raises:
        InputError: a URL that cannot be written, or that is a file.
        SourceError: it cannot be reached, or may not be written.
    """
    place = os.fspath(writable(path))
    if places.url_of(place) is None:
        yield Path(place)
        return
    if look and place not in _open:
        bring(place, later=_LATER.search, writing=True)
        files.make_folder(place)
    with sending(place):
        yield Path(place)


def look_again(folder: StrPath) -> None:
    """Bring what others have written since to the folder of an `output` that `folder` is or lies in.

    Whoever has waited for a claim, or taken it a moment after another, would go on with what it saw before.

    Raises:
        SourceError: it cannot be reached.
    """
    below = os.path.abspath(folder) + os.sep
    if roots := [root for root in list(_open) if below.startswith(root + os.sep)]:
        bring(max(roots, key=len), later=_LATER.search, writing=True)


def writable(path: StrPath) -> Path:
    """The folder that `output` gives, with nothing asked.

    Raises:
        InputError: a URL of a scheme that nothing is written to, or of which the files would lie elsewhere.
    """
    url = places.told_url(path)
    if url is None:
        if not os.fspath(path):
            raise InputError("the path of the folder to write is empty", hint="name a folder")
        return Path(path)
    place = url if scheme_of(url) in _READ_ONLY else places.place_for(url)
    if scheme_of(url) in _READ_ONLY:
        why, hint = (
            "a web server takes no files",
            "name a folder, or a URL of s3://, gs://, az://, hf://, hdfs://",
        )
    elif MAGIC.search(url):
        why, hint = "it is a pattern of names, and would be read as one", "choose a name without * ? [ ] { }"
    elif (behind := places.url_by_place(place)) != url.rstrip("/"):  # nobody would look there
        why, hint = (
            f"its files would be behind {behind}",
            "name that, without empty parts, users and passwords",
        )
    else:
        return Path(place)
    raise InputError(f"{places.named(url)} cannot be written: {why}", hint=hint)


@contextlib.contextmanager
def sending(folder: StrPath) -> Iterator[None]:
    """What is written below a place of copies inside goes behind its URL; any other folder stays as it is."""
    place = os.path.abspath(folder)
    url = places.url_of(place)
    if url is None:
        yield
        return
    with _lock:
        _open[place] = _open.get(place, 0) + 1
        files.elsewhere = _ELSEWHERE
        if scheme_of(url) in _COMMITS:
            places.stays_here.add(place)
    try:
        yield
    finally:
        with _lock:
            _open[place] -= 1
            if not _open[place]:
                del _open[place]
                places.stays_here.discard(place)
            if not _open:
                files.elsewhere = None
                _tell_left()


@contextlib.contextmanager
def clearing_up() -> Iterator[None]:
    """Inside, work removes what it needs no more: where the right for that lacks, it stays and is told."""
    token = _clears.set(True)
    try:
        yield
    finally:
        _clears.reset(token)


def _tell_left() -> None:
    if _left:
        log.warning(
            "%s that nobody needs any more stay there, as they may not be removed: %s (%s)",
            counted(len(_left), "files"), ", ".join([*_left][:_NAMED]) + ", …" * (len(_left) > _NAMED),
            next(iter(_left.values())),
        )  # fmt: skip
    _left.clear()


class _Sender:
    """`files.Elsewhere`: the folders of `_open`."""

    def put(self, made: Path, path: Path) -> None:
        place, url = self._url(path)
        if url is None:
            return
        with open(made, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        with _behind(url) as (system, remote, told):
            info = _there(system, remote, told, place, made, digest)
            if info is None:
                make_room(places.root_of(place), os.path.getsize(made))
                came: list[str] = []
                info = tried(told, lambda: _sent(system, remote, told, made, came), TRIES, "written")
        _noted(place, made, digest, info)

    def put_new(self, made: Path, path: Path) -> bool | None:
        place, url = self._url(path)
        if url is None:
            return None
        data = made.read_bytes()
        with _behind(url) as (system, remote, told):
            new = tried(told, lambda: _created(system, remote, data), TRIES, "written")
            if new:
                info = tried(told, lambda: fresh(system).info(remote), TRIES)
                _noted(place, made, hashlib.sha256(data).hexdigest(), info)
        return new

    def remove(self, path: Path) -> None:
        place, url = self._url(path)
        if url is not None:
            self._remove(place, url)

    def remove_tree(self, folder: Path) -> bool:
        place, url = self._url(folder)
        if url is None:
            return False
        with _behind(url) as (system, remote, told):
            found = tried(told, lambda: fresh(system).find(remote), TRIES)
        start = str(system._strip_protocol(url)).rstrip("/")
        for name in sorted(map(str, found)):
            below = name[len(start) :]
            self._remove(place + below, url.rstrip("/") + below)
        return True

    def _remove(self, place: str, url: str) -> None:
        with _behind(url) as (system, remote, told):
            try:
                tried(told, lambda: _gone(system, remote), TRIES, "removed")
            except SampleError as error:
                if not _clears.get() or error.reason != "unreadable_media":
                    raise
                _left[told] = error.message
        files.remove(places.note_path(place), here=True)
        put_listed(place, None)

    def _url(self, path: Path) -> tuple[str, str | None]:
        """(place, URL) of a file that goes elsewhere; the URL is None for any other."""
        place = os.path.abspath(path)
        root = next((root for root in list(_open) if place.startswith(root + os.sep)), None)
        if root is None or any(map(files.is_leftover, place[len(root) :].split(os.sep))):
            return place, None
        return place, places.url_of(place)


_ELSEWHERE = _Sender()


@contextlib.contextmanager
def _behind(url: str) -> Iterator[tuple[Any, str, str]]:
    """(file system, path in it, name for messages) of a URL; a fault of a file inside is a `SourceError`."""
    told = places.named(url)
    with as_source():
        yield *system_of(url, told), told


def _there(
    system: Any, remote: str, told: str, place: str, made: Path, digest: str
) -> Mapping[str, Any] | None:
    """What the file system says of a file that is there as it would be sent; None: it is not."""
    note, listed = places.note_of(place), listed_as(place)
    if note is not None and note.sha256 == digest:
        listed = None
    elif listed is None or listed.get("size") != os.path.getsize(made) or not _md5(listed):
        return None
    info: Mapping[str, Any] | None = tried(told, lambda: _info(system, remote), TRIES)
    if info is None or info.get("size") != os.path.getsize(made):
        return None
    if listed is None and note is not None:
        return info if stamp_of(info) and stamp_of(info) == note.stamp else None
    return info if _md5(info) == _md5_of(made) else None


def _sent(system: Any, remote: str, told: str, made: Path, came: list[str]) -> Mapping[str, Any]:
    """Send a file, unless an earlier try of it came through (`came`), and see that it is there."""
    if not came:
        system.put_file(str(made), remote)
    came.append(remote)
    try:
        return _seen(system, remote, told, made)
    except _Otherwise:
        came.clear()
        raise


class _Otherwise(OSError):
    """What is there is not what was sent."""


def _seen(system: Any, remote: str, told: str, made: Path) -> Mapping[str, Any]:
    info, size = _info(system, remote), os.path.getsize(made)
    if info is None:
        raise _Otherwise("it is not there after it was sent")
    if info.get("size") != size:
        raise _Otherwise(f"{info.get('size')} bytes are there after {size:,} were sent")
    md5 = _md5(info)
    if not md5 or md5 != _md5_of(made):  # none, or of something else than the content
        far = Remote(system, remote, told, info)
        if ends_of(size, lambda offset, count: far.read(offset, count, 1)) != _ends_of(made):
            raise _Otherwise("other bytes are there than were sent")
    return info


def _created(system: Any, remote: str, data: bytes) -> bool:
    """Make a small file where its name is free; False where it is taken by another content."""
    if not fresh(system).exists(remote):
        try:
            system.pipe_file(remote, data, mode="create")
            return True
        except Exception:  # each file system has its own for a name that was taken meanwhile
            if not fresh(system).exists(remote):
                raise
    return bool(system.cat_file(remote) == data)  # an earlier try of this one may have come through


def _gone(system: Any, remote: str) -> None:
    if fresh(system).exists(remote):
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(remote)


def _info(system: Any, remote: str) -> Mapping[str, Any] | None:
    try:
        info: Mapping[str, Any] = fresh(system).info(remote)
    except FileNotFoundError:
        return None
    return info


def _noted(place: str, made: Path, digest: str, info: Mapping[str, Any]) -> None:
    """The file is a copy of what was sent; a large one is among the first to go."""
    size, stamp = os.path.getsize(made), stamp_of(info)
    note = places.Note(size, stamp, digest, "" if stamp else _ends_of(made))
    places.set_time(made, note)
    places.put_note(place, note)
    if size > _LARGE:
        os.utime(places.note_path(place), (0, 0))
    put_listed(place, info)


def _ends_of(made: Path) -> str:
    with open(made, "rb") as handle:

        def read(offset: int, count: int) -> bytes:
            handle.seek(offset)
            return handle.read(count)

        return ends_of(os.path.getsize(made), read)


def _md5(info: Mapping[str, Any]) -> str:
    """The MD5 (hex) of a file's content where the file system may tell it; "": it does not."""
    if info.get("md5Hash"):
        return base64.b64decode(str(info["md5Hash"])).hex()
    return str(info.get("ETag", "")).strip('"').lower()


def _md5_of(made: Path) -> str:
    with open(made, "rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
