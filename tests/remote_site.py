"""A web server of this process whose answers can be made to fail: for readers of remote files."""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from packtrain.remote import copies, ranges


class Site(ThreadingHTTPServer):
    """Files of a dict. `ranges=False` sends the whole file whatever is asked for.

    A path that ends in a slash is a page of links to what is below. `marks`: answers carry an ETag.
    """

    def __init__(self, *, ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges = ranges
        self.marks = False
        self.lie = 0  # bytes that HEAD adds to the size
        self.sent = 0
        self.fail: list[int] = []
        self.requests = 0
        self.stop = threading.Event()
        self.odd: list[str] = []  # of the next answers with a body: drop, stall, short, more, shift, junk
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        site = self.server
        site.requests += 1
        data = site.files.get(self.path.partition("?")[0])
        if data is None and self.path.endswith("/"):
            below = {name[len(self.path) :] for name in site.files if name.startswith(self.path)}
            links = {one.partition("/")[0] + ("/" if "/" in one else "") for one in below}
            data = "".join(f'<a href="{one}">{one}</a>' for one in sorted(links)).encode() or None
        elif data is None and any(name.startswith(f"{self.path}/") for name in site.files):
            self.send_response(301)  # to the page of the folder
            self.send_header("Location", f"{self.path}/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = site.fail.pop(0) if site.fail else 200 if data is not None else 404
        asked = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        part = data or b""
        if asked and site.ranges and status == 200:
            status, part = 206, part[int(asked[1]) : int(asked[2]) + 1]
        odd = site.odd.pop(0) if site.odd and body and status < 300 else ""
        if odd == "junk":
            self.wfile.write(b"\0 is no status line\r\n\r\n")
            self.close_connection = True
            return
        if asked and status == 206 and odd == "shift":  # as many bytes, from one place further on
            part = ((data or b"") + b"\n")[int(asked[1]) + 1 : int(asked[2]) + 2]
        part = part[: len(part) // 2] if odd == "short" else part + b"more" if odd == "more" else part
        self.send_response(status)
        if status < 300 and self.path.endswith("/"):
            self.send_header("Content-Type", "text/html; charset=utf-8")
        if status < 300:
            self.send_header("Content-Length", str(len(part) + (0 if body else site.lie)))
            if asked and status == 206:
                at = int(asked[1]) + (odd == "shift")
                self.send_header("Content-Range", f"bytes {at}-{at + len(part) - 1}/{len(data or b'')}")
            if site.marks:
                self.send_header("ETag", f'"{zlib.crc32(data or b"")}"')
            if site.ranges:
                self.send_header("Accept-Ranges", "bytes")
        else:
            part = b""
            self.send_header("Content-Length", "0")
        self.end_headers()
        if body:
            site.sent += len(part)  # before the client can have it
            if odd in ("drop", "stall"):
                self.wfile.write(part[: len(part) // 2])
                self.wfile.flush()
                if odd == "stall":
                    site.stop.wait(20)
                self.close_connection = True
                return
            self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(*, ranges: bool = True) -> Iterator[Site]:
    """A site that answers in a thread of its own."""
    server = Site(ranges=ranges)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of copies, nothing remembered of others, and no pauses between tries."""
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ranges, "PAUSE", 0.0001)
    copies._taken.clear()
    copies._listings.clear()


def empty_memory() -> None:
    """Nothing is left of it, folders neither: its content is the process's."""
    import fsspec

    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def in_memory(folder: Path, bucket: str) -> Any:
    """The files of a folder as `memory://BUCKET/…`; the file system."""
    import fsspec

    system = fsspec.filesystem("memory")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            system.pipe(f"/{bucket}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return system


@contextmanager
def bucket(scheme: str) -> Iterator[Any]:
    """A file system of `scheme://` in memory that can be made to fail; the instance.

    `puts`: names that were sent, in order. `odd`: faults of the next ones: `lost` (nothing comes), `cut` (the
    way breaks in the middle), `short`, `flip` (other bytes than were sent). `quota`: puts that go well before
    all are lost. `md5`: files tell the digest of their content.
    """
    import base64
    import hashlib

    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):
        protocol = scheme
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]
        puts: ClassVar[list[str]] = []
        odd: ClassVar[list[str]] = []
        quota: ClassVar[list[int]] = []
        md5: ClassVar[list[bool]] = []

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(MemoryFileSystem._strip_protocol(path.replace(f"{scheme}://", "memory://")))

        def _told(self, info: dict[str, Any]) -> dict[str, Any]:
            if self.md5 and info["type"] == "file":
                digest = hashlib.md5(self.cat_file(info["name"])).digest()
                return {**info, "md5Hash": base64.b64encode(digest).decode()}
            return info

        def info(self, path: str, **options: Any) -> dict[str, Any]:
            return self._told(super().info(path, **options))

        def find(self, path: str, detail: bool = False, **options: Any) -> Any:
            found = super().find(path, detail=True, **options)
            return {name: self._told(info) for name, info in found.items()} if detail else sorted(found)

        def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
            data = Path(lpath).read_bytes()
            fault = self.odd.pop(0) if self.odd else ""
            if self.quota:
                self.quota[0] -= 1
                fault = "lost" if self.quota[0] < 0 else fault
            if fault != "lost":
                half = data[: len(data) // 2]
                flipped = data[:-1] + bytes([data[-1] ^ 1]) if data else b"?"
                self.pipe_file(rpath, {"cut": half, "short": half, "flip": flipped}.get(fault, data))
            if fault in ("lost", "cut"):
                raise OSError("the way is broken")
            self.puts.append(self._strip_protocol(rpath))

    fsspec.register_implementation(scheme, Bucket, clobber=True)
    try:
        yield fsspec.filesystem(scheme)
    finally:
        from fsspec.registry import _registry

        _registry.pop(scheme)
        Bucket.clear_instance_cache()
