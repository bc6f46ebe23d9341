"""The only writer to disk: an artefact is absent or whole.

A file is written as a temporary name in its own directory, synced, renamed, and the directory is
synced. An artefact of several files publishes its marker (`plan.json`, `lengths.json`) last; a
rewrite removes the marker first. Every write, sync, rename and removal passes `step`, so a test
can stop a verb after each of them (`packtrain.testing.crash_points`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, FormatError, InputError, PacktrainError, first_line, one_line

BLOCK = 1 << 26  # 64 MiB: unit of array writing and of plan digests
_TMP = ".tmp."
_IOV = 1024  # pieces that POSIX systems take at once

StrPath: TypeAlias = str | os.PathLike[str]

#: Called as observer(kind, path) after each step; None outside tests.
observer: Callable[[str, Path], None] | None = None


def step(kind: str, path: Path) -> None:
    """One durable step is done. Tests raise here to stop the process at this point."""
    if observer is not None:
        observer(kind, path)


class Elsewhere(Protocol):
    """Where files of some folders go beside this disk (`remote.outputs`); all others are passed over."""

    def put(self, made: Path, path: Path) -> None:
        """A finished file, under the name that it gets here afterwards."""

    def put_new(self, made: Path, path: Path) -> bool | None:
        """The same only where the name is free there; None: the file does not go there."""

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is no error."""

    def remove_tree(self, folder: Path) -> bool:
        """Remove a folder with all in it; False: it does not go there."""


#: A file goes there before it has its name here: what is here is there. None: all folders are of this disk.
elsewhere: Elsewhere | None = None


MOST_YAML = 1 << 20  # characters of a configuration; and of what its aliases stand for, values
MOST_JSON = 1 << 30  # bytes of a marker or state; the largest list the packs of an export


