"""mds: packs as rows of a MosaicML streaming dataset, written and read by `streaming` itself.

    pack-000000-000.mds     shards of at most `maxsize` bytes, and 64 MiB (a larger pack has one of its own)
    index.json              what `StreamingDataset` and `LocalDataset` open

A row holds `key`, `json` and `media`: the bytes of all media behind each other, as the record lists them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import optional
from ._job import Job, Made, Row, joined, published, write_files

library = functools.partial(optional, "streaming", "mosaicml-streaming", "mds")

OPTIONS: dict[str, Any] = {}
FILES = (r".*\.mds(\.\w+)?|index\.json", r"pack-\d{6,}-\d{3,}\.mds|index\.json")

needs_template = False

_COLUMNS = {"key": "str", "json": "str", "media": "bytes"}
_SHARD = 1 << 26  # bytes: a shard is put together in memory


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the shards of a part."""
    streaming = library()

    def write(folder: Path, rows: Iterator[Row]) -> Iterator[Made]:
        out = folder / "mds"
        limit = min(job.maxsize, _SHARD)
        with streaming.MDSWriter(columns=_COLUMNS, out=str(out), size_limit=limit, max_workers=1) as writer:
            for row in rows:
                writer.write(joined(row))
        for told in writer.shards:
            if told["samples"]:  # before a pack that is larger than a shard it writes an empty one
                yield out / told["raw_data"]["basename"], int(told["samples"]), told

    return write_files(job, part, ".mds", write)


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the index of all shards."""
    shards = [
        {**row["told"], "raw_data": {**row["told"]["raw_data"], "basename": row["name"]}}
        for part in parts
        for row in part["files"]
    ]
    told = json.dumps({"version": 2, "shards": shards}, sort_keys=True)
    return [published(job.out, "index.json", told.encode())]


def open_rows(out: Path) -> Any:
    """The rows, by number of the pack."""
    return library().LocalDataset(str(out))
