"""Where the bytes of a medium are, and how to get few or all of them.

A *ref* is what a record names: a path (str or Path), a `file://` URL, a member of a tar
(`tar:shard.tar!000.jpg`), a base64 or percent-encoded `data:` URL, the bytes themselves, or a URL of a
remote file system (`ranges.SCHEMES`: s3, gs, https, …; needs the extra `remote`). `resolve` turns a ref
of a record into one that can be opened (it needs the media root, which may be a URL too); everything else
takes a resolved ref.

`open_head` is the fast way in: one open, one stat, one read of the first 4 KiB; parsers then ask for
further ranges only where they need them (a large EXIF block, the end marker). Every failure is a
`SampleError` that names the medium: `missing_media`, `unreadable_media`, `unsupported_media`,
`outside_media_root`, `remote_media` (a URL that nobody allowed), `unreachable_media` (a network fault).

`resolve` is the one place that says what a record may name. A URL of a record is fetched only with
`allow_remote`. Without a media root, absolute paths are read as they are written and relative ones stay in
the folder of the source. Below a media root that was given, paths and symbolic links that lead out of it
need `allow_outside`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import functools
import hashlib
import io
import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote, unquote_to_bytes

from ..errors import SampleError, SourceError, counted
from ..files import Stamp, StrPath, read_range
from ..remote import ranges
from ..remote.copies import present
from ..remote.places import url_of
from ..remote.ranges import Remote
from . import _tar


# --------------------------------------------------------------------------------------------
# What a header parser answers: the stored size, how the picture is turned, whether the end is there
# --------------------------------------------------------------------------------------------
class Parsed(NamedTuple):
    """Header facts before orientation is applied.

    Attributes:
        width: stored width in pixels.
        height: stored height in pixels.
        orientation: EXIF orientation 1..8.
        complete: the structure reaches its end marker. False means *suspicious*, not broken: some
            decoders get by without the marker.
    """

    width: int
    height: int
    orientation: int = 1
    complete: bool = True


class ParsedAudio(NamedTuple):
    """Header facts of a sound file.

    Attributes:
        frames: samples per channel that a decoder gives.
        sample_rate: Hz.
        channels: 1 or more.
        complete: the file holds all the samples its header speaks of.
    """

    frames: int
    sample_rate: int
    channels: int
    complete: bool = True


# --------------------------------------------------------------------------------------------
# The first bytes of an open medium, and range reads beyond them
# --------------------------------------------------------------------------------------------
HEAD_BYTES = 4096  # what `open_head` reads at once and what `identity` hashes
STEPS = 1 << 18  # parts that a parser may look at in one medium; real ones have a few hundred
_TIMES, _FREE = 8, 1 << 24  # bytes that a parser may read in all: so many times the size, and some
_FREE_READ = 1 << 28  # beside `times` of `as_file`
_OVER = "is read more than {} times over to be understood"


class Head:
    """The first bytes of a medium, its size, and range reads beyond them. A context manager.

    Attributes:
        bytes: the first `HEAD_BYTES` bytes (all of them when the medium is in memory).
        size: size of the medium in bytes.
        name: what to call the medium in messages.
    """

    __slots__ = ("_base", "_descriptor", "_remote", "_room", "_steps", "bytes", "name", "size")

    def __init__(
        self,
        data: bytes,
        size: int,
        name: str,
        descriptor: int = -1,
        base: int = 0,
        remote: Remote | None = None,
    ) -> None:
        self.bytes, self.size, self.name = data, size, name
        self._descriptor, self._remote = descriptor, remote
        self._base = base  # where the medium starts in its file
        self._steps, self._room = STEPS, _TIMES * size + _FREE

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *error: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def at(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset` on: fewer only where the medium ends.

        Raises:
            SampleError: unreadable_media: the budget of steps or bytes for one medium is spent.
        """
        self.spend()
        self._room -= max(0, min(count, self.size - offset))
        if self._room < 0:
            raise self.fail("unreadable_media", _OVER.format(_TIMES))
        return self.read(offset, count)

    def whole(self) -> bytes:
        """All bytes. Raises as `at`."""
        return self.bytes if len(self.bytes) == self.size else self.at(0, self.size)

    def need(self, offset: int, count: int, where: str, most: int = 0) -> bytes:
        """As `at`, but not fewer than `count`; up to `most` where that is more.

        Raises:
            SampleError: truncated_media, the medium ends before; `where` says in which part of it.
        """
        data = self.at(offset, most or count)
        if len(data) < count:
            raise self.fail("truncated_media", f"is cut short {where}")
        return data

    def spend(self, steps: int = 1) -> None:
        """Count parts that a parser looks at.

        Raises:
            SampleError: unreadable_media: there are more than `STEPS`.
        """
        self._steps -= steps
        if self._steps < 0:
            raise self.fail(
                "unreadable_media", f"has more than {counted(STEPS, 'parts')} in its header or at its end"
            )

    def read(self, offset: int, count: int) -> bytes:
        """As `at`, for libraries that decode: outside the budget, see `as_file`."""
        stop = offset + count
        if stop <= len(self.bytes) or (self._descriptor < 0 and self._remote is None):
            return self.bytes[offset:stop]
        count = min(count, max(0, self.size - offset))
        if self._remote is not None:
            return self._remote.read(self._base + offset, count)
        try:
            return read_range(self._descriptor, self._base + offset, count)
        except OSError as error:
            raise self.fail("unreadable_media", f"cannot be read: {error.strerror}") from None

    def refuse(self, bad: object, what: str, reason: str = "unreadable_media") -> None:
        """Raise `fail` where something of the medium is bad; `what` is made in any case, so it is plain."""
        if bad:
            raise self.fail(reason, what)

    def fail(self, reason: str, what: str, *, hint: str | None = None) -> SampleError:
        """A `SampleError` about this medium, to be raised by the caller."""
        return SampleError(reason, f"{self.name} {what}", hint=hint)


