"""What a measured source holds that nothing read: refused where it changes training, else counted and kept.

`keys.json` beside the lengths holds the counts of the account (`sources._account`): keys that nothing reads,
and spellings that were read as a field. It is outside every digest and absent where there is nothing to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import files
from ..sources._account import UNREAD, UnreadKeys, check_share, told

__all__ = ["KEYS", "UnreadKeys", "read_keys", "refuse_unread", "save_keys", "told"]

KEYS = "keys.json"


def refuse_unread(rows: Iterable[tuple[int, str, str]], total: int) -> int:
    """Stop where more than 1 % of the records have the reason `unread_key`.

    Args:
        rows: (id, reason, detail) of samples that cannot be used.
        total: records of the source.

    Returns:
        How many records there are with that reason.

    Raises:
        UnreadKeys: names the key, a record, and the option that settles it.
    """
    count, first = 0, ""
    for _, reason, detail in rows:
        if reason == UNREAD:
            count, first = count + 1, first or detail
    check_share(count, total, first)
    return count


def save_keys(folder: Path, counts: Mapping[str, int]) -> None:
    """Keep the counts beside the lengths."""
    if counts:
        files.publish_json(folder / KEYS, dict(sorted(counts.items())))
    else:
        files.remove(folder / KEYS)


def read_keys(folder: str | Path) -> dict[str, int]:
    """The counts beside lengths; empty where there are none."""
    path = Path(folder) / KEYS
    return {str(name): int(count) for name, count in files.read_json(path).items()} if path.is_file() else {}
