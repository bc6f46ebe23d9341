"""Packs as rows of another library's store: a part becomes files that the library writes by itself.

    key    ps_00000000                                the pack's key
    json   its record (`store.pack_records`)
    media  [{"path": "img000.jpg", "bytes": …}, …]    or all bytes behind each other, as the record lists them

The library writes into a folder of its own beside the export. Its files are hashed, named by part and number,
and moved to their place; what its index must say of them is kept in the manifest until `finish`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import files
from ..store.pack_records import pack_key
from ._job import Job, Member, drop_unlisted, members_ahead

Row = dict[str, Any]

#: A file that was written, its number of packs, and what the index says of it.
Made = tuple[Path, int, dict[str, Any]]


def write_files(
    job: Job,
    part: int,
    suffix: str,
    write: Callable[[Path, Iterator[Row]], Iterable[Made]],
    *,
    below: str = "",
    rows: Iterator[Row] | None = None,
) -> list[dict[str, Any]]:
    """The files of a part: `pack-PART-NUMBER` and the suffix.

    Args:
        write: writes all rows into a folder, and says which files they are in, in order.
        below: folder of the export that they go to, with its slash.
        rows: of the part, where a row is none of the above.

    Returns:
        What the manifest says about each file.
    """
    stem = f"pack-{part:06d}"
    first = job.packs_of(part).start
    made: list[dict[str, Any]] = []
    with files.scratch(job.out / stem) as folder, contextlib.ExitStack() as held:
        given = _rows(held.enter_context(members_ahead(job, part))) if rows is None else rows
        for path, packs, told in write(folder, given):
            row: dict[str, Any] = {
                "name": f"{below}{stem}-{len(made):03d}{suffix}",
                "bytes": path.stat().st_size,
                "sha256": files.sha256_file(path),
                "count": packs,
                "first_key": pack_key(first),
                "last_key": pack_key(first + packs - 1),
                "first_pack": first,
                "told": told,
            }
            files.take(path, job.out / row["name"])
            made.append(row)
            first += packs
    assert first == job.packs_of(part).stop, f"{stem}: {first} rows"
    names = {Path(row["name"]).name for row in made}
    drop_unlisted(job.out / below, f"{stem}-*{suffix}", names)
    return made


def joined(row: Row) -> Row:
    """A row whose media are one value, for stores without lists of bytes."""
    return {**row, "media": b"".join(one["bytes"] for one in row["media"])}


def by_files(
    rows: Iterator[Row], maxsize: int, size: Callable[[Row], int]
) -> Iterator[tuple[int, Iterator[Row]]]:
    """(number, rows) of each file; the next one begins behind `maxsize` bytes."""
    number = held = 0

    def file_of(row: Row) -> int:
        nonlocal number, held
        if held >= maxsize:
            number, held = number + 1, 0
        held += size(row)
        return number

    return itertools.groupby(rows, file_of)


def _rows(members: Iterator[Member]) -> Iterator[Row]:
    media: list[dict[str, Any]] = []
    for number, name, data in members:
        if name != "json":
            media.append({"path": name, "bytes": data})
            continue
        yield {"key": pack_key(number), "json": data.decode("utf-8"), "media": media}
        media = []
