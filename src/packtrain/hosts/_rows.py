"""Rows a host holds in memory: their lengths, without encoding where possible, and keys that nothing reads.

    tokenised rows       the length of `input_ids`
    chats with media     metadata: the chat template's text is tokenised, sizes come from media headers
    anything             `measure=` a function of the row, or "encode" for the collator itself

Whatever the way, a seeded sample of rows is encoded for real and compared before anything is planned.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, InputError, SampleError, counted, one_line
from ..extend import Measured, measure_many
from ..measuring.run import drained
from ..pipeline.publish import details, refuse_unread, told
from ..planning.lengths import STATUS_EMPTY, STATUS_FAILED, Lengths
from ..sources._account import LEDGER, UNREAD, Account
from ..sources._memory import InMemory, undecoded
from ..sources._values import absent, texts_in
from ..sources.chat import ChatSource
from ..sources.encoded import unread_columns

logger = logging.getLogger(__name__)

_BATCH = 256

_SHOWN = 20  # rows named in one line

#: Costs that depend on what the host trains on, which is not ours to say.
_HOST_DECIDES = ("supervised",)


@dataclass(frozen=True, kw_only=True)
class ChatReader:
    """How the rows of a host are read as chats, where they must be.

    Attributes:
        processor: processor or tokenizer of the host; None: it has none.
        template: options of `HFTemplate`.
        source: options of `ChatSource`.
        convert: row of the host -> record of a known shape.
    """

    processor: Any = None
    template: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[Any], Any] | None = None


class Parts:
    """The samples of rows that are lists of samples: of one each, or (`several`) of as many as they are."""

    def __init__(self, rows: Any, several: bool) -> None:
        self.rows, self.places = rows, None
        if several:
            counts = [len(rows[row]) for row in range(len(rows))]
            self.places = [(row, part) for row, count in enumerate(counts) for part in range(count)]

    def __len__(self) -> int:
        return len(self.rows if self.places is None else self.places)

    def __getitem__(self, index: int) -> Any:
        row, part = (index, 0) if self.places is None else self.places[index]
        made = self.rows[row]
        if self.places is None and len(made) != 1:
            raise SampleError(
                "several_samples", f"row {row} makes {counted(len(made), 'samples')}, expected one"
            )
        return made[part]


def measure_rows(
    rows: Any,
    encode: Callable[[Any], Mapping[str, Any]],
    measure: Any = None,
    *,
    reader: ChatReader,
    faults: Mapping[int, SampleError] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Lengths, dict[int, str]]:
    """The lengths of `rows`, and a line of words for each that cannot be used or lost answers.

    Args:
        rows: indexable; items as the host's collator takes them.
        encode: row -> encoded sample.
        measure: None: by what the first row holds; "encode"; a template (`extend.Template`); a function
            row -> tokens; or `Lengths`, or their folder, when they were measured before.
        reader: how rows are read as chats.
        faults: rows that are left out, and why.

    Raises:
        UnreadKeys: more than 1 % of the rows hold a key that changes training and that is not read.
        ConfigError: the rows do not say their length, and nothing was given that can.
    """
    left_out: Mapping[int, SampleError] = faults or {}
    known: dict[int, str] = {}
    if isinstance(measure, (str, Path)) and measure != "encode":
        measure, known = Lengths.load(measure), details(measure)
    if isinstance(measure, Lengths):
        if len(measure) != len(rows):
            raise InputError(
                f"{len(measure)} lengths for {counted(len(rows), 'rows')}", hint="measure these rows again"
            )
        return _without(measure, left_out) if left_out else measure, known | _words(left_out.items())
    if not len(rows):
        raise InputError("the dataset is empty", hint="check the training data")
    if measure is None:
        found = _tokenised(rows)
        found = _by_chats(rows, encode, reader, progress) if found is None else found
    elif measure == "encode":
        found = _one_by_one(rows, lambda row: len(encode(row)["input_ids"]), progress)
    elif hasattr(measure, "measure"):
        found = _by_template(rows, measure, reader, progress)
    else:
        found = _one_by_one(rows, measure, progress)
    found = [left_out.get(index, value) for index, value in enumerate(found)]
    return _lengths(found), _words(enumerate(found))


def _words(found: Iterable[tuple[int, Any]]) -> dict[int, str]:
    """As `pipeline.publish.details`: where each row stands that is not whole, and what is wrong."""
    told = {}
    for index, value in found:
        if isinstance(value, SampleError):
            told[index] = f"row {index}: {' '.join(value.message.split())}"
        elif note := getattr(value, "note", "" if int(value) else "no tokens"):
            told[index] = f"row {index}: {note}"
    return told


def _without(lengths: Lengths, faults: Mapping[int, SampleError]) -> Lengths:
    """Lengths in which the rows of `faults` are left out."""
    status = lengths.status.copy()
    status[list(faults)] = STATUS_FAILED
    reasons = {**lengths.reasons, **{index: error.reason for index, error in faults.items()}}
    return Lengths(lengths.tokens, lengths.costs, status, reasons)


def _tokenised(rows: Any) -> list[Any] | None:
    columns = getattr(rows, "column_names", None)
    if columns is not None and "input_ids" in columns:
        names = [name for name in ("input_ids", "attention_mask") if name in columns]
        chosen = rows.select_columns(names).with_format(None)
        return [
            _tokens(dict(zip(names, values, strict=True)))
            for batch in chosen.iter(1000)
            for values in zip(*(batch[name] for name in names), strict=True)
        ]
    first = rows[0]
    if not isinstance(first, Mapping) or "input_ids" not in first:
        return None
    return [_tokens(rows[i]) for i in range(len(rows))]


def token_counts(rows: Any) -> Iterator[int]:
    """Tokens of each row of a `datasets.Dataset` of `input_ids`, as it stands there."""
    batches = rows.select_columns("input_ids").iter(1000)
    return (len(ids) for batch in batches for ids in batch["input_ids"])


def _tokens(row: Mapping[str, Any]) -> int:
    """Tokens of a row without the padding that its mask tells of."""
    count = int(np.shape(row["input_ids"])[-1])
    mask = row.get("attention_mask")
    if mask is None or np.ndim(mask) != 1 or len(mask) != count:
        return count
    inside = np.flatnonzero(np.asarray(mask))
    return int(inside[-1] - inside[0]) + 1 if len(inside) else 0


def _template(rows: Any, reader: ChatReader) -> Any:
    from ..template import HFTemplate

    first = rows[0]
    if reader.processor is None or not isinstance(first, Mapping):
        held = sorted(first) if isinstance(first, Mapping) else type(first).__name__
        raise ConfigError(
            f"the rows hold {held}: no input_ids, and no processor is known to measure them with",
            hint='give Trainer processing_class=processor, or pass measure="encode" or measure=your_function',
        )
    return HFTemplate(reader.processor, trust_hints=True, **reader.template)


def _by_chats(
    rows: Any,
    encode: Callable[[Any], Mapping[str, Any]],
    reader: ChatReader,
    progress: Callable[[int, int], None] | None,
) -> list[Any]:
    """By metadata; what we cannot read as a chat, the host's collator may: it is encoded to be measured.

    But not a row with a key that changes training and is not read: it is left out.
    """
    found = _by_template(rows, _template(rows, reader), reader, progress)
    odd = [i for i, value in enumerate(found) if isinstance(value, SampleError) and value.reason != UNREAD]
    first = one_line(found[odd[0]]) if odd else ""
    failure: Exception | None = None
    for index in odd:
        try:
            found[index] = len(encode(rows[index])["input_ids"])
        except Exception as error:
            failure = failure or error
    if odd and failure is not None and all(isinstance(value, SampleError) for value in found):
        raise InputError(
            f"none of the {counted(len(found), 'rows')} can be "
            f"encoded, the first: {type(failure).__name__}: {failure}",
            hint="the data collator must take one row of the dataset",
        )
    encoded = sum(not isinstance(found[index], SampleError) for index in odd)
    if encoded:
        told = "%s of %d cannot be read as chats here, and were encoded to be measured; the first: %s"
        logger.warning(told, counted(encoded, "rows"), len(found), first)
    return found


def _by_template(
    rows: Any, template: Any, reader: ChatReader, progress: Callable[[int, int], None] | None
) -> list[Any]:
    """A measured value or `SampleError` for each row."""
    samples = ChatSource(InMemory(_Undecoded(rows, reader.convert)), allow_outside=True, **reader.source)
    found: list[Any] = []
    for start in range(0, len(rows), _BATCH):
        stop = min(len(rows), start + _BATCH)
        chats = [_tried(samples.__getitem__, index) for index in range(start, stop)]
        good = iter(measure_many(template, [chat for chat in chats if not isinstance(chat, SampleError)]))
        found += [chat if isinstance(chat, SampleError) else next(good) for chat in chats]
        if progress is not None:
            progress(stop, len(rows))
    counts = drained(samples)
    if unread := {n: count for n, count in counts.items() if " -> " not in n or n.endswith(LEDGER)}:
        logger.warning("keys of the rows that measuring does not read, %s", told(unread))
    odd = [(i, one) for i, one in enumerate(found) if isinstance(one, SampleError)]
    refuse_unread([(i, error.reason, f"row {i}: {error.message}") for i, error in odd], len(found))
    tell_cut([(index, note) for index, value in enumerate(found) if (note := getattr(value, "note", ""))])
    return found


def tell_cut(cut: list[tuple[int, str]]) -> None:
    """Rows that are trained without answers that truncation removed, or cut short."""
    if cut:
        named = "; ".join(f"row {index}: {note}" for index, note in cut[:_SHOWN])
        more = f"; and {counted(len(cut) - _SHOWN, 'more rows')}" if len(cut) > _SHOWN else ""
        logger.warning(
            "%s trained without all answers of the record: %s%s", counted(len(cut), "rows"), named, more
        )


def _one_by_one(
    rows: Any, measure: Callable[[Any], int], progress: Callable[[int, int], None] | None
) -> list[Any]:
    found: list[Any] = []
    for index in range(len(rows)):
        found.append(_tried(lambda i: measure(rows[i]), index))
        if progress is not None:
            progress(index + 1, len(rows))
    return found


def _tried(make: Callable[[int], Any], index: int) -> Any:
    """What is made of a row, or the `SampleError` that says why nothing is."""
    try:
        return make(index)
    except SampleError as error:
        return error


def _lengths(found: list[Any]) -> Lengths:
    """Lengths of measured values; a `SampleError` is a failed sample with its reason."""
    reasons = {i: value.reason for i, value in enumerate(found) if isinstance(value, SampleError)}
    tokens = np.array([0 if isinstance(v, SampleError) else int(v) for v in found], np.int64)
    status = np.zeros(len(found), np.uint8)
    status[tokens == 0] = STATUS_EMPTY
    status[[i for i, reason in reasons.items() if reason != "empty"]] = STATUS_FAILED
    names = sorted({name for v in found if isinstance(v, Measured) for name in v.costs} - set(_HOST_DECIDES))
    costs = {
        name: np.array([v.costs.get(name, 0) if isinstance(v, Measured) else 0 for v in found], np.int64)
        for name in names
    }
    return Lengths(tokens, costs=costs or None, status=status, reasons=reasons or None)


class _Undecoded:
    """Rows whose decoded pictures are given as their sizes: measuring needs no pixel."""

    def __init__(self, rows: Any, convert: Callable[[Any], Any] | None) -> None:
        self.rows, self.convert = undecoded(rows), convert
        self.account = getattr(convert, "account", None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = _sized(self.rows[index])
        return row if self.convert is None else self.convert(row)


def _sized(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sized(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_sized(inner) for inner in value]
    if hasattr(value, "size") and hasattr(value, "mode") and hasattr(value, "getdata"):  # a PIL picture
        width, height = value.size
        return {"bytes": b"decoded", "width": int(width), "height": int(height)}
    return value


# --------------------------------------------------------------------------------------------
# Keys of rows that a host does not read: the rule of every source (`sources._account`).
# --------------------------------------------------------------------------------------------
# A host that reads rows itself reads some columns, and some keys of a message or part. What else they hold is
# counted; what changes training is refused, and stops where more than 1 % of the rows hold it.


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What a host reads of a row.

    Attributes:
        columns: of a row.
        chats: those of them that hold messages.
        says: of a message.
        parts: of a part, beside its `type`.
        media: columns whose media it reads.
        encoded: rows hold `input_ids`, and texts beside them are in these already.
    """

    columns: Collection[str]
    chats: Collection[str] = ()
    says: Collection[str] = ()
    parts: Collection[str] = ()
    media: Collection[str] = ()
    encoded: bool = False


