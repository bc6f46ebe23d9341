"""The account of every key of a record, its messages and parts: used, harmless, unread, or unknown.

Names of keys are told apart once per set of names; values are looked at only where a key is not used. What is
counted is plain text, so that counts of several processes add up:

    "foo", "messages[].foo", "content[].foo"     records that hold this key, which nothing reads
    "image_path -> images"                       records in which a spelling was read as a field
    "foo -> ledger"                              records left out for this key (`unread_key`)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from ..errors import InputError, SampleError, counted
from . import keys
from ._values import absent, meaning, texts_in

#: Reason of a record that holds a key which changes training and is not read.
UNREAD = "unread_key"

#: What stands for a field in the count of a key for which records are left out.
LEDGER = "ledger"

_SHOWN = 12  # keys named in one line

#: Share of the records that may have that reason, and records that are read before a share is one.
MOST, FEW = 0.01, 100

_CHANGES = frozenset((*keys.TRAINING, *keys.LOSS))
#: Words of a name that speak of what is trained, where the value is a number or numbers.
_SPEAKS = frozenset(keys.FLAG_WORDS)
_FIELDS = frozenset(name for names in keys.FIELDS.values() for name in names)


@lru_cache(maxsize=4096)
def spelled(key: str) -> str:
    """A key as the tables have it: `lossWeight`, `loss-weight` and `LOSS_WEIGHT` are `loss_weight`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[- ]", "_", key).lower()


class Unread(SampleError):
    """A key that would change what is trained and that is not read.

    Attributes:
        key: its name, with its place.
    """

    key = ""


def unread(key: str, why: str, *, hint: str | None = None) -> Unread:
    """The error that names such a key."""
    bare = key.rpartition("[].")[2]
    hint = hint or (
        f"ignore_keys: [{bare}] leaves it out; columns={{'FIELD': {bare!r}}} maps it to a field; "
        "shape='NAME' settles what is read"
    )
    error = Unread(UNREAD, f"the key {key!r} {why} and is not read", hint=hint)
    error.key = key
    return error


def refuse_beside(record: Mapping[str, Any], names: Iterable[str], asked: str) -> None:
    """Refuse texts beside a question that belong to it (`keys.BESIDE`), unless it says all of them.

    Args:
        names: keys of the record that nothing read.
        asked: the question.

    Raises:
        SampleError: `unread_key`.
    """
    for name in names:
        if not isinstance(name, str) or spelled(name) not in keys.BESIDE or absent(record[name]):
            continue
        if not all(text.strip() in asked for text in texts_in(record[name])):
            raise unread(name, "belongs to the question")


class UnreadKeys(InputError):
    """Too many records hold a key that changes training and that is not read."""


def check_share(count: int, read: int, first: str, *, last: bool = True) -> None:
    """Stop where more than 1 % of the records hold a key that changes training and is not read.

    Args:
        count: records that do.
        read: records that were read so far.
        first: one of them and its key, for people.
        last: nothing follows; else a share of few records is none as yet.

    Raises:
        UnreadKeys: names the key, a record, and the option that settles it.
    """
    if count and count > MOST * (read if last else max(read, FEW)):
        raise UnreadKeys(
            f"{count:,} of {counted(read, 'records')} hold a key that changes training and is not read: "
            f"{first or 'see the ledger'}",
            hint="ignore_keys=['KEY'] where it does not matter, columns={'images': 'KEY'} to read it, or fix "
            "the shape",
        )


