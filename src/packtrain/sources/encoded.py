"""Rows that are encoded already: `input_ids` and what belongs to them, from any file another source reads.

    input_ids         list of whole numbers >= 0, at least one
    labels            as long as input_ids, -100 where not trained on
    loss_mask         instead of labels: 1 (true) where trained on (also `assistant_masks`, `completion_mask`)
    position_ids      optional: [T], or [3][T] for models with three position rows
    attention_mask    optional: all ones; a padded row is refused, because packing would train on padding
    input_length      optional: must agree with input_ids (also `length`, `num_tokens`)

A sample holds numpy int64 arrays under `input_ids`, `labels` and `position_ids`, ready for `EncodedTemplate`,
which measures and encodes it without a tokenizer. The first label is -100: nothing precedes it. Rows without
labels are refused unless `train_on="all"`. Media tensors are not carried: a row that has some is refused
(`unread_key`), as is every other column that changes what is trained; texts and other columns are counted.
Labels and masks that are there must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import one_of
from ..errors import SourceError, counted
from ..extend import Measured, Source
from ..files import StrPath
from . import keys
from ._account import Account, unread
from ._content import fault, refuse
from ._memory import Over, fields_of
from ._values import absent, kind_of_ref

IGNORED = -100
_MASKS = keys.ENCODED["mask"]
_LENGTHS = keys.ENCODED["length"]
_READ = frozenset(name for names in keys.ENCODED.values() for name in names) | {*keys.ENCODED_HARMLESS}
#: What a row was encoded from: its texts are in `input_ids`.
_TEXTS = frozenset(
    name for field, names in keys.FIELDS.items() if field not in keys.MEDIA for name in (field, *names)
) | {*keys.TEXT, "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call"}


class EncodedRows(Over):
    """Encoded samples of a source of raw rows."""

    reads = "encoded"
    encoded = True  # its samples go to `EncodedTemplate`, not through `ChatSource`

    def __init__(
        self, source: Source, train_on: str, columns: Mapping[str, str], ignore_keys: Sequence[str] = ()
    ) -> None:
        self.source, self._train_on, self._columns = source, train_on, dict(columns)
        self.account = Account(ignore_keys)

    def fields(self) -> dict[str, Any]:
        """What the fingerprint is made of, as plain JSON."""
        return {"kind": "encoded", "source": fields_of(self.source), **self.config()}

    def config(self) -> dict[str, Any]:
        ignored = sorted(self.account.ignore)
        options = {"train_on": self._train_on, "columns": self._columns}
        return {**options, "ignore_keys": ignored} if ignored else options

    def read(self, record: Mapping[str, Any]) -> dict[str, Any]:
        row = {name: value for name, value in record.items() if name not in self.account.ignore}
        renamed = {ours: row.get(self._columns.get(ours, ours)) for ours in ("input_ids", "labels")}
        sample = read_row({**row, **renamed}, self._train_on)
        self._account_for(row)
        return sample

    def _account_for(self, row: Mapping[str, Any]) -> None:
        """Columns that nothing read.

        Raises:
            SampleError: unread_key.
        """
        account = self.account
        account.begin()
        left = [name for name in row if name not in _READ and name not in self._columns.values()]
        for ours, name in self._columns.items():
            account.alias(name, ours)
            left += [ours] if name != ours and ours in row else []
        unread_columns(row, left, account)
        account.end()


def unread_columns(row: Mapping[str, Any], names: Iterable[str], account: Account) -> None:
    """Account for columns of an encoded row that nothing read.

    Raises:
        SampleError: `unread_key`.
    """
    rest = []
    for name in names:
        value = row[name]
        if name in account.ignore or name in keys.ENCODED_HARMLESS or absent(value):
            continue
        why = _says(name, value, row)
        if why:
            raise unread(name, why, hint=f"ignore_keys: [{name}] leaves it out")
        if why is None and name in _TEXTS and kind_of_ref(value) is None:
            account.note(name)
        elif why is None:
            rest.append(name)
    account.rest(row, rest, media=False)


def _says(name: str, value: Any, row: Mapping[str, Any]) -> str | None:
    """What a column says that is not carried; "" where it says nothing, None where its name tells nothing."""
    if name in keys.ENCODED_TRAINING:
        return "changes what is trained"
    if name in keys.ENCODED_TYPES:
        return "tells tokens apart" if np.any(np.asarray(value)) else ""
    if name == "position_ids":
        alone = np.array_equal(value, np.arange(len(row["input_ids"])))
        return "" if alone else "holds other positions than those of the sample alone"
    if name in _MASKS and row.get("labels") is not None:
        agree = np.array_equal(np.asarray(value)[1:] != 0, np.asarray(row["labels"])[1:] != IGNORED)
        return "" if agree else "trains other tokens than labels"
    return None


class EncodedTemplate:
    """The template of encoded samples: what it measures and encodes is in the sample already."""

    cost_names = ("supervised",)

    def encode(self, sample: Mapping[str, Any]) -> dict[str, NDArray[np.int64]]:
        """`input_ids` int64[T], `labels` int64[T], `position_ids` int64[T] or [3, T]; fresh arrays."""
        ids = sample["input_ids"]
        positions = sample.get("position_ids")
        return {
            "input_ids": np.array(ids, dtype=np.int64),
            "labels": np.array(sample["labels"], dtype=np.int64),
            "position_ids": np.array(np.arange(len(ids)) if positions is None else positions, dtype=np.int64),
        }

    def measure(self, sample: Mapping[str, Any]) -> Measured:
        return Measured(len(sample["input_ids"]), supervised=int(np.sum(sample["labels"] != IGNORED)))

    def config(self) -> dict[str, Any]:
        return {"template": "encoded", "schema": 1}


def open_source(
    path: StrPath,
    *,
    rows: str | None = None,
    train_on: str = "labels",
    columns: Mapping[str, str] | None = None,
    ignore_keys: Sequence[str] = (),
    **options: Any,
) -> EncodedRows:
    """Open encoded rows.

    Args:
        path: whatever another source opens: JSONL, Parquet, Arrow, a `save_to_disk` folder, …
        rows: kind of that source; default by its name.
        train_on: "labels", or "all": rows without labels are trained on whole.
        columns: `{"input_ids": name in the data, "labels": …}`.
        ignore_keys: columns that are left out.
        **options: passed to that source.

    Raises:
        SourceError: it cannot be opened.
    """
    from ._open import open_source as open_any

    one_of("train_on", train_on, ("labels", "all"))
    for name in columns or {}:
        one_of("columns key", name, ("input_ids", "labels"))
    if rows == "encoded":
        raise SourceError("rows='encoded' would open encoded rows of encoded rows", hint="name a file kind")
    return EncodedRows(open_any(path, kind=rows, **options), train_on, columns or {}, ignore_keys)


def read_row(row: Mapping[str, Any], train_on: str = "labels") -> dict[str, Any]:
    """One row as an encoded sample.

    Raises:
        SampleError: malformed_record, empty.
    """
    ids = _numbers(row.get("input_ids"), "input_ids")
    refuse(not len(ids), "input_ids is empty", reason="empty")
    least = int(ids.min())
    refuse(least < 0, f"input_ids holds {least}")
    mask = row.get("attention_mask")
    padded = mask is not None and not _sized(mask, "attention_mask", len(ids)).all()
    refuse(padded, "attention_mask hides tokens: the row is padded", hint="store rows without padding")
    for name in _LENGTHS:
        told = row.get(name)
        if isinstance(told, int) and told != len(ids):
            raise fault(f"{name} is {told} but input_ids has {len(ids)} tokens")
    sample: dict[str, Any] = {"input_ids": ids, "labels": _labels(row, ids, train_on)}
    positions = row.get("position_ids")
    if positions is not None:
        array = _numbers(positions, "position_ids", axes=(1, 2))
        told = f"position_ids has shape {list(array.shape)} for {len(ids)} tokens"
        refuse(array.shape not in ((len(ids),), (3, len(ids))), told)
        sample["position_ids"] = array
    return sample


# --------------------------------------------------------------------------------------------
def _labels(row: Mapping[str, Any], ids: NDArray[np.int64], train_on: str) -> NDArray[np.int64]:
    masks = {name: _sized(row[name], name, len(ids)) != 0 for name in _MASKS if row.get(name) is not None}
    mask = next(iter(masks.values()), None)
    if row.get("labels") is not None:
        labels = _sized(row["labels"], "labels", len(ids)).copy()
        odd = (labels < 0) & (labels != IGNORED)
        if odd.any():
            raise fault(f"labels holds {int(labels[odd][0])}: not a token and not {IGNORED}")
        held = np.flatnonzero(labels[:-1] != IGNORED)
        moved = len(held) > 1 and (labels[held] == ids[held + 1]).all() and (labels[held] != ids[held]).any()
        hint = "store them in place: the loss moves them"
        refuse(moved, "labels are input_ids moved by one", hint=hint)
    elif mask is not None:
        labels = np.where(mask, ids, IGNORED)
    elif train_on == "all":
        labels = ids.copy()
    else:
        raise fault("has no labels and no loss mask", hint='train_on="all" trains on every token')
    labels[0] = IGNORED
    for name, held in masks.items():
        if (held[1:] != (labels[1:] != IGNORED)).any():
            other = "labels" if row.get("labels") is not None else next(iter(masks))
            raise fault(f"{name} and {other} train different tokens", hint=f"ignore_keys: [{name}] decides")
    return labels


def _sized(value: Any, name: str, size: int) -> NDArray[np.int64]:
    array = _numbers(value, name)
    if len(array) != size:
        raise fault(f"{name} has {counted(len(array), 'entries')} for {size} tokens")
    return array


def _numbers(value: Any, name: str, axes: Sequence[int] = (1,)) -> NDArray[np.int64]:
    single = value is None or isinstance(value, (str, bytes, Mapping))
    refuse(single, f"{name} is {type(value).__name__}, not a list of whole numbers")
    try:
        array = np.asarray(value)
    except ValueError:
        raise fault(f"{name} has rows of different lengths") from None
    if array.ndim not in axes or (array.size and array.dtype.kind not in "iub"):
        raise fault(f"{name} is no list of whole numbers (shape {list(array.shape)}, {array.dtype})")
    return array.astype(np.int64)
