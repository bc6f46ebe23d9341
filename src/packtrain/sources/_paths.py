"""Which files a path means: one file, a folder, a glob (`part-*.jsonl`) or braces (`s-{000..009}.tar`).

Several files come in *natural order*: runs of digits compare as numbers (`part-9` before `part-10`), all
else by code point, folders before the names in them. The order is a function of the names alone, so a new
file that sorts last leaves the ids of earlier records as they were. Names that start with a dot or an
underscore (markers such as `_SUCCESS`) are passed over in folders and globs.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import SourceError, nearest
from ..files import StrPath
from ..remote.copies import braces

_DIGITS = re.compile(r"([0-9]+)")
_ALIKE = str.maketrans("123456789", "0" * 9)
_BRACE = re.compile(r"\{([^{}]*)\}")


def natural(name: str) -> tuple[tuple[tuple[int, int, str], ...], ...]:
    """Sort key of a name.

    >>> sorted(["p-10", "p-9", "p-09"], key=natural)
    ['p-09', 'p-9', 'p-10']
    """
    return tuple(
        tuple(
            (0, int(piece), piece) if number % 2 else (1, 0, piece)
            for number, piece in enumerate(_DIGITS.split(level))
            if piece
        )
        for level in name.replace(os.sep, "/").split("/")
    )


def ordered(names: Iterable[str], known: Sequence[str] = ()) -> list[str]:
    """Names in natural order; those in `known` first, in the order they have there."""
    held = set(names)
    first = [name for name in known if name in held]
    rest = held.difference(first)
    alike = len({name.translate(_ALIKE) for name in rest}) == 1  # only digits differ: that is their order
    return first + sorted(rest, key=None if alike else natural)


def below(folder: str, paths: Sequence[str]) -> list[str]:
    """The paths relative to a folder, with `/` on every system."""
    start = os.path.join(folder, "")
    names = (p[len(start) :] if p.startswith(start) else os.path.relpath(p, folder) for p in paths)
    return [name.replace(os.sep, "/") for name in names]


def is_pattern(path: str) -> bool:
    """Whether a path that is no existing file stands for several: it has wildcards or braces."""
    return not os.path.exists(path) and (glob.has_magic(path) or _BRACE.search(path) is not None)


def expand(path: StrPath, suffixes: Sequence[str], *, deep: bool = False) -> list[str]:
    """Absolute paths of the files a path means, in natural order; at least one.

    Args:
        path: a file (of any name), a folder, a glob (`**` enters folders), or braces.
        suffixes: names of files that count inside a folder, in lower case with their dot.
        deep: enter the folders of a folder too.

    Raises:
        SourceError: nothing is there; the message names the nearest name, or files that lie deeper.
    """
    text = os.fspath(path)
    if is_pattern(text):
        found = [p for pattern in braces(text) for p in _glob(pattern, exact=_BRACE.search(text) is not None)]
        if not found:
            raise SourceError(f"{text} matches no files", hint=_deeper(text, suffixes))
        return [os.path.abspath(p) for p in ordered(found)]
    full = os.path.abspath(text)
    if os.path.isfile(full):
        return [full]
    if not os.path.isdir(full):
        raise SourceError(f"{text} does not exist", hint=near(full))
    names = list(_below(full, tuple(suffixes), deep))
    if not names:
        raise SourceError(f"{full} holds no {' or '.join(suffixes)} files", hint=_deeper(full, suffixes))
    return [os.path.join(full, name) for name in ordered(names)]


def root_of(path: StrPath) -> str:
    """The absolute folder that names are told relative to: the folder itself, that of a file, or what of a
    pattern stands before its first wildcard."""
    full = os.path.abspath(os.fspath(path))
    if os.path.isdir(full):
        return full
    root = os.path.dirname(full)
    while is_pattern(root) and root != os.path.dirname(root):
        root = os.path.dirname(root)
    return root


def _glob(pattern: str, *, exact: bool) -> list[str]:
    if not glob.has_magic(pattern):
        if exact and not os.path.isfile(pattern):
            raise SourceError(f"{pattern} does not exist", hint="the braces ask for it")
        return [pattern]
    return [
        p
        for p in glob.glob(pattern, recursive=True)
        if os.path.isfile(p) and not os.path.basename(p).startswith((".", "_"))
    ]


def _below(folder: str, suffixes: tuple[str, ...], deep: bool) -> Iterator[str]:
    """Names of the files that count in a folder, relative to it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith((".", "_")):
                continue
            if deep and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(PermissionError):
                    yield from (os.path.join(entry.name, name) for name in _below(entry.path, suffixes, deep))
            elif entry.name.lower().endswith(suffixes) and entry.is_file():
                yield entry.name


def _deeper(text: str, suffixes: Sequence[str]) -> str | None:
    """A hint at files of the right kind further down."""
    root = text
    while glob.has_magic(root) or _BRACE.search(root) or not os.path.isdir(root):
        parent = os.path.dirname(root)
        if parent == root or not parent:
            root = "."
            break
        root = parent
    found = [p for p in sorted(Path(root).rglob("*")) if p.name.lower().endswith(tuple(suffixes))][:2]
    if not found:
        return None
    return f"{'some exist' if len(found) > 1 else 'one exists'} at another depth, such as {found[0]}"


def near(path: str) -> str:
    """A hint with the nearest existing name in the same folder; what both names end in says nothing."""
    folder, name = os.path.split(os.path.abspath(path))
    stem, ending = os.path.splitext(name)
    try:
        held = sorted(os.listdir(folder))
    except OSError:
        return f"its folder {folder} does not exist either"
    same = {os.path.splitext(one)[0]: one for one in held if one.endswith(ending)}
    others = {os.path.splitext(one)[0]: one for one in held if one not in same.values()}
    for stems in (same, others):
        close = nearest(stem, stems)
        if close is not None:
            return f"did you mean {os.path.join(os.path.dirname(path), stems[close])}?"
    return f"nothing in {folder} has a name like it"
