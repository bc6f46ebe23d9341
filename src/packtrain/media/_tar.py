"""Where the members of a tar file lie, so that one of them is read by its byte range.

The members of a tar are listed once per process (headers only, data are skipped over) and kept for the
tars used last, half a million members at most; a tar whose size or time has changed is listed again. A hard
or symbolic link has the range of the member it names. Only
plain tars: a compressed one has no byte ranges. Names must match to the letter; a name that stands in the
tar twice is refused, because readers differ in which of the two they take.
"""

from __future__ import annotations

import posixpath
import tarfile
import unicodedata
from collections import OrderedDict
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

from ..errors import SampleError, meant

PREFIX = "tar:"
KEEP = 500_000  # members over all tars

_TWICE = (-1, 0)

_Members = dict[str, tuple[int, int]]
_tables: OrderedDict[tuple[str, int, object], _Members] = OrderedDict()


def split(ref: str) -> tuple[str, str] | None:
    """(path of the tar, member) of `tar:PATH.tar!MEMBER`; None for any other text.

    >>> split("tar:/data/a.tar!x/1.jpg")
    ('/data/a.tar', 'x/1.jpg')
    """
    if not ref.startswith(PREFIX):
        return None
    path, mark, member = ref[len(PREFIX) :].partition(".tar!")
    return (path + ".tar", member) if mark and member else None


def locate(handle: IO[bytes], path: str, size: int, stamp: object, member: str) -> tuple[int, int]:
    """(offset, size) of a member of the open tar file.

    Raises:
        SampleError: missing_media, truncated_media, unreadable_media.
    """
    key = (path, size, stamp)
    table = _tables.get(key)
    if table is None:
        table = _list(handle, path)
        _tables[key] = table
        while len(_tables) > 1 and sum(map(len, _tables.values())) > KEEP:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    found = table.get(member)
    if found is None:
        raise SampleError("missing_media", f"{path} has no member {member!r}", hint=_near(member, table))
    if found == _TWICE:
        raise SampleError("unreadable_media", f"{path} has the member {member!r} more than once")
    if found[0] + found[1] > size:
        raise SampleError("truncated_media", f"{path} is cut short inside its member {member!r}")
    return found


class Walked(NamedTuple):
    """What a tar holds.

    Attributes:
        members: (name, offset of its bytes, size) in order; a link has the offset -1.
        links: name -> name of the target, by its path in the tar.
        end: where the members end.
        error: why the walk ended before; the members in front of a break are whole.
    """

    members: list[tuple[str, int, int]]
    links: dict[str, str]
    end: int
    error: Exception | None


def walk(handle: IO[bytes]) -> Walked:
    """List a plain tar."""
    members: list[tuple[str, int, int]] = []
    links: dict[str, str] = {}
    end = 0
    try:
        with tarfile.open(fileobj=handle, mode="r:") as tar:
            archive: Any = tar
            while (info := tar.next()) is not None:
                end = info.offset_data + -(-info.size // 512) * 512
                if info.isreg() and not info.issparse():
                    members.append((info.name, info.offset_data, info.size))
                elif info.islnk() or info.issym():
                    folder = posixpath.dirname(info.name) if info.issym() else ""
                    links[info.name] = posixpath.join(folder, info.linkname)
                    members.append((info.name, -1, 0))
                archive.members = []  # tarfile keeps every header otherwise
    except (tarfile.TarError, OSError, EOFError, ValueError, RecursionError) as error:  # names of names
        return Walked(members, links, end, error)
    return Walked(members, links, end, None)


def _list(handle: IO[bytes], path: str) -> _Members:
    found = walk(handle)
    table: _Members = {}
    for name, offset, size in found.members:
        if offset >= 0:
            table[name] = _TWICE if name in table else (offset, size)
    if found.error is not None and not table:
        raise SampleError("unreadable_media", f"{path} is no plain tar file: {found.error}")
    followed(table, found.links)
    return table


def followed(table: _Members, links: Mapping[str, str]) -> None:
    """Give links the range of the member they name, in place; one that names none stays away.

    Args:
        table: name -> (offset, size) of the members that hold bytes.
        links: name -> name of the target, by its path in the tar.
    """
    plain = {posixpath.normpath(name): span for name, span in table.items()}
    waiting = dict(links)
    while waiting:
        found = {
            n: plain[t] for n, t in ((n, posixpath.normpath(t)) for n, t in waiting.items()) if t in plain
        }
        if not found:
            return
        for name, span in found.items():
            table[name] = _TWICE if name in table else span
            plain.setdefault(posixpath.normpath(name), span)
            del waiting[name]


def _near(member: str, table: _Members) -> str | None:
    same = unicodedata.normalize("NFC", member)
    for name in table:
        if unicodedata.normalize("NFC", name) == same:
            return "a name that looks the same is there in another Unicode form"
    return meant(member, table) if len(table) <= 20_000 else None