def columns_of(rows: Any) -> set[str]:
    """Columns of a dataset, or keys of its first row."""
    names = getattr(rows, "column_names", None)
    first = rows[0] if names is None and len(rows) else {}
    return set(names or (first if isinstance(first, Mapping) else ()))


def unread_keys(row: Mapping[str, Any], reads: Reads, account: Account) -> None:
    """Account for the keys of one row.

    Raises:
        SampleError: `unread_key`; it is counted already.
    """
    account.begin()
    held = any(not absent(row.get(name)) for name in reads.media)
    try:
        left = [key for key in row if key not in reads.columns]
        if reads.encoded:
            unread_columns(row, left, account)
        elif left:
            said = frozenset(text.strip() for name in reads.chats for text in texts_in(row.get(name)))
            account.rest(row, left, said=said)
        for name in reads.chats:
            for message in _objects(row.get(name)):
                account.rest(message, [key for key in message if key not in reads.says], f"{name}[].")
                for part in _objects(message.get("content", message.get("value"))):
                    mine = {"type", part.get("type"), *reads.parts}
                    account.rest(part, [key for key in part if key not in mine], "content[].")
        account.end(media=held)
    except SampleError as error:
        account.left_out(error)
        raise


def unread_rows(rows: Any, reads: Reads, ignore: Collection[str] = ()) -> dict[int, SampleError]:
    """Rows that hold a key which changes training and which the host does not read, with what is wrong.

    Args:
        rows: a `datasets.Dataset`, or a list of mappings.
        reads: what the host reads.
        ignore: keys that the user leaves out.

    Raises:
        UnreadKeys: more than 1 % of the rows do.
    """
    names = getattr(rows, "column_names", None)
    if names is not None:  # media columns would be decoded
        wanted = {*reads.chats, *(("input_ids", "labels") if reads.encoded else names[:1])}
        rows = rows.select_columns(
            [name for name in names if name not in reads.columns or name in wanted]
        ).with_format(None)
    account = Account(ignore)
    faults: dict[int, SampleError] = {}
    for index in range(len(rows)):
        try:
            unread_keys(rows[index], reads, account)
        except SampleError as error:
            faults[index] = error
    counts = account.drain()
    if counts:
        logger.warning("keys of the rows that the trainer does not read, %s", told(counts))
    refuse_unread([(i, error.reason, f"row {i}: {error.message}") for i, error in faults.items()], len(rows))
    return faults


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list, or of JSON text of one."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except ValueError:
            return []
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, (list, tuple)) else []
