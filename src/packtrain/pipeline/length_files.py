"""Lengths from what users have: a lengths folder, a run, or an array in a file.

    .npy .json            one array of token counts
    .npz .csv .parquet    a column named tokens, length, … (or the only one), with further costs beside it
    .jsonl                numbers, or objects with these keys

Rows are samples, in order: row i is sample i.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..errors import FormatError, LengthError, one_line, optional
from ..planning.lengths import Lengths
from ..remote.places import typed
from .inputs import lengths_of_plan

#: Names under which a column of token counts is found, in this order.
_TOKEN_COLUMNS = (
    "tokens",
    "length",
    "lengths",
    "num_tokens",
    "n_tokens",
    "token_count",
    "seq_len",
    "input_length",
)
#: Further costs that are kept where a file has them.
_COST_COLUMNS = ("images", "patches", "video_frames", "audio_frames", "supervised")

Columns = Mapping[str, Any]


def _read(names: Collection[str]) -> list[str]:
    """The columns that are read: the only one, or token counts and costs; none of a file of samples."""
    if len(names) == 1:
        return list(names)
    known = [name for name in names if name in _TOKEN_COLUMNS or name in _COST_COLUMNS]
    return known if any(name in _TOKEN_COLUMNS for name in known) else []


def read_lengths(path: str | Path) -> Lengths:
    """The lengths in a file of one of `SUFFIXES`.

    Raises:
        FormatError: the file is absent, torn, or holds no column of token counts; names the columns it has.
        LengthError: a count is negative, no integer, or missing.
    """
    path = Path(path)
    if not path.exists():
        raise FormatError(f"{path} does not exist", hint="name a lengths folder, or a file of token counts")
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise FormatError(
            f"{path} is neither a lengths folder nor a file of token counts",
            hint=files.recipe_hint(path) or f"use one of {', '.join(SUFFIXES)}",
        )
    try:
        with files.reading(path, "an array of token counts", None):
            return _lengths(path, read(path))
    except OSError as error:
        raise FormatError(f"{path} is not an array of token counts: {error}") from None


def _lengths(path: Path, columns: Columns) -> Lengths:
    names = _TOKEN_COLUMNS if len(columns) > 1 else tuple(columns)
    name = next((known for known in names if known in columns), "")
    values = np.asarray(columns.get(name, ()))
    hint = f"records of samples are measured first: packtrain measure {typed(path)}"
    if not columns:
        why, hint = "is empty", f"expected a column {_TOKEN_COLUMNS[0]} of token counts"
    elif name not in columns:
        why = f"has columns {', '.join(map(str, columns))}: none is named as token counts are"
        hint = f"name it {_TOKEN_COLUMNS[0]}; {hint}"
    elif len(values) and values.dtype.kind not in "biuf":
        why = f"holds no token counts: {name} is {str(values[0])[:40]!r}"
    else:
        held = (cost for cost in _COST_COLUMNS if cost in columns and cost != name)
        return Lengths(values, costs={cost: np.asarray(columns[cost]) for cost in held} or None)
    raise FormatError(f"{path} {why}", hint=hint)


def _npy(path: Path) -> Columns:
    return {"tokens": np.load(path, mmap_mode="r", allow_pickle=False)}


def _npz(path: Path) -> Columns:
    with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as held:
        return {name: held[name] for name in held.files}


def _json(path: Path) -> Columns:
    values = json.loads(path.read_bytes())
    if isinstance(values, Mapping) and any(isinstance(column, list) for column in values.values()):
        return {str(name): column for name, column in values.items() if isinstance(column, list)}
    if not isinstance(values, list):
        raise FormatError(f"{path} holds one {type(values).__name__}, expected a list of token counts")
    return {"tokens": values}


def _jsonl(path: Path) -> Columns:
    with open(path, encoding="utf-8") as handle:
        rows = [json.loads(line) for line in handle if line.strip()]
    if not any(isinstance(row, Mapping) for row in rows):
        return {"tokens": rows}
    return _transposed(path, rows)


def _csv(path: Path) -> Columns:
    with open(path, encoding="utf-8-sig", newline="") as handle:
        rows: list[list[str]] = [row for row in csv.reader(handle) if row]
    if rows and all(_is_count(cell) for cell in rows[0]):  # no header
        if len(rows[0]) > 1:
            raise FormatError(f"{path} has {len(rows[0])} columns and no header", hint="name its columns")
        return {"tokens": [_count(path, number, row[0]) for number, row in enumerate(rows, 1)]}
    header, body = (rows[0], rows[1:]) if rows else ([], [])
    held: dict[str, list[int]] = {}
    names = [name.strip() for name in header]
    for name in _read(names):
        place = names.index(name)
        held[name] = [
            _count(path, number, row[place] if place < len(row) else "") for number, row in enumerate(body, 2)
        ]
    return {name: held.get(name, []) for name in names}


def _parquet(path: Path) -> Columns:
    parquet = optional("pyarrow.parquet", "pyarrow", "arrow").parquet
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise FormatError(f"{path} is not a Parquet file: {one_line(error)}") from None
    names = _read(table.column_names)
    for name in names:
        if table.column(name).null_count:
            raise LengthError(f"{path}: column {name} has rows without a value", hint="every row is a sample")
    held = {name: table.column(name).to_numpy() for name in names}
    return {name: held.get(name, []) for name in table.column_names}


def _transposed(path: Path, rows: list[Any]) -> Columns:
    known = {name for row in rows if isinstance(row, Mapping) for name in row}
    held: dict[str, list[Any]] = {}
    for name in _read(known):
        lacks = [n for n, row in enumerate(rows, 1) if not isinstance(row, Mapping) or row.get(name) is None]
        if lacks:
            raise LengthError(f"{path}, record {lacks[0]} has no {name}", hint="every record is a sample")
        held[name] = [row[name] for row in rows]
    return {str(name): held.get(name, []) for name in sorted(known, key=str)}


def _is_count(text: str) -> bool:
    return text.strip().lstrip("+-").replace(".", "", 1).isdigit()


def _count(path: Path, line: int, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LengthError(
            f"{path}, line {line}: {text!r} is no token count", hint="whole numbers of tokens, one a sample"
        ) from None


_READERS: dict[str, Callable[[Path], Columns]] = {
    ".npy": _npy, ".npz": _npz, ".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet,
}  # fmt: skip
SUFFIXES = tuple(_READERS)


def lengths_of(plan_folder: str | Path) -> Lengths:
    """The lengths a plan was made from, whatever they are kept in.

    Raises:
        FormatError: the plan does not name them, or they are gone.
    """
    path = Path(plan_folder) / "origin.json"
    with files.reading(path, "a plan's origin"):
        name = dict(files.read_json(path) if path.is_file() else {}).get("lengths")
    if isinstance(name, str) and Path(name).suffix in SUFFIXES and os.path.isfile(name):
        return read_lengths(name)
    return Lengths.load(lengths_of_plan(plan_folder))
