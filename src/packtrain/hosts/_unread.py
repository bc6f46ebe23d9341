"""Keys of rows that a host does not read: the rule of every source (`sources._account`).

A host that reads rows itself reads some columns, and some keys of a message or part. What else they hold is
counted; what changes training is refused, and stops where more than 1 % of the rows hold it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SampleError
from ..pipeline.unread import refuse_unread, told
from ..sources._account import Account
from ..sources._values import absent, texts_in
from ..sources.encoded import unread_columns

logger = logging.getLogger(__name__)


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
