"""lance: packs as rows of a Lance dataset, written and read by `lance` itself.

    data/pack-000000-000.lance      one fragment each; the next begins behind about `maxsize` bytes
    _versions/, _transactions/      the one version that holds them all; it names the time it was made

A row holds `key`, `json` and `media`: a list of {"path", "bytes"}. The data have the same bytes whoever
writes; the two folders of the version, which Lance stamps with the time, are outside of the digests.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import files
from ..errors import optional
from ._job import Job, Made, Row, write_files

library = functools.partial(optional, "lance.fragment", "pylance", "lance")

OPTIONS: dict[str, Any] = {}
FILES = (r"(?!)", r"data|_versions|_transactions")

needs_template = False

_VERSION = ("_versions", "_transactions")


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the fragments of a part."""
    lance = library()
    import pyarrow as pa

    def write(folder: Path, rows: Iterator[Row]) -> Iterator[Made]:
        schema = _schema()
        batches = (pa.RecordBatch.from_pylist([row], schema=schema) for row in rows)
        reader = pa.RecordBatchReader.from_batches(schema, batches)
        how = {"schema": schema, "mode": "create", "max_bytes_per_file": job.maxsize}
        made = lance.fragment.write_fragments(reader, str(folder), **how)
        for fragment in made:
            told = fragment.to_json()
            yield folder / "data" / told["files"][0].pop("path"), int(told["physical_rows"]), told

    return write_files(job, part, ".lance", write, below="data/")


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make the version that holds all fragments."""
    lance = library()
    fragments = []
    for number, row in enumerate(row for part in parts for row in part["files"]):
        (held,) = row["told"]["files"]
        told = {**row["told"], "id": number, "files": [{**held, "path": Path(row["name"]).name}]}
        fragments.append(lance.FragmentMetadata.from_json(json.dumps(told)))
    for name in _VERSION:
        files.remove_tree(job.out / name)
    with files.scratch(job.out / "version") as folder:
        lance.LanceDataset.commit(str(folder), lance.LanceOperation.Overwrite(_schema(), fragments))
        for name in reversed(_VERSION):
            for path in sorted((folder / name).iterdir()):
                files.take(path, job.out / name / path.name)
    return []


class Rows:
    """The rows of a Lance dataset by number."""

    def __init__(self, out: Path) -> None:
        self._data = library().dataset(str(out))

    def __len__(self) -> int:
        return int(self._data.count_rows())

    def __getitem__(self, number: int) -> Row:
        row: Row = self._data.take([number]).to_pylist()[0]
        return row


def open_rows(out: Path) -> Rows:
    """The rows, by number of the pack."""
    return Rows(out)


def _schema() -> Any:
    import pyarrow as pa

    media = pa.struct([("path", pa.string()), ("bytes", pa.large_binary())])
    return pa.schema([("key", pa.string()), ("json", pa.large_string()), ("media", pa.list_(media))])