@contextlib.contextmanager
def publish(path: str | Path, *, here: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that appears at `path` only when the block ends without an error.

    Parallel writers of one path never mix: each has its own temporary name and the last rename wins.

    Args:
        here: it stays on this disk, whatever goes `elsewhere`.
    """
    path, temporary = _place(path)
    try:
        with _create(temporary) as handle:
            yield handle
            handle.flush()
            step("write", path)
            os.fsync(handle.fileno())
            step("fsync", path)
        _rename(temporary, path, here)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):
            error.filename = str(path)  # a full disk does not say what it was for
        # A stopped process cannot tidy up either; leftovers are harmless and removed by the next run.
        if observer is None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def scratch(path: str | Path) -> Iterator[Path]:
    """A folder beside `path` for a library that writes by itself; it is gone when the block ends.

    What is to stay is taken out of it (`take`). A stopped process leaves it to `remove_leftovers`.
    """
    folder = _temporary(Path(path))
    make_folder(folder)
    try:
        yield folder
    except BaseException:
        if observer is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def take(made: str | Path, target: str | Path) -> None:
    """A file that a library wrote beside it (`scratch`) becomes `target`, durably; replaces what is there."""
    target = Path(target)
    with open(made, "rb") as handle:
        os.fsync(handle.fileno())
    step("fsync", target)
    make_folder(target.parent)
    move(made, target)


class FlushAhead:
    """Sends a large file to the disk, and out of the cache, while more of it is written.

    The sync at its end is short, and other data keep their memory. What is durable is decided by `publish`.
    """

    def __init__(self, handle: IO[bytes], every: int = BLOCK) -> None:
        self._descriptor, self._every = handle.fileno(), every
        self._written, self._over = 0, False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def wrote(self, size: int) -> None:
        self._written += size
        if self._written >= self._every:
            self._written = 0
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="packtrain-flush", daemon=True)
                self._thread.start()
            self._wake.set()

    def close(self) -> None:
        """To be called before the file is closed."""
        self._over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._over:
                return
            with contextlib.suppress(OSError):  # said again by the sync that counts
                os.fsync(self._descriptor)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_pieces(handle: IO[bytes], pieces: Sequence[bytes]) -> None:
    """Write pieces one after the other with few system calls, without copying them together."""
    handle.flush()
    for first in range(0, len(pieces), _IOV):
        todo = list(pieces[first : first + _IOV])
        left = sum(map(len, todo)) - (os.writev(handle.fileno(), todo) if hasattr(os, "writev") else 0)
        if left:  # the system took a part of it: the rest, or the reason why it cannot
            handle.write(b"".join(todo)[-left:])
            handle.flush()


def publish_new(path: str | Path, text: str) -> bool:
    """Publish a text only where `path` does not exist; False when it does.

    Of any number of processes, on any number of hosts, one gets True. No operating-system lock is used:
    the finished file is linked to its name, which fails where the name is taken. File systems without
    hard links get an exclusive create, after which a reader may see the file torn for a moment.
    """
    path, temporary = _place(path)
    try:
        with _create(temporary) as handle:
            handle.write(text.encode("utf-8", "backslashreplace"))
            handle.flush()
            os.fsync(handle.fileno())
        if elsewhere is not None and (new := elsewhere.put_new(temporary, path)) is not None:
            if new:
                step("send", path)
                os.replace(temporary, path)
                step("link", path)
            return new
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:
            return _create_new(path, text)
        step("link", path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def _create_new(path: Path, text: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, text.encode("utf-8", "backslashreplace"))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    step("create", path)
    sync_folder(path.parent)
    return True


def _place(path: str | Path) -> tuple[Path, Path]:
    """(path, where it is written first) of a file in a folder that is there."""
    path = Path(path)
    make_folder(path.parent)
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a file", hint="name a file")
    return path, _temporary(path)


def _temporary(path: Path) -> Path:
    """A name that no other writer has: hosts and containers may share a process id, never these bytes."""
    return path.with_name(f".{path.name}{_TMP}{os.getpid()}.{os.urandom(4).hex()}")


def _create(path: Path) -> IO[bytes]:
    try:
        return open(path, "wb")
    except PermissionError:
        raise InputError(
            f"no permission to write in {path.parent}", hint="choose a writable folder"
        ) from None


def publish_text(path: str | Path, text: str) -> None:
    """Publish text as UTF-8; what UTF-8 cannot hold (lone surrogates) is written as its escape."""
    with publish(path) as handle:
        handle.write(text.encode("utf-8", "backslashreplace"))


def publish_json(path: str | Path, value: Any) -> None:
    """Indented JSON with sorted keys and a final newline: equal values give equal bytes."""
    publish_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def publish_array(path: str | Path, array: NDArray[Any]) -> None:
    """Write a C-ordered little-endian .npy in blocks (a memory map is never loaded whole)."""
    array = np.asarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    with publish(path) as handle:
        descr = np.lib.format.dtype_to_descr(array.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": array.shape}
        np.lib.format.write_array_header_1_0(handle, header)
        rows = max(1, BLOCK // max(1, array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))))
        for start in range(0, len(array), rows):
            handle.write(np.ascontiguousarray(array[start : start + rows]).data)


def append_line(path: str | Path, line: str) -> None:
    """Append one line with a single write (safe between processes on a POSIX file system)."""
    path = Path(path)
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (line.rstrip("\n") + "\n").encode("utf-8", "backslashreplace"))
        step("append", path)
    finally:
        os.close(descriptor)


def make_folder(folder: str | Path) -> None:
    folder = Path(folder)
    if not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            taken = next(
                (one for one in (folder, *folder.parents) if one.exists() and not one.is_dir()), folder
            )
            raise InputError(f"{taken} is a file, not a folder", hint="choose another folder") from None
        except PermissionError:
            raise InputError(f"no permission to create {folder}", hint="choose a writable folder") from None


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """One process of a machine at a time is in here for the lock file `path`; a killed one lets go.

    Systems without such locks let all in: who works here does what may be done twice.
    """
    path = Path(path)
    make_folder(path.parent)
    with open(path, "ab") as handle:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle.fileno(), fcntl.LOCK_EX)  # closing the file unlocks it
        yield


def private_folder(name: str) -> Path:
    """A folder for processes of this user on this machine, in the system's temporary folder.

    Raises:
        InputError: the name is taken by something that is not this user's folder.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"packtrain-{user}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != user:
        raise InputError(f"{folder} is not a folder of this user", hint="remove it, or set TMPDIR")
    make_folder(folder / name)
    return folder / name


def remove(path: str | Path, *, here: bool = False) -> None:
    """Remove a file if it is there, durably; `here`: from this disk alone."""
    path = Path(path)
    if elsewhere is not None and not here:
        elsewhere.remove(path)
        step("unsend", path)
    try:
        path.unlink()
    except FileNotFoundError:
        return
    step("unlink", path)
    sync_folder(path.parent)


def move(path: str | Path, target: str | Path) -> None:
    """Rename a published file to a place on the same file system, durably; replaces what is there."""
    path, target = Path(path), Path(target)
    _rename(path, target)
    if elsewhere is not None:
        elsewhere.remove(path)


def _rename(made: Path, path: Path, here: bool = False) -> None:
    """Give a finished file its name, durably; elsewhere first."""
    if elsewhere is not None and not here:
        elsewhere.put(made, path)
        step("send", path)
    os.replace(made, path)
    step("rename", path)
    sync_folder(path.parent)


@contextlib.contextmanager
def tidied(folder: str | Path, unless: bool = False) -> Iterator[None]:
    """Of `folder` and those above it: the ones that are made in the block and stay empty go with it."""
    folder = Path(folder).absolute()
    new = [] if unless else [one for one in (folder, *folder.parents) if not one.is_dir()]
    try:
        yield
    finally:
        for one in new:
            with contextlib.suppress(OSError):  # something was made
                one.rmdir()


def remove_tree(folder: str | Path) -> None:
    """Remove a folder with all in it; what another process removes meanwhile is no error."""
    folder = Path(folder)
    if elsewhere is not None and elsewhere.remove_tree(folder):
        shutil.rmtree(folder, ignore_errors=True)
        step("unlink", folder)
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            remove(path)
    with contextlib.suppress(OSError):
        folder.rmdir()


def is_leftover(name: str) -> bool:
    """Whether a file is a temporary one, of a writer at work or of one that was stopped."""
    return name.startswith(".") and _TMP in name


def remove_leftovers(folder: str | Path, name: str | None = None) -> None:
    """Remove temporary files that a stopped writer left in `folder`: all, or those of one file's `name`."""
    folder = Path(folder)
    start = "." if name is None else f".{name}{_TMP}"
    if folder.is_dir():
        for path in sorted(folder.glob(f".*{_TMP}*")):
            if path.name.startswith(start):
                (remove_tree if path.is_dir() else remove)(path)


def sync_folder(folder: Path) -> None:
    """Make a rename or removal durable; file systems without directory sync are passed over."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    step("fsync_folder", folder)


def read_json(path: str | Path) -> Any:
    """A JSON file, or FormatError that names it."""
    path = Path(path)
    try:
        size = path.stat().st_size
        held = json.loads(path.read_bytes()) if size <= MOST_JSON else None
    except FileNotFoundError:
        raise FormatError(f"{path} does not exist") from None
    except (ValueError, RecursionError) as error:
        said = "lists in lists without end" if isinstance(error, RecursionError) else error
        hint = "it was cut or edited: make it again"
        raise FormatError(f"{path} is not valid JSON: {said}", hint=hint) from None
    if size > MOST_JSON:
        raise FormatError(f"{path} has {size:,} bytes, a marker has at most {MOST_JSON:,}")
    return held


def parse_yaml(text: str, name: str) -> Any:
    """What a YAML text holds, in plain values. JSON is YAML too.

    Raises:
        ConfigError: malformed, with line and column; a key given twice; longer, deeper or, by its aliases,
            larger than a configuration can be.
    """
    import yaml

    if len(text) > MOST_YAML:
        raise ConfigError(f"{name} has more than {MOST_YAML:,} characters: it is no configuration")

    try:
        value = yaml.load(text, Loader=_yaml_loader())
        size = _values(value, {})
    except yaml.YAMLError as error:
        raise _malformed(error, text, name) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply", hint="a value is a plain value") from None
    except (TypeError, ValueError, OverflowError, AttributeError, LookupError) as error:
        hint = "a key is plain text, a value a plain value"
        raise ConfigError(f"{name}: {one_line(error, 160)}", hint=hint) from None
    if size > MOST_YAML:
        raise ConfigError(f"{name} stands for more than {MOST_YAML:,} values by its aliases")
    return value


@functools.cache
def _yaml_loader() -> type[Any]:
    """The reader of YAML that refuses a key given twice."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            seen: set[Any] = set()
            for key in keys:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        told = f"key {key.value!r} is given twice"
                        raise yaml.constructor.ConstructorError(None, None, told, key.start_mark)
                    seen.add(key.value)
            return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]

    return Loader


