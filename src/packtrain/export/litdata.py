"""litdata: packs as items of a litdata dataset, written and read by `litdata` itself.

    pack-000000-000.bin     chunks of at most `maxsize` bytes, and 64 MiB (a larger pack has one of its own)
    index.json              what `litdata.StreamingDataset` opens

An item holds `key`, `json` and `media`: the bytes of all media behind each other, as the record lists them.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import files
from ..errors import optional
from ._job import Job, Made, Row, joined, published, write_files

library = functools.partial(optional, "litdata", "litdata", "litdata")

OPTIONS: dict[str, Any] = {}
FILES = (r".*\.bin|.*index\.json", r"pack-\d{6,}-\d{3,}\.bin|index\.json")

needs_template = False

_CHUNK = 1 << 26  # bytes: a chunk is put together in memory


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the chunks of a part."""
    library()
    from litdata.streaming.writer import BinaryWriter

    def write(folder: Path, rows: Iterator[Row]) -> Iterator[Made]:
        writer = BinaryWriter(str(folder), chunk_bytes=min(job.maxsize, _CHUNK))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pack that is larger than a chunk
            for number, row in enumerate(rows):
                writer[number] = joined(row)
            writer.done()
        index = files.read_json(folder / f"{writer.rank}.index.json")
        for told in index["chunks"]:
            yield folder / told["filename"], int(told["chunk_size"]), {**told, "config": index["config"]}

    return write_files(job, part, ".bin", write)


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the index of all chunks."""
    told = [{**row["told"], "filename": row["name"]} for part in parts for row in part["files"]]
    configs = [one.pop("config") for one in told]  # all alike: the fields of a row are
    index = json.dumps({"chunks": told, "config": configs[0] if configs else {}}, sort_keys=True)
    return [published(job.out, "index.json", index.encode())]


def open_rows(out: Path) -> Any:
    """The rows, by number of the pack."""
    return library().StreamingDataset(str(out), shuffle=False)