class _HeadFile(io.RawIOBase):
    """A `Head` as a seekable binary file; see `as_file`."""

    def __init__(self, head: Head, times: float) -> None:
        super().__init__()
        self._head, self._times, self._place = head, times, 0
        self._room = times * head.size + _FREE_READ

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = max(0, (0, self._place, self._head.size)[whence] + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        if self._room < 0:
            return 0  # it was raised; a library goes on reading before it hands that on
        data = self._head.read(self._place, len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        self._room -= max(len(data), HEAD_BYTES)  # a short read is not free
        if self._room < 0:
            raise self._head.fail("unreadable_media", _OVER.format(self._times))
        return len(data)


def as_file(head: Head, buffer: int = 1 << 16, *, times: float = math.inf) -> io.BufferedReader:
    """An open medium as a seekable binary file, for libraries that read one.

    Args:
        times: how often over it may be read, by a library that hands on what a file raises: `SampleError`.
    """
    return io.BufferedReader(_HeadFile(head, times), buffer)


# --------------------------------------------------------------------------------------------
# Where the bytes of a medium are, and how to get few or all of them
# --------------------------------------------------------------------------------------------
Ref: TypeAlias = StrPath | bytes

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def open_head(ref: Ref) -> Head:
    """Open a medium for header reading. Use it in a `with` block.

    Raises:
        SampleError: missing_media, unreadable_media, unsupported_media.
    """
    path = None if isinstance(ref, bytes) else _file_path(ref)
    if path is None:
        data = ref if isinstance(ref, bytes) else _decode_data_url(str(ref))
        return Head(data, len(data), name_of(ref))
    base = 0
    path = _at(path)
    inner = _tar.split(path)
    if ranges.is_remote(path if inner is None else inner[0]):
        return _open_remote(path, inner)
    descriptor, status = _open(path if inner is None else inner[0])
    size = status.st_size
    try:
        if inner is not None:
            with open(descriptor, "rb", closefd=False) as handle:
                base, size = _tar.locate(handle, inner[0], size, Stamp.of(status), inner[1])
        return Head(os.pread(descriptor, min(HEAD_BYTES, size), base), size, path, descriptor, base)
    except OSError as error:
        os.close(descriptor)
        raise SampleError("unreadable_media", f"{path} cannot be read: {error.strerror}") from None
    except SampleError:
        os.close(descriptor)
        raise


def read_bytes(ref: Ref) -> bytes:
    """All bytes of a medium; a copy is made of one beside a remote source. Errors as `open_head`."""
    path = None if isinstance(ref, bytes) else _file_path(ref)
    if path is not None and _at(path) != path:
        if _tar.split(path) is None:
            with contextlib.suppress(SourceError):  # said again below, as what it is of a medium
                present(path)
        path = _at(path)
    if path is not None and not ranges.is_remote(path) and _tar.split(path) is None:
        descriptor, status = _open(path)
        with Head(b"", status.st_size, path, descriptor) as whole:  # one read: no header is asked for
            return whole.whole()
    with open_head(ref) as head:
        return head.whole()


def open_whole(ref: Ref) -> Head:
    """A medium with all of its bytes in memory. Errors as `open_head`."""
    data = read_bytes(ref)
    return Head(data, len(data), name_of(ref))


def exists(ref: Ref) -> bool:
    """Whether the medium is there (a data URL and bytes always are); never raises."""
    if isinstance(ref, bytes):
        return True
    try:
        path = _file_path(ref)
        path = None if path is None else _at(path)
        if path is not None and (_tar.split(path) is not None or ranges.is_remote(path)):
            with open_head(ref):
                return True
        return True if path is None else stat.S_ISREG(os.stat(path).st_mode)
    except (SampleError, OSError, ValueError):
        return False


def identity(ref: Ref, root: StrPath | None = None) -> tuple[str, int, str]:
    """(name, size in bytes, SHA-256 of the header bytes): what a fingerprint takes of a medium.

    The name is the path relative to `root` when it lies inside, with `/` on every system, else the path
    as given. A medium in memory has no name and its digest covers all of its bytes.
    """
    with open_head(ref) as head:
        return identity_name(ref, root), head.size, hashlib.sha256(head.bytes).hexdigest()


def identity_name(ref: Ref, root: StrPath | None = None) -> str:
    """The name that `identity` gives a medium, without opening it."""
    if isinstance(ref, bytes) or (path := _file_path(ref)) is None:
        return ""
    path, member = _tar.split(path) or (path, "")
    if ranges.is_remote(path):
        below = ranges.inside(path, os.fspath(root)) if root is not None and is_url(root) else None
        return (below or path) + (f"!{member}" if member else "")
    if root is not None and (inside := _inside(os.path.abspath(path), os.path.abspath(os.fspath(root)))):
        path = inside
    return path.replace(os.sep, "/") + (f"!{member}" if member else "")


def ref_of(name: str, root: StrPath | None = None) -> str:
    """The ref of a medium by the name that `identity` gave it: its inverse.

    >>> ref_of("a/s.tar!x.jpg", "/data")
    'tar:/data/a/s.tar!x.jpg'
    """
    path, member = _tar.split(_tar.PREFIX + name) or (name, "")
    if root is not None and not is_url(path) and not os.path.isabs(path):
        path = ranges.join(str(root), path) if is_url(root) else os.path.join(os.path.abspath(root), path)
    return f"{_tar.PREFIX}{path}!{member}" if member else path


def file_of(ref: str) -> str:
    """The file or URL whose bytes a ref reads: the tar of a tar member, else the ref itself.

    >>> file_of("tar:/data/a/s.tar!x.jpg")
    '/data/a/s.tar'
    """
    inner = _tar.split(ref)
    return ref if inner is None else inner[0]


def resolve(
    ref: Ref,
    media_root: StrPath | None = None,
    allow_outside: bool = False,
    *,
    absolute_ok: bool = True,
    allow_remote: bool = False,
) -> Ref:
    """The ref to open for what a record names.

    Bytes and data URLs stay as they are. A relative path is joined to `media_root` (default: the
    current folder) and must not climb out of it. An absolute path may be anywhere when `absolute_ok`
    (no media root was asked for), else it and the file that its links lead to must lie inside `media_root`.

    Below a media root that is a URL, relative paths are joined to it, and URLs inside of it may be named.
    Any other URL needs `allow_remote`, and outside such a root that was asked for `allow_outside` too.

    Raises:
        SampleError: outside_media_root; remote_media; unsupported_media for URLs of other schemes.
    """
    if isinstance(ref, bytes):
        return ref
    given = _file_path(ref)
    if given is None:
        return ref
    given, member = _tar.split(given) or (given, "")
    if ranges.is_remote(given) or (media_root is not None and is_url(media_root)):
        path = _resolve_url(given, media_root, allow_outside, absolute_ok, allow_remote)
        return f"{_tar.PREFIX}{path}!{member}" if member else path
    root = os.path.abspath(os.fspath(media_root)) if media_root is not None else os.getcwd()
    path = os.path.normpath(os.path.join(root, given))
    free = allow_outside or (absolute_ok and os.path.isabs(given))
    if not free and _inside(path, root) is None:
        raise _outside(given, root)
    leads = None if allow_outside or absolute_ok else _leads(path)
    if leads is not None and _inside(leads, _real_folder(root)) is None:
        raise _outside(given, root, f" by a link to {_short(leads)}")
    return f"{_tar.PREFIX}{path}!{member}" if member else path


def media_refs(sample: Mapping[str, Any], *, sounds: bool = False) -> list[Any]:
    """References of the media of a chat sample as the model sees them; frames of a video one by one.

    Samples of another shape have none.

    Args:
        sounds: with the sound that stands beside a video.
    """
    found: list[Any] = []
    messages = sample.get("messages") if isinstance(sample, Mapping) else None
    for message in _listed(messages):
        content = message.get("content") if type(message) is dict or isinstance(message, Mapping) else None
        for part in _listed(content):
            kind = part.get("type") if type(part) is dict or isinstance(part, Mapping) else None
            if kind in ("image", "video", "audio") and part.get(kind) is not None:
                reference = part[kind]
                found += reference if isinstance(reference, (list, tuple)) else [reference]
                if sounds and kind == "video" and part.get("audio") is not None:
                    found.append(part["audio"])
    return found


def _listed(value: Any) -> Sequence[Any]:
    """A list as it is, anything else as an empty one."""
    plain = type(value) is list or (isinstance(value, Sequence) and not isinstance(value, (str, bytes)))
    return value if plain else ()


def with_media(sample: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A chat sample whose media, each a ref or a list of them, are what `change` makes of them."""
    messages = []
    for message in sample["messages"]:
        content = message["content"]
        if not isinstance(content, str):
            content = [dict(part) for part in content]
            for part in content:
                if (kind := part["type"]) != "text":
                    part[kind] = change(part[kind])
        messages.append({**message, "content": content})
    return {**sample, "messages": messages}


def is_url(path: StrPath) -> bool:
    """Whether a path or media root is a URL of a remote file system."""
    return isinstance(path, str) and ranges.is_remote(path)


def name_of(ref: Ref) -> str:
    """What to call a ref in messages; never its content."""
    if isinstance(ref, bytes):
        return f"medium of {len(ref)} bytes in memory"
    text = os.fspath(ref)
    return f"data URL of {len(text)} characters" if text.startswith("data:") else _short(text)


# --------------------------------------------------------------------------------------------
def _at(path: str) -> str:
    """A path, or the URL that it stands for where it is a copy of a remote file that is not here."""
    file = file_of(path)
    url = url_of(file)
    return path if url is None or os.path.isfile(file) else path.replace(file, url, 1)


def _open_remote(path: str, inner: tuple[str, str] | None) -> Head:
    """The head of a remote file, or of a member of a remote tar."""
    remote = ranges.open_remote(path if inner is None else inner[0], _short(path))
    base, size = 0, remote.size
    if inner is not None:
        whole = Head(b"", size, _short(inner[0]), remote=remote)
        with as_file(whole, 1 << 20) as handle:
            base, size = _tar.locate(handle, inner[0], size, remote.stamp, inner[1])
    return Head(remote.read(base, min(HEAD_BYTES, size)), size, _short(path), base=base, remote=remote)


def _resolve_url(
    given: str, root: StrPath | None, allow_outside: bool, absolute_ok: bool, allow_remote: bool
) -> str:
    """`resolve` where the medium, the media root or both are URLs."""
    if not ranges.is_remote(given):
        beside = os.path.isabs(given)  # a local file beside a remote root
        path = os.path.normpath(given) if beside else ranges.join(str(root), given)
        if not allow_outside and not (absolute_ok if beside else ranges.inside(path, str(root))):
            raise _outside(given, root)
        return path
    if root is not None and is_url(root):
        if ranges.inside(given, os.fspath(root)) is not None:
            return given
        if not allow_outside and not absolute_ok:
            raise _outside(given, root)
    if not allow_remote:
        raise SampleError(
            "remote_media",
            f"the medium {_short(given)!r} is a URL, and nobody allowed to fetch what a record names",
            hint="allow_remote=True (in a mixture under its entry's `chat`), or download it",
        )
    return given


def _outside(given: str, root: StrPath | None, how: str = "") -> SampleError:
    return SampleError(
        "outside_media_root",
        f"media path {_short(given)!r} is outside the media root {root}{how}",
        hint="set media_root to a folder that holds all media, or allow_outside=True",
    )


def _leads(path: str) -> str | None:
    """Where the links of an absolute path lead; None for a name that no file can have.

    Folders are remembered: beyond the first file of each, one `lstat` is asked.
    """
    folder, name = os.path.split(path)
    try:
        real = os.path.join(_real_folder(folder), name)
        return os.path.realpath(real) if os.path.islink(real) else real
    except (OSError, ValueError):
        return None


@functools.lru_cache(maxsize=65536)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _file_path(ref: StrPath) -> str | None:
    """The file path or remote URL of a ref, or None for a data URL."""
    text: Any = os.fspath(ref) if isinstance(ref, (str, os.PathLike)) else ref
    if not isinstance(text, str):
        raise SampleError(
            "unsupported_media", f"a medium is named by text or bytes, not {type(text).__name__}"
        )
    if text.startswith("data:"):
        return None
    if "://" in text[:32] and _SCHEME.match(text):
        if ranges.is_remote(text):
            return text
        if not text.startswith("file://"):
            raise SampleError(
                "unsupported_media",
                f"{_short(text)}: media of this URL scheme are not read",
                hint="download it and name the file, or put a data: URL",
            )
        return unquote(text[len("file://localhost") :] if text.startswith("file://localhost/") else text[7:])
    if not text:
        raise SampleError("missing_media", "a media path is empty")
    return text


def _open(path: str) -> tuple[int, os.stat_result]:
    """(descriptor, status) of a regular file. O_NONBLOCK: a named pipe must not block the run."""
    try:
        descriptor = os.open(path, _OPEN_FLAGS | _BINARY)
    except OSError as error:
        reason, what, hint = "unreadable_media", f"cannot be opened: {error.strerror}", None
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            reason, what = "missing_media", "does not exist"
        elif error.errno == errno.ENAMETOOLONG:
            hint = "base64 text needs the prefix data:image/png;base64,"
        raise SampleError(reason, f"{_short(path)} {what}", hint=hint) from None
    except ValueError:  # a NUL character, or a lone surrogate that no file name can hold
        raise SampleError("unreadable_media", f"{_short(path)!r} is not a file name") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        what = "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
        raise SampleError("unreadable_media", f"{_short(path)} {what}")
    return descriptor, status


def _decode_data_url(text: str) -> bytes:
    """The bytes of `data:[type][;base64],payload`. White space in base64 is passed over."""
    head, comma, payload = text.partition(",")
    if not comma:
        raise SampleError("unreadable_media", f"{name_of(text)} has no comma before its payload")
    if not head.endswith(";base64"):
        return unquote_to_bytes(payload)
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        pass
    try:
        return base64.b64decode("".join(unquote(payload).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SampleError("unreadable_media", f"{name_of(text)} is not valid base64: {error}") from None


def _inside(path: str, root: str) -> str | None:
    """`path` relative to `root` when it lies inside (both absolute and normalised), else None."""
    prefix = root if root.endswith(os.sep) else root + os.sep
    return path[len(prefix) :] if path.startswith(prefix) and len(path) > len(prefix) else None


def _short(text: str) -> str:
    """Text for a message: printable whatever it holds, and not longer than a line."""
    shown = text if len(text) <= 200 else f"{text[:120]}…{text[-40:]}"
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")