def _malformed(error: Any, text: str, name: str) -> ConfigError:
    """What a reader of YAML says of a text, with line and column."""
    mark = getattr(error, "problem_mark", None)
    where = name if mark is None else f"{name}, line {mark.line + 1}, column {mark.column + 1}"
    before = "" if mark is None else "".join(text.splitlines()[mark.line : mark.line + 1])[: mark.column + 1]
    if "\t" in before:
        return ConfigError(f"{where}: a tab", hint="YAML is indented with spaces")
    problem = getattr(error, "problem", None) or first_line(error)
    return ConfigError(f"{where}: {problem}", hint="mend the YAML at this place")


def _values(value: Any, known: dict[int, int]) -> int:
    """How many values a value stands for where each alias counts as what it names."""
    if not isinstance(value, (dict, list, set)):
        return 1
    if id(value) not in known:
        known[id(value)] = MOST_YAML  # a value that holds itself has no end
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_values(one, known) for one in inner)
    return known[id(value)]


@contextlib.contextmanager
def reading(path: str | Path, what: str, hint: str | None = "make it again") -> Iterator[None]:
    """Around code that takes a marker or state apart: what an edited one leads to is one FormatError.

    A file that is not there is one too. Errors of packtrain, of the file system and of imports pass; all
    others become "`path` is not `what`: …".
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FormatError(f"{error.filename or path} is missing", hint=hint) from None
    except (PacktrainError, OSError, ImportError):
        raise
    except Exception as error:  # wrong types, numbers without measure, damaged arrays and archives
        said = one_line(error, 160) or type(error).__name__
        if isinstance(error, KeyError | RecursionError):
            said = f"it lacks {error}" if isinstance(error, KeyError) else "nested too deeply"
        raise FormatError(f"{path} is not {what}: {said}", hint=hint) from None


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, ASCII: the bytes that digests are taken over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def digest_json(value: Any) -> str:
    """SHA-256 (hex) of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


class Stamp(NamedTuple):
    """What one `stat` tells of a file: while all four are the same, so is its content.

    Size and time alone are kept by a copy that replaces a file; the time of change and the inode are not.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        inode = status.st_ino & (1 << 63) - 1  # some file systems use all 64 bits
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, inode)


def parse_json(data: str | bytes) -> Any:
    """`json.loads`, with a ValueError for what is nested too deeply too."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_range(descriptor: int, offset: int, count: int) -> bytes:
    """`count` bytes from `offset`; loops because one read may return less than asked."""
    data = os.pread(descriptor, count, offset)
    while len(data) < count and (more := os.pread(descriptor, count - len(data), offset + len(data))):
        data += more
    return data


def sha256_file(path: str | Path) -> str:
    """SHA-256 (hex) of a file's bytes, read in blocks."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def recipe_hint(path: Path) -> str | None:
    """Where an artefact is meant: what reads a YAML, and where a run leaves what it made; None: no YAML."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return None
    return "a YAML is read by packtrain run and train; name its training.output_dir, or a folder in that"
