"""Pick the plug-in that opens a source: by the option `kind`, by name, then by content.

    file       suffix: .jsonl .ndjson .json (also .gz .zst .bz2 .xz), .parquet .arrow …, .tar, .yaml (mixture)
    .json      one object: by its first key, annotations (coco) or a mixture; else a list of records
    folder     `save_to_disk`, MDS, litdata, Lance, Parquet or Arrow, tars, sound clips, JSONL shards, pairs
    pattern    wildcards or braces: by the suffix of its files; several JSONL or JSON files are shards

A URL (s3://, gs://, hf://, https:// …) is brought here first: copies in the cache folder (`remote.copies`).
A folder that could be several of these is refused with the kinds it could be.
"""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

from ..errors import ConfigError, SourceError, meant
from ..extend import Source, lookup, names
from ..files import StrPath
from ..remote.copies import bring
from ._handles import contents
from ._index import BOM
from ._paths import expand, is_pattern
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
    if len(fits) > 1 and os.path.isdir(os.path.join(path, ".packtrain")):
        raise SourceError(
            f"{path} holds exported packs", hint="data.kind: exported trains on them; open_packs reads them"
        )
    if len(fits) > 1:
        raise SourceError(
            f"{path} holds files of several kinds: {', '.join(fits)}",
            hint=f"kind={fits[0]!r} names one, or a glob of the files that are meant",
        )
    return fits[0] if fits else "pairs"  # whose message says what a folder may hold


def _deep(path: str, ends: tuple[str, ...]) -> bool:
    return any(name.lower().endswith(ends) for _, _, found in os.walk(path) for name in found)
