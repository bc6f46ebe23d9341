"""Keys of rows that a host does not read: the rule of every source (`sources._account`).

A host that renders rows itself reads some columns and some keys of a message. What else they hold is counted;
what changes training is refused, and stops where more than 1 % of the rows hold it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import SampleError
from ..pipeline.unread import refuse_unread, told
from ..sources._account import Account

__all__ = ["unread_rows"]

logger = logging.getLogger(__name__)


def unread_rows(
    rows: Any,
    *,
    columns: Collection[str],
    chats: Collection[str],
    says: Collection[str],
    ignore: Collection[str] = (),
    media: bool = False,
) -> dict[int, SampleError]:
    """Rows that hold a key which changes training and which the host does not read, with what is wrong.

    Args:
        rows: a `datasets.Dataset`, or a list of mappings.
        columns: what the host reads of a row.
        chats: those of them that hold messages.
        says: what it reads of a message.
        ignore: keys that the user leaves out.
        media: whether it reads media of the rows.

    Raises:
        UnreadKeys: more than 1 % of the rows do.
    """
    names = getattr(rows, "column_names", None)
    if names is not None:  # media columns would be decoded
        rows = rows.select_columns([name for name in names if name not in columns or name in chats])
    account = Account(ignore)
    faults: dict[int, SampleError] = {}
    for index in range(len(rows)):
        row = rows[index]
        account.begin()
        try:
            account.rest(row, [key for key in row if key not in columns])
            for name in chats:
                for message in _messages(row.get(name)):
                    account.rest(message, [key for key in message if key not in says], f"{name}[].")
            account.end(media=media)
        except SampleError as error:
            account.left_out(error)
            faults[index] = error
    counts = account.drain()
    if counts:
        logger.warning("keys of the rows that the trainer does not read, %s", told(counts))
    refuse_unread([(i, error.reason, f"row {i}: {error.message}") for i, error in faults.items()], len(rows))
    return faults


def _messages(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
