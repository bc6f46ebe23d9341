"""MosaicML streaming datasets (MDS), read by `streaming` itself: a folder with `index.json` and its shards.

A row's columns are the record's fields. Columns of pictures (`jpeg`, `png`) come as the bytes that were
stored; columns that hold decoded pictures or pickles are refused by name, and so are compressed shards.
A set behind a URL is read from its copies, as every source is.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from .. import files
from ..errors import SourceError, optional
from ..files import StrPath
from ._stores import Rows, Stored, index_of

_library = functools.partial(optional, "streaming", "mosaicml-streaming", "mds")

_RAW = ("jpeg", "png")  # encodings whose bytes are a picture's file
_NOT = ("pil", "list", "jpeg_array", "jpegarray", "pkl")


def open_source(
    path: StrPath, *, split: str = "", cache_dir: StrPath | None = None, verify_content: bool = False
) -> Stored:
    """Open a folder of MDS shards.

    Args:
        path: the folder of `index.json`.
        split: a folder of it.
        cache_dir: where digests go.
        verify_content: hash every file again instead of trusting sizes and times.

    Raises:
        SourceError: missing, torn, no rows, a column that cannot be read as it was stored.
        MissingExtraError: mosaicml-streaming is not installed.
    """
    _library()
    folder = os.path.join(os.path.abspath(os.fspath(path)), split) if split else os.path.abspath(path)
    with files.reading(os.path.join(folder, "index.json"), "an index of MDS shards", "copy it again"):
        shards = [dict(shard) for shard in index_of(folder)["shards"]]
        for shard in shards:
            _check(folder, shard)
        held = [(str(shard["raw_data"]["basename"]), int(shard["samples"])) for shard in shards]
    return Stored(
        "mds", folder, held, _opened, also=["index.json"], cache_dir=cache_dir, verify=verify_content
    )


def _check(folder: str, shard: dict[str, Any]) -> None:
    if shard["format"] != "mds" or shard["zip_data"] is not None:
        kind = f"compressed ({shard['compression']})" if shard["format"] == "mds" else shard["format"]
        raise SourceError(f"{folder} holds shards that are {kind}", hint="write plain MDS shards")
    for column, encoding in zip(shard["column_names"], shard["column_encodings"], strict=True):
        if encoding.partition(":")[0].partition("[")[0] in _NOT:
            raise SourceError(
                f"{folder}: column {column} is stored as {encoding}, which is no file of a medium",
                hint="write it as jpeg, png or bytes",
            )


def _opened(folder: str) -> Rows:
    rows = _library().LocalDataset(folder)
    for shard in rows.shards:
        kept = shard.column_encodings
        shard.column_encodings = ["bytes" if encoding in _RAW else encoding for encoding in kept]

    def row(number: int) -> Any:
        shard, place = rows.spanner[number]
        return rows.shards[shard][place]

    return row
