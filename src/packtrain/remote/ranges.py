"""One file behind a URL (`s3://`, `gs://`, `https://`, …), read by ranges through fsspec (extra `remote`).

A server that ignores ranges sends the whole file; it is then kept and not asked for again. Requests that
fail for another reason than the file itself (refused connections, stalls, other bytes than were asked for)
are tried `TRIES` times, with pauses that double; then the medium is `unreachable_media`, so that a network
fault in the ledger is told from a file that is not there. File systems that need a package of their own
(s3fs, gcsfs) stop the run with the name of the package: no sample is at fault.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import posixpath
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

from ..errors import MissingExtraError, SampleError, SourceError, one_line, optional

log = logging.getLogger(__name__)

T = TypeVar("T")
_told: set[str] = set()  # hosts of which `_say_once` has told

#: Schemes that are read. Chained and local schemes of fsspec are left out on purpose.
SCHEMES = (
    *("s3", "s3a", "gs", "gcs", "http", "https", "hf", "az", "abfs", "abfss", "oss", "hdfs", "webhdfs"),
    "memory",
)
TRIES = 3
PAUSE = 0.2  # seconds before the second try; doubled each time
STALL = 30.0  # seconds without a byte of an HTTP server, after which a request has failed
S3_TRIES = 2  # of each request inside of botocore: large files go in parts, each of which may fail

LONGEST = 10.0  # seconds of a pause between two tries

#: What file systems say of a file that changes with its content; the first that is there counts.
_STAMPS = (
    *("ETag", "etag", "md5Hash", "blob_id", "content_hash", "mtime"),
    *("LastModified", "Last-Modified", "last_modified", "updated", "created"),
)
_LOCKED = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "GatedRepoError")
_S3 = ("s3", "s3a")
_ABSENT = (404, 410)
_REFUSED = (301, 307, 400, 401, 403, 405, 411, 414, 416, 451, 501)
#: Refusals by S3 of a request that was damaged or slowed down under way.
_ON_THE_WAY = ("BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch")


class Remote:
    """One file of a remote file system.

    Attributes:
        size: bytes.
        stamp: an integer that changes when the file does, as far as the file system tells.
        info: what the file system says of the file.
    """

    __slots__ = ("_path", "_system", "_whole", "info", "name", "size", "stamp")

    def __init__(
        self,
        system: Any,
        path: str,
        name: str,
        info: Mapping[str, Any] | None = None,
        tries: int | None = None,
    ) -> None:
        self._system, self._path, self.name = system, path, name
        self._whole: bytes | None = None
        if info is None:
            info = tried(name, lambda: dict(system.info(path)), tries)
        if info.get("type") == "directory":
            raise SampleError("unreadable_media", f"{name} is a folder")
        size = info.get("size")
        if size is None:  # a server that does not tell: the file is read once
            self._whole = tried(name, lambda: bytes(system.cat_file(path)))
            size = len(self._whole)
        self.size, self.info = int(size), info
        self.stamp = zlib.crc32(stamp_of(info).encode("utf-8", "backslashreplace"))

    def read(self, offset: int, count: int, tries: int | None = None) -> bytes:
        """Up to `count` bytes from `offset` on; fewer only where the file ends."""
        stop = min(offset + count, self.size)
        if offset >= stop:
            return b""
        if self._whole is None:
            data: bytes = tried(self.name, lambda: self._range(offset, stop), tries)
            if len(data) == stop - offset:
                return data
            self._whole = data
        return self._whole[offset:stop]

    def _range(self, offset: int, stop: int) -> bytes:
        """The bytes of a range, or the whole file; anything else is a fault of the way here."""
        http = "http" in self._system.protocol
        data: bytes = self._system.cat_file(
            self._path, start=offset, end=stop, **({"trace_request_ctx": self.size} if http else {})
        )
        if len(data) in (stop - offset, self.size):
            return data
        raise OSError(f"{len(data):,} bytes came, {stop - offset:,} of {self.size:,} were asked for")


def tried(name: str, call: Callable[[], T], tries: int | None = None, doing: str = "read") -> T:
    """What a request gives, tried again where the way to the file is at fault.

    Args:
        name: of the file, for messages.
        call: the request.
        tries: at most; `TRIES`.
        doing: what is done to the file, for messages.

    Raises:
        SampleError: missing_media, unreadable_media, unreachable_media.
    """
    tries = tries or TRIES
    for attempt in range(tries):
        try:
            return call()
        except Exception as error:
            fault = _fault(name, error, tries, doing)
            if fault.reason != "unreachable_media" or attempt == tries - 1:
                raise fault from None
            _say_once(name, error, tries)
            time.sleep(min(LONGEST, PAUSE * 2**attempt))
    raise AssertionError  # the loop returns or raises


def fresh(system: Any) -> Any:
    """The file system, with nothing remembered of what it held."""
    system.invalidate_cache()
    return system


@contextlib.contextmanager
def as_source() -> Iterator[None]:
    """A fault of a file inside is a `SourceError`."""
    try:
        yield
    except SampleError as error:
        far = error.reason == "unreachable_media"
        hint = "run it again when the network is up" if far else error.hint
        raise SourceError(error.message, hint=hint) from None


def stamp_of(info: Mapping[str, Any]) -> str:
    """What a file system says that changes with a file's content; "" where it says nothing."""
    key = next((key for key in _STAMPS if info.get(key) is not None), "")
    time_ = getattr(info.get(key), "timestamp", None)  # listings of some systems give seconds, others dates
    return f"{key} {info[key] if time_ is None else time_()}" if key else ""


