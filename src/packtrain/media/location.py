"""Where the bytes of a medium are, and how to get few or all of them.

A *ref* is what a record names: a path (str or Path), a `file://` URL, a member of a tar
(`tar:shard.tar!000.jpg`), a base64 or percent-encoded `data:` URL, or the bytes themselves. `resolve`
turns a ref of a record into one that can be opened (it needs the media root); everything else takes a
resolved ref.

`open_head` is the fast way in: one open, one stat, one read of the first 4 KiB; parsers then ask for
further ranges only where they need them (a large EXIF block, the end marker). Every failure is a
`SampleError` that names the medium: `missing_media`, `unreadable_media`, `unsupported_media`,
`outside_media_root`. Containment is lexical: `..` is worked out on the text of the path and symbolic
links are not followed to find out where they lead, so a link inside the media root may point out of it.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import os
import re
import stat
from types import TracebackType
from typing import TypeAlias
from urllib.parse import unquote, unquote_to_bytes

from ..errors import SampleError
from . import _tar

__all__ = [
    "HEAD_BYTES",
    "Head",
    "Ref",
    "exists",
    "identity",
    "name_of",
    "open_head",
    "read_bytes",
    "resolve",
]

Ref: TypeAlias = str | os.PathLike[str] | bytes

HEAD_BYTES = 4096  # what `open_head` reads at once and what `identity` hashes
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)


class Head:
    """The first bytes of a medium, its size, and range reads beyond them. A context manager.

    Attributes:
        bytes: the first `HEAD_BYTES` bytes (all of them when the medium is in memory).
        size: size of the medium in bytes.
        name: what to call the medium in messages.
    """

    __slots__ = ("_base", "_descriptor", "bytes", "name", "size")

    def __init__(self, data: bytes, size: int, name: str, descriptor: int = -1, base: int = 0) -> None:
        self.bytes = data
        self.size = size
        self.name = name
        self._descriptor = descriptor
        self._base = base  # where the medium starts in its file

    def __enter__(self) -> Head:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def at(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset` on: fewer only where the medium ends."""
        stop = offset + count
        if stop <= len(self.bytes) or self._descriptor < 0:
            return self.bytes[offset:stop]
        try:
            return _read_range(self._descriptor, self._base + offset, min(count, max(0, self.size - offset)))
        except OSError as error:
            raise self.fail("unreadable_media", f"cannot be read: {error.strerror}") from None

    def fail(self, reason: str, what: str, *, hint: str | None = None) -> SampleError:
        """A `SampleError` about this medium, to be raised by the caller."""
        return SampleError(reason, f"{self.name} {what}", hint=hint)


def open_head(ref: Ref) -> Head:
    """Open a medium for header reading. Use it in a `with` block.

    Raises:
        SampleError: missing_media, unreadable_media, unsupported_media.
    """
    if isinstance(ref, bytes):
        return Head(ref, len(ref), name_of(ref))
    path = _file_path(ref)
    if path is None:
        data = _decode_data_url(str(ref))
        return Head(data, len(data), name_of(ref))
    base = 0
    inner = _tar.split(path)
    descriptor, status = _open(path if inner is None else inner[0])
    size = status.st_size
    try:
        if inner is not None:
            with open(descriptor, "rb", closefd=False) as handle:
                base, size = _tar.locate(handle, inner[0], size, status.st_mtime_ns, inner[1])
        return Head(os.pread(descriptor, min(HEAD_BYTES, size), base), size, path, descriptor, base)
    except OSError as error:
        os.close(descriptor)
        raise SampleError("unreadable_media", f"{path} cannot be read: {error.strerror}") from None
    except SampleError:
        os.close(descriptor)
        raise


def read_bytes(ref: Ref) -> bytes:
    """All bytes of a medium. Errors as `open_head`."""
    with open_head(ref) as head:
        return head.bytes if len(head.bytes) == head.size else head.at(0, head.size)


def exists(ref: Ref) -> bool:
    """Whether the medium is there (a data URL and bytes always are); never raises."""
    if isinstance(ref, bytes):
        return True
    try:
        path = _file_path(ref)
        if path is not None and _tar.split(path) is not None:
            with open_head(ref):
                return True
        return True if path is None else stat.S_ISREG(os.stat(path).st_mode)
    except (SampleError, OSError, ValueError):
        return False


