"""Which files a path means, and the plug-in that opens them: by the option `kind`, by name, then by content.

    file       suffix: .jsonl .ndjson .json (also .gz .zst .bz2 .xz), .parquet .arrow …, .tar, .yaml (mixture)
    .json      one object: by its first key, annotations (coco) or a mixture; else a list of records
    folder     `save_to_disk`, MDS, litdata, Lance, Parquet or Arrow, tars, sound clips, JSONL shards, pairs
    pattern    wildcards or braces: by the suffix of its files; several JSONL or JSON files are shards

A URL (s3://, gs://, hf://, https:// …) is brought here first: copies in the cache folder (`remote.copies`).
A folder that could be several of these is refused with the kinds it could be.
"""

from __future__ import annotations

import contextlib
import glob
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, SourceError, meant, nearest
from ..extend import Source, lookup, names
from ..files import StrPath
from ..remote.copies import braces, bring
from ._handles import contents
from ._index import BOM
from ._values import json_of

_FIRST_KEY = re.compile(rb'\s*\{\s*("(?:[^"\\]|\\.)*")\s*:')
_COCO = ("info", "licenses", "images", "annotations", "categories")
_MIXTURE = ("sources", "seed", "shuffle")
_STORES = {"shards": "mds", "chunks": "litdata"}  # first keys of an index.json
_HEAD = 1 << 16
_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")


def open_source(path: StrPath, *, kind: str | None = None, **options: Any) -> Source:
    """Open a source of samples.

    Args:
        path: a file, a folder, a glob or braces, also as a URL.
        kind: name of a module in `packtrain.sources`; default: by name, then by content.
        **options: passed to the plug-in, for example `cache_dir` and `verify_content`.

    Raises:
        SourceError: the source is missing, empty, of no known kind, or of several.
        ConfigError: an option the plug-in does not have.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise SourceError(
            f"a source is named by a path, not by {type(path).__name__}",
            hint="`packtrain.open_chats` takes a list of records or a `datasets.Dataset`; write a one-shot "
            "generator's to a JSONL file first",
        )
    path = bring(path, options.get("cache_dir"))
    module = lookup("sources", kind if kind is not None else kind_of(path))
    known = inspect.signature(module.open_source).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for option in options:
            if option not in known:
                allowed = [name for name in known if name != "path"]
                hint = meant(option, allowed, f"options: {', '.join(allowed)}")
                name = module.__name__.rpartition(".")[2]
                raise ConfigError(f"sources of kind {name!r} have no option {option!r}", hint=hint)
    source: Source = module.open_source(path, **options)
    return source


def kind_of(path: str) -> str:
    """The plug-in for a path of this machine.

    Raises:
        SourceError: none, or several, fit.
    """
    if os.path.isdir(path):
        return _of_folder(path)
    if is_pattern(path):
        kind = _of_suffix(expand(path, ())[0])
        return "shards" if kind in ("jsonl", "json", None) else kind
    kind = _of_suffix(path)
    if kind == "json":
        key = _first_key(path)
        return "coco" if key in _COCO else "mixture" if key in _MIXTURE else "json"
    if kind is not None:
        return kind
    if not os.path.isfile(path):
        return "jsonl"  # whose message says what is missing
    text = contents(path, _HEAD).removeprefix(BOM).lstrip()
    if text.startswith((b"{", b"[")):
        return "json" if text.startswith(b"[") else "jsonl"
    hint = f"kind=NAME of {', '.join(names('sources'))}"
    if path.endswith((".csv", ".tsv")):
        hint = "write it as JSONL, with pandas: read_csv(path).to_json(out, orient='records', lines=True)"
    raise SourceError(f"{path} is of no known kind", hint=hint)


# --------------------------------------------------------------------------------------------
def _of_suffix(path: str) -> str | None:
    """The plug-in whose `SUFFIXES` hold the path's suffix."""
    lower = path.lower()
    for name in names("sources"):
        if lower.endswith(tuple(getattr(lookup("sources", name), "SUFFIXES", ()))):
            return name
    return None


def _first_key(path: str) -> Any:
    """The first key of a JSON file that holds one object; None for anything else."""
    if not os.path.isfile(path):
        return None
    found = _FIRST_KEY.match(contents(path, _HEAD).removeprefix(BOM))
    return None if found is None else json_of(found[1])


def _of_folder(path: str) -> str:
    listed = sorted(name for name in os.listdir(path) if not name.startswith((".", "_")))
    if any(name in listed for name in _SAVED):
        return "parquet"
    if os.path.isdir(os.path.join(path, "_versions")):
        return "lance"
    if (key := _first_key(os.path.join(path, "index.json"))) in _STORES:
        return _STORES[key]
    suffixes = {name: tuple(lookup("sources", name).SUFFIXES) for name in ("parquet", "webdataset", "jsonl")}
    clips = lookup("sources", "audio_dir")
    lower = [name.lower() for name in listed]
    tables = [name for name in lower if name in clips.TABLES]
    sounds = any(name.endswith(clips.SUFFIXES_OF_CLIPS) for name in lower)
    fits = [
        kind if kind != "jsonl" else "shards"
        for kind, ends in suffixes.items()
        if any(name.endswith(ends) for name in lower if name not in tables)
    ]
    if sounds:
        fits.append("audio_dir")
    if any(name.endswith(".json") for name in lower):
        fits.append("pairs")
    if not fits and tables:
        fits.append("shards" if not _deep(path, clips.SUFFIXES_OF_CLIPS) else "audio_dir")
    if not fits:
        deep = [("parquet", suffixes["parquet"]), ("audio_dir", clips.SUFFIXES_OF_CLIPS)]
        fits = [kind for kind, ends in deep if _deep(path, ends)]
    if len(fits) > 1:
        what = f"files of several kinds: {', '.join(fits)}"
        hint = f"kind={fits[0]!r} names one, or a glob of the files that are meant"
        if os.path.isdir(os.path.join(path, ".packtrain")):
            what, hint = "exported packs", "data.kind: exported trains on them; open_packs reads them"
        raise SourceError(f"{path} holds {what}", hint=hint)
    return fits[0] if fits else "pairs"  # whose message says what a folder may hold


def _deep(path: str, ends: tuple[str, ...]) -> bool:
    return any(name.lower().endswith(ends) for _, _, found in os.walk(path) for name in found)


# --------------------------------------------------------------------------------------------
# Which files a path means: one file, a folder, a glob (`part-*.jsonl`) or braces (`s-{000..009}.tar`)
# --------------------------------------------------------------------------------------------
# Several files come in *natural order*: runs of digits compare as numbers (`part-9` before `part-10`), all
# else by code point, folders before the names in them. The order is a function of the names alone, so a new
# file that sorts last leaves the ids of earlier records as they were. Names that start with a dot or an
# underscore (markers such as `_SUCCESS`) are passed over in folders and globs.
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
    root = root_of(text)
    while not os.path.isdir(root):
        root = os.path.dirname(root)
    ends = tuple(suffixes)
    found = [path for path in sorted(Path(root).rglob("*")) if path.name.lower().endswith(ends)][:2]
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
