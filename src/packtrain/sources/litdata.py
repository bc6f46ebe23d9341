"""litdata datasets, read by `litdata` itself: a folder with `index.json` and its chunks.

Items are dicts whose fields are the record's. Pictures (`jpeg`) come as the bytes that were stored; items
that hold decoded pictures or pickles are refused by name, and so are compressed and encrypted chunks. A set
behind a URL is read from its copies, as every source is.
"""

from __future__ import annotations

import functools
import os

from .. import files
from ..errors import SourceError, optional
from ..files import StrPath
from ._stores import Rows, Stored, index_of

_library = functools.partial(optional, "litdata.streaming.serializers", "litdata", "litdata")

_RAW = ("jpeg",)  # formats whose bytes are a medium's file
_READ = (*_RAW, "str", "bool", "int", "float", "bytes", "json", "text")
_ARRAYS = ("no_header_numpy", "numpy", "no_header_tensor", "tensor")


def open_source(path: StrPath, *, cache_dir: StrPath | None = None, verify_content: bool = False) -> Stored:
    """Open a folder of litdata chunks.

    Args:
        path: the folder of `index.json`.
        cache_dir: where digests go.
        verify_content: hash every file again instead of trusting sizes and times.

    Raises:
        SourceError: missing, torn, no rows, a field that cannot be read as it was stored.
        MissingExtraError: litdata is not installed.
    """
    _library()
    folder = os.path.abspath(os.fspath(path))
    with files.reading(os.path.join(folder, "index.json"), "an index of litdata chunks", "copy it again"):
        index = index_of(folder)
        held = [(str(chunk["filename"]), int(chunk["chunk_size"])) for chunk in index["chunks"]]
        config = dict(index["config"])
        formats = [str(name).partition(":")[0] for name in config["data_format"] or ()]
    if config.get("compression") or config.get("encryption"):
        raise SourceError(f"{folder} holds chunks that are compressed or encrypted", hint="write plain ones")
    odd = [name for name in formats if name not in (*_READ, *_ARRAYS)]
    if odd:
        raise SourceError(
            f"{folder}: a field is stored as {odd[0]}, which is no file of a medium",
            hint="write it as jpeg, bytes, str or numbers",
        )
    return Stored(
        "litdata", folder, held, _opened, also=["index.json"], cache_dir=cache_dir, verify=verify_content
    )


def _opened(folder: str) -> Rows:
    library = _library()
    raw = {name: library.streaming.serializers.BytesSerializer() for name in _RAW}
    rows: Rows = library.StreamingDataset(folder, shuffle=False, serializers=raw).__getitem__
    return rows
