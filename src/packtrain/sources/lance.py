"""Lance datasets, read by `lance` itself: the newest version, or the one that `version=` names.

A row's columns are the record's fields; structs are dicts, so `{"bytes", "path"}` is a medium. Deleted rows
are left out, as Lance leaves them out. The fingerprint is over the data files and deletions of the version.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks import one_of
from ..errors import SourceError, optional
from ..files import StrPath
from ._handles import by_library
from ._stores import Rows, Stored

_library = functools.partial(optional, "lance", "pylance", "lance")


def open_source(
    path: StrPath,
    *,
    version: int | None = None,
    columns: Sequence[str] | None = None,
    cache_dir: StrPath | None = None,
    verify_content: bool = False,
) -> Stored:
    """Open a Lance dataset.

    Args:
        path: its folder.
        version: number of a version; the newest by default, then fixed.
        columns: read only these; all by default.
        cache_dir: where digests go.
        verify_content: hash every file again instead of trusting sizes and times.

    Raises:
        SourceError: missing, torn, no rows.
        UnknownNameError: a column it does not have.
        MissingExtraError: pylance is not installed.
    """
    lance = _library()
    folder = os.path.abspath(os.fspath(path))
    if not os.path.isdir(os.path.join(folder, "_versions")):
        raise SourceError(f"{folder} is no Lance dataset", hint="name the folder that holds _versions")
    with by_library(f"{folder} cannot be opened"):
        data = lance.dataset(folder, version=version)
        counts = [(fragment, int(fragment.count_rows())) for fragment in data.get_fragments()]
    for column in columns or ():
        one_of("column", column, data.schema.names)
    held, also = [], []
    for fragment, rows in counts:
        paths = [str(Path("data", file.path)) for file in fragment.data_files()]
        held.append((paths[0], rows))
        also += paths[1:]
        deleted = fragment.deletion_file()
        also += [str(deleted)] if deleted else []
    chosen = list(columns) if columns else None
    opened = functools.partial(_opened, version=int(data.version), columns=chosen)
    rest: dict[str, Any] = {"chosen": chosen, "cache_dir": cache_dir, "verify": verify_content}
    return Stored("lance", folder, held, opened, also=also, **rest)


def _opened(folder: str, version: int, columns: list[str] | None) -> Rows:
    data = _library().dataset(folder, version=version)
    return lambda number: data.take([number], columns=columns).to_pylist()[0]
