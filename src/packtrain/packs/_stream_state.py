"""Is a saved stream whole? What a state has to fulfil, checked before anything is read.

A state names each sample on the way by its place. One that was cut, edited or put together from two would
give samples twice or lose them without a word, so what must hold between its parts is checked: every
place once, each of this reader, none that was not read yet, and as many as the counters say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ForeignArtefactError

__all__ = ["PARTS", "check_run"]

#: What a state has.
PARTS = frozenset(
    ("next_place", "read", "count", "draws", "shuffle", "flight", "window", "places", "packer", "ready")
) | {"left_out"}


def check_run(run: Any, packer: Any, *, first: int, step: int) -> None:
    """Refuse a damaged state.

    Args:
        run: the part of a state that `Run.state` gave.
        packer: a new packer of this stream, to load its part into.
        first, step: the reader's first place, and the number of readers.

    Raises:
        ForeignArtefactError: says which part.
    """
    if not isinstance(run, Mapping) or not set(run) >= PARTS:
        raise _damaged("a part is missing")
    for name in ("next_place", "read", "count", "draws"):
        if not _are_counts([run[name]]):
            raise _damaged(f"{name} is {run[name]!r}")
    for name in ("shuffle", "flight", "window"):
        if not _are_counts(run[name]):
            raise _damaged(f"{name} is no list of places")
    ready, pairs, left_out = run["ready"], run["places"], run["left_out"]
    if not _is_list(ready) or not all(_are_counts(pack) and pack for pack in ready):
        raise _damaged("ready is no list of packs")
    if not _is_list(pairs) or not all(_are_counts(pair) and len(pair) == 2 for pair in pairs):
        raise _damaged("places is no list of numbers and places")
    if not isinstance(left_out, Mapping) or not _are_counts(list(left_out.values())):
        raise _damaged("left_out is no count of samples by reason")
    if run.get("total") is not None and not _are_counts([run["total"]]):
        raise _damaged(f"total is {run['total']!r}")
    _check_places(run, first, step)
    _check_numbers(run, packer)


def _check_places(run: Mapping[str, Any], first: int, step: int) -> None:
    if run["next_place"] != first + run["read"] * step:
        raise _damaged(f"{run['read']} samples read do not end before place {run['next_place']}")
    packed = [place for pack in run["ready"] for place in pack]
    places = [*run["shuffle"], *run["flight"], *(place for _, place in run["places"]), *packed]
    if len(set(places)) != len(places):
        raise _damaged("a sample is held twice")
    if any(place >= run["next_place"] or place % step != first % step for place in places):
        raise _damaged("a sample is held that this reader has not read")
    # What was read waits in the buffer, is in flight, reached the packer, or was left out before it.
    before = run["read"] - len(run["shuffle"]) - len(run["flight"]) - run["count"]
    if not 0 <= before <= sum(run["left_out"].values()):
        raise _damaged("the counts of samples do not add up")


def _check_numbers(run: Mapping[str, Any], packer: Any) -> None:
    held = run["packer"]
    if not isinstance(held, Mapping) or not _is_even(held):
        raise _damaged("the packer's part holds something else than counts, as many of each")
    try:
        packer.load_state_dict(held)
        same = packer.state_dict() == held
        waiting = held["ids"]
    except Exception as error:  # numbers without measure, lists that lack: whatever a packer meets
        raise _damaged("the packer's part cannot be read") from error
    if not same or len(held["tokens"]) != len(waiting):
        raise _damaged("the packer's part is not what a packer says")
    numbers = [number for number, _ in run["places"]]
    if sorted([*run["window"], *waiting]) != sorted(numbers) or len(set(numbers)) != len(numbers):
        raise _damaged("samples that wait have no place")
    if any(number >= run["count"] for number in numbers):
        raise _damaged("a sample waits that did not reach the packer")


def _is_even(held: Mapping[str, Any]) -> bool:
    """Whether a packer's state holds counts alone, and its lists one of each for every sample."""
    parts = [value for value in held.values() if isinstance(value, Mapping)]
    lists = [value for value in held.values() if _is_list(value)]
    rest = [value for value in held.values() if not isinstance(value, Mapping) and not _is_list(value)]
    costs = [*dict(held.get("costs") or {}).values()] if isinstance(held.get("costs") or {}, Mapping) else []
    sizes = {len(value) for value in [*lists, *costs] if _is_list(value)}
    return (
        all(_is_list(held[name]) for name in ("ids", "tokens", "age", "counted") if name in held)
        and len(sizes) <= 1
        and _are_counts(rest)
        and all(map(_are_counts, lists))
        and all(map(_is_even, parts))
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_counts(values: Any) -> bool:
    return _is_list(values) and all(type(value) is int and value >= 0 for value in values)


def _damaged(what: str) -> ForeignArtefactError:
    return ForeignArtefactError(
        f"the saved stream is incomplete or damaged: {what}", hint="pass the whole of what state_dict() gave"
    )