def open_remote(url: str, name: str) -> Remote:
    """The file behind a URL.

    Args:
        url: with one of `SCHEMES`.
        name: what to call it in messages.

    Raises:
        SampleError: missing_media, unreadable_media, unreachable_media.
        MissingExtraError: fsspec, or the package of this scheme, is not installed.
    """
    return Remote(*system_of(url, name), name)


def system_of(url: str, name: str) -> tuple[Any, str]:
    """(file system, path in it) of a URL. Errors as `open_remote`."""
    fsspec = optional("fsspec.core", "fsspec", "remote")
    try:
        system, path = fsspec.core.url_to_fs(url, **_options(url))
        if scheme_of(url) in _S3:
            system.retries = 1
        return system, str(path)
    except ImportError as error:
        missing = MissingExtraError(f"what fsspec needs for {scheme_of(url)}://", "remote")
        missing.hint = one_line(error)
        raise missing from None
    except Exception as error:
        raise SampleError(
            "unreadable_media", f"{name} is no URL that can be opened: {type(error).__name__}: {error}"
        ) from None


def _options(url: str) -> dict[str, Any]:
    """A server that stalls has failed; how long a whole file takes has no limit.

    botocore and s3fs try again too, each on its own: of 25 stalls one after the other nothing would be heard
    for minutes, and `tried` makes seven times as many.
    """
    scheme = scheme_of(url)
    if scheme in _S3:
        import fsspec.config

        theirs = fsspec.config.conf.get(scheme, {}).get("config_kwargs", {})
        ours = {"read_timeout": STALL, "retries": {"mode": "standard", "max_attempts": S3_TRIES - 1}}
        return {"config_kwargs": {**ours, **theirs}}
    if scheme not in ("http", "https"):
        return {}
    import aiohttp

    limit = aiohttp.ClientTimeout(total=None, sock_connect=STALL, sock_read=STALL)
    return {"client_kwargs": {"timeout": limit, "trace_configs": [_ranges_are_looked_at()]}}


@functools.cache
def _ranges_are_looked_at() -> Any:
    """A server that says that it sends another range, or one of a file of another size, has failed."""
    import aiohttp

    async def look(session: Any, context: Any, answer: Any) -> None:
        asked = re.match(r"bytes=(\d+)-", answer.headers.get("Range", ""))
        came = re.match(r"bytes (\d+)-\d*(?:/(\d+))?", answer.response.headers.get("Content-Range", ""))
        if not asked or not came or answer.response.status != 206:
            return
        if asked[1] != came[1]:
            raise OSError(f"bytes from {came[1]} on came, those from {asked[1]} on were asked for")
        size = context.trace_request_ctx
        if size is not None and came[2] is not None and int(came[2]) != size:
            raise OSError(f"a range is of {int(came[2]):,} bytes in all, the file was said to have {size:,}")

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(look)
    return trace


def scheme_of(text: str) -> str:
    """The scheme of a URL in lower case, or ""."""
    head, mark, _ = text[:64].partition("://")
    return head.lower() if mark and head.replace("+", "").replace("-", "").replace(".", "").isalnum() else ""


def is_remote(text: str) -> bool:
    return "://" in text[:32] and scheme_of(text) in SCHEMES


