"""May a static plan be made of this source? Items are fetched for real, in several orders and epochs.

A static plan fixes which ids stand together before training, for all epochs. That holds only when item i is
the same whenever and in whatever order it is read. The probe encodes PROBED items forward, backward and,
where the source has `set_epoch`, in the next epoch, and compares ids, content and length:

- another content for the same id and epoch: the items depend on the order of reading;
- in the next epoch another number of items, other ids, items that moved to other ids, or another length:
  the source draws its samples anew for each epoch;
- in the next epoch another content of the same length (say, objects listed in another order): allowed.

What 16 items cannot show is caught later: every fetch in training compares the length with the plan.

`probe_once` is the same look at a few items, for a source that nobody has probed yet in this process:
every source of packs over a plan takes it, whatever the entrance.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import InputError, SampleError
from ..files import canonical_json

#: Items that are encoded, evenly spaced, the last one included.
PROBED = 16

#: Items of a source that is probed when its packs are opened, after it was measured.
FEW = 4

_FIX = "write the samples of all epochs to one file, or use a mixture with fixed weights, and train on that"
_EPOCHS = ("epoch", "_epoch", "current_epoch")
_MANY = 4096  # wrapped objects of one wrapper that are looked at

_probed: dict[int, Any] = {}  # id -> weak reference to a source that was probed

#: id the record carries (None without), digest of the content, tokens; or the reason of a faulty sample.
Seen = tuple[Any, str, int | str]


def probe_static(
    source: Any, encode: Callable[[Any], Mapping[str, Any]], *, count: int = PROBED
) -> dict[int, int | str]:
    """Refuse sources whose items change with order or epoch.

    Args:
        source: indexable samples; `set_epoch` is called, and set back, when there is one.
        encode: sample -> encoded sample with `input_ids`.
        count: items to encode.

    Returns:
        Probed id -> tokens, or the reason of a sample that cannot be used.

    Raises:
        InputError: a static plan would not describe what training reads; says why and what to do.
    """
    total = len(source)
    ids = probed_ids(total, count)
    forward = {i: _fetch(source, encode, i) for i in ids}
    for i in reversed(ids):
        again = _fetch(source, encode, i)
        if again != forward[i]:
            what = _differs(forward[i], again)
            raise InputError(
                f"{_where(source, i)} is another item when it is read in another order ({what})",
                hint=f"items must not depend on what was read before; {_FIX}",
            )
    if _epochs(source) and (moved := _moved(source, encode, forward, total)):
        raise InputError(f"the source draws its samples anew for each epoch: {moved}", hint=_FIX)
    for layer in _layers(source):
        _remember(layer)
    return {i: seen[2] for i, seen in forward.items()}


def probe_once(source: Any, encode: Callable[[Any], Mapping[str, Any]] | None, *, count: int = FEW) -> None:
    """`probe_static`, for a source that was not probed before. What cannot be read says so in training.

    Args:
        source: indexable samples.
        encode: sample -> encoded sample; None: the samples are encoded.
        count: items to encode.

    Raises:
        InputError: as `probe_static`.
    """
    held = _probed.get(id(source))
    if (held is not None and held() is source) or not hasattr(source, "__len__"):
        return
    with contextlib.suppress(_Unread):
        probe_static(_Readable(source, encode), lambda encoded: encoded, count=count)


class _Unread(Exception):
    """An item could not be read: whether the source moves is not known."""


class _Readable:
    """Encoded items of a source; `_Unread` where one fails in another way than as a faulty sample."""

    def __init__(self, source: Any, encode: Callable[[Any], Mapping[str, Any]] | None) -> None:
        self.source, self.encode = source, encode

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        try:
            sample = self.source[index]
            encoded = sample if self.encode is None else self.encode(sample)
            np.shape(encoded["input_ids"])[-1]
        except SampleError:
            raise
        except Exception as error:
            raise _Unread from error
        return encoded

    def where(self, index: int) -> str:
        where = getattr(self.source, "where", None)
        return str(where(index)) if callable(where) else type(self.source).__name__


def _remember(source: Any) -> None:
    number = id(source)
    try:
        _probed[number] = weakref.ref(source, lambda gone: _probed.pop(number, None))
    except TypeError:
        return  # a list: read again, which costs little


def probed_ids(total: int, count: int) -> list[int]:
    """Up to `count` ids, evenly spaced, with the first and the last."""
    if total <= count:
        return list(range(total))
    return sorted({step * (total - 1) // (count - 1) for step in range(count)})


def set_epoch(source: Any, epoch: int) -> bool:
    """Tell a source, and those it wraps, which epoch begins; True when one of them listens."""
    listening = _epochs(source)
    for inner in listening:
        inner.set_epoch(epoch)
    return bool(listening)


def listens(source: Any) -> bool:
    """Does the source, or one it wraps, have `set_epoch`?"""
    return bool(_epochs(source))


def epoch_of(source: Any) -> int:
    """The epoch a source says it is in; 0 when it says nothing."""
    for inner in _epochs(source):
        for name in _EPOCHS:
            value = getattr(inner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return 0


def _epochs(source: Any) -> list[Any]:
    """The source and what it wraps, as far as they have `set_epoch`."""
    return [inner for inner in _layers(source) if callable(getattr(inner, "set_epoch", None))]


def _layers(source: Any) -> Iterator[Any]:
    """The source and what it wraps, the outer ones first: one object (Subset) or several (ConcatDataset)."""
    seen: set[int] = set()
    waiting = [source]
    while waiting:
        layer = waiting.pop(0)
        if layer is None or isinstance(layer, str | bytes) or id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        for held in list(vars(layer).values()) if hasattr(layer, "__dict__") else ():
            within = held.values() if isinstance(held, Mapping) else held
            several = isinstance(held, Mapping | list | tuple) and len(held) <= _MANY
            waiting += [one for one in (held, *(within if several else ())) if _may_wrap(one)]


def _may_wrap(held: Any) -> bool:
    """Is this an object that samples are read from, and no sample?"""
    if isinstance(held, Mapping) or not hasattr(held, "__dict__"):
        return False
    return hasattr(type(held), "__getitem__") or callable(getattr(held, "set_epoch", None))


def _moved(
    source: Any, encode: Callable[[Any], Mapping[str, Any]], first: dict[int, Seen], total: int
) -> str | None:
    """What is another in the next epoch."""
    before = epoch_of(source)
    set_epoch(source, before + 1)
    try:
        if len(source) != total:
            return f"{total} items in one epoch, {len(source)} in the next"
        later = {i: _fetch(source, encode, i) for i in first}
    finally:
        set_epoch(source, before)
    homes = {seen[1]: i for i, seen in first.items()}
    for i, seen in later.items():
        was = first[i]
        if seen[0] != was[0]:
            return f"{_where(source, i)} holds id {was[0]!r}, in the next epoch {seen[0]!r}"
        if seen[2] != was[2]:
            return f"{_where(source, i)} has {was[2]} tokens, in the next epoch {seen[2]}"
        if seen[1] != was[1] and homes.get(seen[1], i) != i:
            return f"{_where(source, i)} holds in the next epoch what {homes[seen[1]]} held before"
    for i, seen in first.items():
        if _fetch(source, encode, i) != seen:
            return f"{_where(source, i)} does not come back when the epoch is set back"
    return None


def _fetch(source: Any, encode: Callable[[Any], Mapping[str, Any]], index: int) -> Seen:
    try:
        sample = source[index]
        encoded = encode(sample)
    except SampleError as error:
        return None, error.reason, error.reason
    carried = sample.get("sample_id", sample.get("id")) if isinstance(sample, Mapping) else None
    digest = hashlib.sha256()
    for name in sorted(encoded, key=str):
        digest.update(canonical_json(str(name)))
        digest.update(_bytes(encoded[name]))
    return carried, digest.hexdigest(), int(np.shape(encoded["input_ids"])[-1])


def _bytes(value: Any) -> bytes:
    if isinstance(value, str | bytes):
        return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    if hasattr(value, "float") and str(getattr(value, "dtype", "")) == "torch.bfloat16":
        value = value.float()  # numpy has no such type
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return repr(value).encode()
    if array.dtype.hasobject:
        return repr(value).encode()
    return f"{array.dtype.str}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()


def where_in(source: Any, index: int) -> str:
    """Where a sample stands, as its source says it; "": it does not say."""
    where = getattr(source, "where", None)
    return str(where(index)) if callable(where) else ""


def _where(source: Any, index: int) -> str:
    place = where_in(source, index)
    return f"item {index}" + (f" ({place})" if place else "")


def _differs(one: Seen, two: Seen) -> str:
    for name, a, b in zip(("id", "content", "tokens"), one, two, strict=True):
        if a != b and name != "content":
            return f"{name} {a!r}, then {b!r}"
    return "its content differs"