def identity(ref: Ref, root: str | os.PathLike[str] | None = None) -> tuple[str, int, str]:
    """(name, size in bytes, SHA-256 of the header bytes): what a fingerprint takes of a medium.

    The name is the path relative to `root` when it lies inside, with `/` on every system, else the path
    as given. A medium in memory has no name and its digest covers all of its bytes.
    """
    with open_head(ref) as head:
        digest = hashlib.sha256(head.bytes).hexdigest()
        size = head.size
    if isinstance(ref, bytes) or (path := _file_path(ref)) is None:
        return "", size, digest
    path, member = _tar.split(path) or (path, "")
    if root is not None and (inside := _inside(os.path.abspath(path), os.path.abspath(os.fspath(root)))):
        path = inside
    return path.replace(os.sep, "/") + (f"!{member}" if member else ""), size, digest


def resolve(
    ref: Ref,
    media_root: str | os.PathLike[str] | None = None,
    allow_outside: bool = False,
    *,
    absolute_ok: bool = True,
) -> Ref:
    """The ref to open for what a record names.

    Bytes and data URLs stay as they are. A relative path is joined to `media_root` (default: the
    current folder) and must not climb out of it. An absolute path may be anywhere when `absolute_ok`
    (no media root was asked for), else it must lie inside `media_root`.

    Raises:
        SampleError: outside_media_root; unsupported_media for URLs of other schemes.
    """
    if isinstance(ref, bytes):
        return ref
    given = _file_path(ref)
    if given is None:
        return ref
    root = os.path.abspath(os.fspath(media_root)) if media_root is not None else os.getcwd()
    given, member = _tar.split(given) or (given, "")
    path = os.path.normpath(os.path.join(root, given))
    free = allow_outside or (absolute_ok and os.path.isabs(given))
    if not free and _inside(path, root) is None:
        raise SampleError(
            "outside_media_root",
            f"media path {_short(given)!r} is outside the media root {root}",
            hint="set media_root to a folder that holds all media, or allow_outside=True",
        )
    return f"{_tar.PREFIX}{path}!{member}" if member else path


def name_of(ref: Ref) -> str:
    """What to call a ref in messages; never its content."""
    if isinstance(ref, bytes):
        return f"medium of {len(ref)} bytes in memory"
    text = os.fspath(ref)
    return f"data URL of {len(text)} characters" if text.startswith("data:") else _short(text)


# --------------------------------------------------------------------------------------------
def _file_path(ref: str | os.PathLike[str]) -> str | None:
    """The file path of a ref, or None for a data URL."""
    text = os.fspath(ref)
    if not isinstance(text, str):
        raise SampleError(
            "unsupported_media", f"a medium is named by text or bytes, not {type(text).__name__}"
        )
    if text.startswith("data:"):
        return None
    if "://" in text[:32] and _SCHEME.match(text):
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
    except FileNotFoundError:
        raise SampleError("missing_media", f"{_short(path)} does not exist") from None
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            raise SampleError("missing_media", f"{_short(path)} does not exist") from None
        hint = (
            "base64 text needs the prefix data:image/png;base64,"
            if error.errno == errno.ENAMETOOLONG
            else None
        )
        raise SampleError(
            "unreadable_media", f"{_short(path)} cannot be opened: {error.strerror}", hint=hint
        ) from None
    except ValueError:  # a NUL character, or a lone surrogate that no file name can hold
        raise SampleError("unreadable_media", f"{_short(path)!r} is not a file name") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        what = "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
        raise SampleError("unreadable_media", f"{_short(path)} {what}")
    return descriptor, status


def _read_range(descriptor: int, offset: int, count: int) -> bytes:
    """`count` bytes from `offset`; loops because one read may return less than asked."""
    data = os.pread(descriptor, count, offset)
    if len(data) == count:
        return data
    parts = [data]
    got = len(data)
    while got < count and parts[-1]:
        parts.append(os.pread(descriptor, count - got, offset + got))
        got += len(parts[-1])
    return b"".join(parts)


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
