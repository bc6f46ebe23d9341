"""A plan as a table of samples, for tools that do not know packtrain: .npz, .jsonl, .csv or .parquet.

    pack      int64   number of the pack, from 0
    position  int64   place of the sample in its pack, from 0
    sample    int64   id of the sample: its row in the source
    offset    int64   first token of the sample in the pack's row
    length    int64   its tokens

One row a sample, packs ascending, samples in the order of their pack. Samples that are in no pack are not
in the table; `packtrain show PLAN --ledger` names them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..errors import ForeignArtefactError, InputError, optional
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan

Table = dict[str, NDArray[np.int64]]


def plan_table(plan: PackPlan, lengths: Lengths) -> Table:
    """The columns of the table, each int64[samples in packs].

    Raises:
        ForeignArtefactError: `lengths` are not those of the plan.
    """
    if lengths.digest != plan.lengths_digest:
        raise ForeignArtefactError(
            f"the plan is of lengths {plan.lengths_digest[:12]}…, these are {lengths.digest[:12]}…",
            hint="name the lengths that the plan was made from",
        )
    counts = np.diff(plan.offsets)
    packs = np.repeat(np.arange(len(plan), dtype=np.int64), counts)
    samples = np.asarray(plan.indices, np.int64)
    tokens = np.asarray(lengths.tokens, np.int64)[samples]
    before = np.concatenate(([0], np.cumsum(tokens)))
    return {
        "pack": packs,
        "position": np.arange(len(samples), dtype=np.int64) - plan.offsets[:-1][packs],
        "sample": samples,
        "offset": before[:-1] - before[plan.offsets[:-1]][packs],
        "length": tokens,
    }


def write_plan_table(plan: PackPlan, lengths: Lengths, path: str | Path) -> int:
    """Write the table to `path`, by its suffix (see `SUFFIXES`).

    Returns:
        The number of rows.

    Raises:
        InputError: a suffix that is none of ours.
        MissingExtraError: pyarrow is not installed (Parquet).
    """
    path = Path(path)
    write = _WRITERS.get(path.suffix.lower())
    if write is None:
        raise InputError(f"{path.name} is no kind of table", hint=f"use one of {', '.join(SUFFIXES)}")
    table = plan_table(plan, lengths)
    with files.publish(path) as handle:
        write(table, handle)
    return len(table["sample"])


def _npz(table: Table, handle: Any) -> None:
    held = io.BytesIO()
    np.savez(held, allow_pickle=False, **table)
    handle.write(held.getbuffer())


def _rows(table: Table, line: Callable[[list[int]], str], handle: Any) -> None:
    step = 1 << 16
    for start in range(0, len(table["sample"]), step):
        columns = [column[start : start + step].tolist() for column in table.values()]
        handle.write("".join(line(list(row)) for row in zip(*columns, strict=True)).encode())


def _jsonl(table: Table, handle: Any) -> None:
    names = list(table)
    _rows(table, lambda row: json.dumps(dict(zip(names, row, strict=True))) + "\n", handle)


def _csv(table: Table, handle: Any) -> None:
    handle.write((",".join(table) + "\n").encode())
    _rows(table, lambda row: ",".join(map(str, row)) + "\n", handle)


def _parquet(table: Table, handle: Any) -> None:
    pyarrow = optional("pyarrow.parquet", "pyarrow", "arrow")
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(dict(table)), sink)
    handle.write(memoryview(sink.getvalue()))


_WRITERS: dict[str, Callable[[Table, Any], None]] = {
    ".npz": _npz, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet,
}  # fmt: skip
SUFFIXES = tuple(_WRITERS)