class Account:
    """Counts of one source.

    Args:
        ignore: keys that the user leaves out, at any level.
    """

    __slots__ = ("_notes", "_origins", "counts", "ignore")

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        self.ignore = frozenset(ignore)
        self.counts: Counter[str] = Counter()
        self._notes: set[str] = set()
        self._origins: list[tuple[str, bool]] = []  # references under harmless keys

    def begin(self) -> None:
        """A record begins."""
        self._notes.clear()
        self._origins.clear()

    def end(self, *, media: bool = True, marked: Callable[[], bool] = bool) -> None:
        """The record was read: what was noted counts once.

        Args:
            media: whether it has media that were read.
            marked: whether its texts hold what stands for a medium.

        Raises:
            SampleError: `unread_key`, for a reference to a medium under a harmless key of a record without.
        """
        for name, certain in () if media else self._origins:
            if certain or marked():
                raise unread(name, "holds a reference to a medium")
            self._notes.add(name)
        if self._notes:
            self.counts.update(self._notes)

    def drain(self) -> dict[str, int]:
        """The counts since the last call."""
        counts = dict(sorted(self.counts.items()))
        self.counts.clear()
        return counts

    def alias(self, spelling: str, field: str) -> None:
        if spelling != field:
            self._notes.add(f"{spelling} -> {field}")

    def left_out(self, error: SampleError) -> None:
        """A record is left out: the key that it is left out for is told beside the others."""
        if isinstance(error, Unread):
            self.counts[f"{error.key} -> {LEDGER}"] += 1

    def note(self, name: str) -> None:
        """Nothing reads this key, and it changes nothing."""
        self._notes.add(name)

    def rest(
        self,
        holder: Mapping[str, Any],
        names: Iterable[str],
        place: str = "",
        *,
        said: frozenset[str] | None = None,
        media: bool | None = None,
    ) -> None:
        """Keys of a record, message or part that nothing read.

        Args:
            holder: what has them.
            names: of its keys.
            place: "" for a record, else what stands before the name.
            said: texts that were read: a key that only repeats one is harmless.
            media: whether what has them holds a medium that was read; None: `end` will say.

        Raises:
            SampleError: `unread_key`.
        """
        for key in names:
            value = holder[key]
            if key in self.ignore or absent(value):
                continue
            name = f"{place}{key}"
            low = spelled(key) if isinstance(key, str) else ""
            if low in keys.HARMLESS:
                self._harmless(name, low, value, media)
            elif said is None or not isinstance(value, str) or value.strip() not in said:
                self._unknown(holder, name, low, value, place)

    def _unknown(self, holder: Mapping[str, Any], name: str, low: str, value: Any, place: str) -> None:
        """A name that no table calls harmless: counted, unless it or its value speaks of training."""
        if place == "messages[]." and low in keys.SAYS:
            if value not in (holder.get("content"), holder.get("value")):
                raise unread(name, "belongs to what the message says")
            return
        if (low != "label" or isinstance(value, bool)) and (why := _why(low, value, place)) is not None:
            raise unread(name, why)
        self._notes.add(name)

    def _harmless(self, name: str, key: str, value: Any, media: bool | None) -> None:
        """A harmless name whose value is none.

        Turns are refused. So is a reference to a medium under a key of numbers, or where no medium is read;
        a text that only looks like the name of one (`id: "000000033471.jpg"`) is counted, unless the texts
        hold what stands for a medium. Spans, masks and objects are counted.
        """
        found = meaning(value)
        if found == "a list of turns":
            raise unread(name, "holds a list of turns")
        held = value if isinstance(value, (list, tuple)) else ()
        nested = isinstance(value, Mapping) or any(isinstance(item, Mapping) for item in held)
        if found not in ("a medium", "a reference to a medium"):
            if found is not None or nested:
                self._notes.add(name)
            return
        if key in keys.NUMBERS:
            raise unread(name, f"holds {found}")
        if nested and media:
            self._notes.add(name)
        certain = key in keys.ORIGIN or not isinstance(value, str)
        if media:
            return
        if certain and media is not None:
            raise unread(name, "holds a reference to a medium")
        self._origins.append((name, certain))
        if media is not None:
            self._notes.add(name)


def _is_flag(key: str, value: Any, place: str) -> bool:
    """Whether numbers under a name that no table has speak of what is trained (`is_masked`, `turn_weights`).

    `train` and `weight` stand in names of many things that a record is; a message is trained or not.
    """
    if place.startswith("content[]") or _SPEAKS.isdisjoint(words := key.split("_")):
        return False
    if not place and _SPEAKS.intersection(words) <= {"train", "trained", "training"}:
        return False
    values = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(one, (bool, int, float)) for one in values)


def _why(key: str, value: Any, place: str) -> str | None:
    """Why a key that nothing reads changes what is trained; None where nothing says so."""
    if key in keys.STRETCH and isinstance(value, (list, tuple, Mapping)):
        return "is a stretch of a medium"
    if key in keys.WANTED:
        return f"({value}) marks an answer that is wanted or not"
    if key in keys.PREFERENCE:
        return "belongs to preference data"
    if key in _CHANGES or (key in _FIELDS and not isinstance(value, (bool, int, float))):
        return "changes what is trained"
    if _is_flag(key, value, place):
        return "is a flag or weight of what is trained"
    found = meaning(value)
    return None if found is None else f"holds {found}"


def told(counts: Mapping[str, int]) -> str:
    """One line for people: keys that were read as others, that nothing read, and for which records are left
    out; "" for none."""
    read, left, gone = [], [], []
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        key, _, field = name.partition(" -> ")
        if field == LEDGER:
            gone.append(f"{key} ({count:,})")
        elif field:
            read.append(f"{key} → {field} ({count:,})")
        else:
            left.append(f"{key} ({count:,})")
    lines = {"read as another": read, "not read": left, "left out for": gone}
    return "; ".join(f"{what}: {_some(named)}" for what, named in lines.items() if named)


def _some(names: list[str]) -> str:
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join((*names[:_SHOWN], *more))
