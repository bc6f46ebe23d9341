"""The beginning of a stream: what is refused before anybody reads of it, and how it is taken back.

A wrong processor, kind or column makes every record fail. Each of them would be a fault for the ledger, and
all of them together are a fault of the command: it stops, and what it began is forgotten, so that the right
command can use the same folder. The same holds for a cap on a cost that nobody measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..errors import PlanError, SourceError, counted, nearest
from ..planning.lengths import STATUS_OK, Lengths
from ..sources._account import UNREAD, UnreadKeys, check_share
from ..store.growing import COMPLETED, END, INDEX, JOURNAL, STREAM, number_of
from ..waiting.poll import fresh_names
from ._journal import Journal
from ._produce_stats import ProduceStats

__all__ = [
    "FAULTY",
    "STOP_AFTER",
    "check_account",
    "check_limits",
    "check_readable",
    "check_usable",
    "limited",
    "undo_beginning",
]

#: Records that may all fail for one reason before the producer stops.
STOP_AFTER = 100

#: Raw shards that may all be unreadable before a watching producer stops.
FAULTY = 10


def check_limits(limits: Mapping[str, int], measured: Iterable[str] | None) -> None:
    """Refuse a limit of a cost that is not measured: it would have no effect.

    Args:
        measured: names of the costs; None: nobody knows yet.

    Raises:
        PlanError: names the cost and those that are known.
    """
    if measured is None:
        return
    known = sorted(measured)
    for name in limits:
        if name not in known:
            close = nearest(name, known)
            raise PlanError(
                f"limits names the cost {name!r}, the template measures: {', '.join(known) or 'none'}",
                hint=f"did you mean {close!r}?" if close else "leave the limit out",
            )


def limited(lengths: Lengths, limits: Mapping[str, int], *, check: bool) -> Lengths:
    """The lengths with the costs that are limited, 0 where no sample of the window has one.

    Args:
        check: refuse a cost that no sample has, where one can be used: a template that does not say what it
            measures (`cost_names`) has said so now.
    """
    if check and (lengths.status == STATUS_OK).any():
        check_limits(limits, lengths.costs)
    none = np.zeros(len(lengths), np.int64)
    costs = {name: lengths.costs.get(name, none) for name in limits}
    return Lengths(lengths.tokens, costs, lengths.status, lengths.reasons)


def check_readable(output: Path, journal: Journal, *, least: int | None = None) -> None:
    """Stop where no raw shard can be read, and take back what was begun.

    Args:
        least: so many shards are enough to say so; 0: none are. None: the input has ended.

    Raises:
        SourceError: there is no raw shard, or none that can be read.
    """
    shards = journal.shards
    if any(not shard.fault for shard in shards) or (least is not None and not 0 < least <= len(shards)):
        return
    undo_beginning(output)
    if not shards:
        raise SourceError(
            f"{journal.raw.folder} holds no raw shard",
            hint="JSONL, tars, or folders of clips with transcripts",
        )
    raise SourceError(
        f"none of the {len(shards)} raw shards in {journal.raw.folder} can be read; "
        f"{shards[0].name}: {shards[0].fault}",
        hint="check the kind, or repair them, and run the command again; nothing was published",
    )


def check_usable(
    output: Path, stats: ProduceStats, stop_after: int, first: Mapping[str, Any] | None, *, last: bool
) -> None:
    """Stop where no record that was read can be used; call it while nothing is packed or waits.

    Args:
        stop_after: so many records that fail for one reason are enough; 0: none are, never stop.
        first: the ledger's row of the first one.
        last: nothing follows: all records failed, for whatever reasons.

    Raises:
        SourceError: what was begun is taken back before.
    """
    dropped = sum(stats.dropped.values())
    if not stop_after or stats.packed or not dropped or first is None:
        return
    if not last and (len(stats.dropped) > 1 or dropped < stop_after):
        return
    undo_beginning(output)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(stats.dropped.items()))
    all_of = f"all {counted(dropped, 'records')}" if last else f"the first {counted(dropped, 'records')} all"
    detail = str(first["detail"] or first["reason"])
    where = "" if detail.startswith(first["shard"]) else f"{first['shard']}, record {first['row'] + 1}: "
    raise SourceError(
        f"{all_of} failed ({reasons}); the first: {where}{detail}",
        hint="check the processor, the kind, the columns, the media folder and the pack length; nothing was "
        "published; stop_after_failures=0 goes on and puts them into the ledger",
    )


def check_account(
    output: Path, stats: ProduceStats, ledger: Iterable[Mapping[str, Any]], *, last: bool
) -> None:
    """Stop where more than 1 % of the records hold a key that changes training and is not read.

    Args:
        ledger: rows of samples that were left out.
        last: nothing follows.

    Raises:
        UnreadKeys: what was begun is taken back before, where nothing of it was published.
    """
    first = next((str(row["detail"]) for row in ledger if row["reason"] == UNREAD), "")
    try:
        check_share(stats.dropped.get(UNREAD, 0), stats.read, first, last=last)
    except UnreadKeys:
        undo_beginning(output)
        raise


def undo_beginning(output: Path) -> bool:
    """Forget a stream that has published nothing; False where something of it can have been read.

    `stream.json` goes last: stopped anywhere, the next run finds a stream that has published nothing.
    """
    names = fresh_names(output)
    if END in names or INDEX in names:
        return False
    if any(number_of(name) is not None or name.endswith(COMPLETED) for name in names):
        return False
    journal = output / JOURNAL
    for name in sorted(fresh_names(journal), reverse=True):  # states, then shards from the newest on
        files.remove(journal / name)
    for name in names:
        stem = name.removesuffix(".arrow")
        if stem != name and number_of(f"{stem}.json") is not None:
            files.remove(output / name)  # a chunk whose manifest was never written
    files.remove(output / STREAM)
    return True
