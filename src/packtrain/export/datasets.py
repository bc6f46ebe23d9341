"""datasets: packs as rows of a Hugging Face dataset, as `save_to_disk` leaves one; `load_from_disk` maps it.

    pack-000000-000.arrow   one record batch a pack; the next file begins behind `maxsize` bytes
    dataset_info.json, state.json

A row holds `key`, `json` and `media`: a list of {"path", "bytes"}, the form of undecoded `Image` and `Audio`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import optional
from ._job import Job, Made, Row, by_files, published, write_files

library = functools.partial(optional, "datasets", "datasets", "datasets")

OPTIONS: dict[str, Any] = {}
FILES = (
    r".*\.arrow|state\.json|dataset_info\.json|dataset_dict\.json",
    r"pack-\d{6,}-\d{3,}\.arrow|state\.json|dataset_info\.json",
)

needs_template = False


def write_part(job: Job, part: int) -> list[dict[str, Any]]:
    """Write the Arrow files of a part."""
    features = _features()
    from datasets.arrow_writer import ArrowWriter

    def write(folder: Path, rows: Iterator[Row]) -> Iterator[Made]:
        for number, held in by_files(rows, job.maxsize, _size):
            path, packs = folder / f"{number}.arrow", 0
            with ArrowWriter(features=features, path=str(path), writer_batch_size=1) as writer:
                for row in held:
                    writer.write(row)
                    packs += 1
                writer.finalize()
            yield path, packs, {}

    return write_files(job, part, ".arrow", write)


def finish(job: Job, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write what `load_from_disk` asks for."""
    from datasets import DatasetInfo

    names = [{"filename": row["name"]} for part in parts for row in part["files"]]
    state: dict[str, Any] = {
        "_data_files": names,
        "_fingerprint": job.plan.checksum[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    told = {"dataset_info.json": asdict(DatasetInfo(features=_features())), "state.json": state}
    return [published(job.out, name, json.dumps(held, indent=2).encode()) for name, held in told.items()]


def open_rows(out: Path) -> Any:
    """The rows, by number of the pack."""
    return library().load_from_disk(str(out))


def _size(row: Row) -> int:
    return len(row["json"]) + sum(len(one["bytes"]) for one in row["media"])


def _features() -> Any:
    value = library().Value
    media = {"path": value("string"), "bytes": value("large_binary")}
    return library().Features(key=value("string"), json=value("large_string"), media=[media])