def join(root: str, relative: str) -> str:
    """A relative path below a URL, `..` worked out on the text; it may not leave the host."""
    scheme, _, rest = root.partition("://")
    host, _, path = rest.partition("/")
    joined = posixpath.normpath(posixpath.join("/" + path, relative.replace("\\", "/")))
    return f"{scheme}://{host}/{joined.lstrip('/')}"


def inside(url: str, root: str) -> str | None:
    """The path of `url` relative to the URL `root` when it lies below it, else None."""
    base = join(root, ".").rstrip("/") + "/"
    if "%2e" in url.lower():  # a server reads these as dots
        url = url.replace("%2e", ".").replace("%2E", ".")
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    tidy = join(f"{scheme}://{host}/", path) if path else url
    return tidy[len(base) :] if tidy.startswith(base) and len(tidy) > len(base) else None


# --------------------------------------------------------------------------------------------
def _say_once(name: str, error: Exception, tries: int) -> None:
    """Of each host it is told once that requests to it fail and are tried again: this takes its time."""
    host = "/".join(name.split("/")[:3])
    if host not in _told:
        _told.add(host)
        error = _cause(error)
        cause = f"{type(error).__name__}: {_said(error)}"
        log.warning("%s was not reached at once (%s): each request is tried %d times", name, cause, tries)


def _fault(name: str, error: Exception, tries: int, doing: str) -> SampleError:
    """Which reason an exception of a file system stands for."""
    error = _cause(error)
    said, (status, code) = _said(error), _answer(error)
    if isinstance(error, FileNotFoundError) or status in _ABSENT:
        if doing == "written" or code == "NoSuchBucket":
            made = "make the bucket, container or repository first, or name another"
            return SampleError("unreadable_media", f"{name} cannot be {doing}: {said}", hint=made)
        return SampleError("missing_media", f"{name} does not exist")
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return SampleError("unreadable_media", f"{name} is a folder")
    rights = "read" if doing == "read" else "list, read, write and delete"
    locked = isinstance(error, PermissionError) or type(error).__name__ in _LOCKED
    if locked or (status in _REFUSED and code not in _ON_THE_WAY):
        hint = f"see that the credentials of this machine are for it, with the right to {rights} there"
        return SampleError("unreadable_media", f"{name} may not be {doing}: {said}", hint=hint)
    if isinstance(error, (ValueError, NotImplementedError)):
        return SampleError("unreadable_media", f"{name} cannot be {doing}: {type(error).__name__}: {said}")
    return SampleError(
        "unreachable_media",
        f"{name} could not be reached in {tries} tries: {type(error).__name__}: {said}",
        hint="measure again when the network is up: only samples that failed need it",
    )


def _cause(error: Exception) -> Exception:
    """What went wrong: fsspec's HTTP says "not found" whatever it was."""
    while isinstance(error, FileNotFoundError) and _is_hidden(error.__cause__):
        error = error.__cause__
    return error


def _is_hidden(cause: BaseException | None) -> TypeGuard[Exception]:
    """Whether what was "not found" is another fault: of a web server, of the way there, of rights."""
    if not isinstance(cause, Exception) or isinstance(cause, LookupError):
        return False
    status = _answer(cause)[0]
    return status not in _ABSENT if status else "NotFound" not in type(cause).__name__


def _said(error: Exception) -> str:
    """What an exception says, without the queries and passwords of the URLs in it."""
    text = re.sub(r"://[^/\s'\"@]*@", "://", one_line(error, 4000))
    return re.sub(r"\?[^\s'\"]+", "", text)[:200]


def _answer(error: BaseException | None) -> tuple[int, str]:
    """(HTTP status, code) of the answer that an exception of a file system is of; (0, ""): of none."""
    for one in (error, getattr(error, "__cause__", None)):
        told = getattr(one, "response", None)
        if isinstance(told, Mapping):  # botocore; s3fs raises another error from it
            status = told.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return int(status or 0), str(told.get("Error", {}).get("Code") or "")
    if type(getattr(error, "__cause__", None)).__module__ == "aiohttp.http_exceptions":
        return 0, ""  # aiohttp gives a status to bytes that are no answer
    status = getattr(getattr(error, "response", None), "status_code", None)  # huggingface_hub
    status = status or getattr(error, "status", None) or getattr(error, "code", None)
    return (int(str(status)), "") if str(status).isdecimal() else (0, "")
