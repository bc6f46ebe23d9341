"""States of a stream: what they hold, whether they are whole and of these data, and several readers' as one.

    {"version": 3, "settings": digest, "seed": …, "splits": S, "window": …, "buffer": …,
     "reader": [ranks, rank, workers, worker], "epoch": …,
     "held": [{"split": s, "epoch": …, "turn": packs it gave, "run": {…} or null, "done"?: true}, …]}

A reader's state holds its splits. A split names each sample on the way by its place. One that was cut,
edited or put together from two would give samples twice or lose them without a word, so what must hold
between its parts is checked: every place once, each of this split, none that was not read yet, and as many as
the counters say. States of version 1 held one reader, whose part of the stream is a split now; those of
version 2 wrote all numbers out. Here a long list is one text: base64 of zlib of the bytes of
(number - least) / step, the lowest byte of all numbers first, then the next.
"""

from __future__ import annotations

import binascii
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import ForeignArtefactError, counted
from ..planning.window import WindowPacker
from ._readers import MOST, Reader, Record, check_divides, deal

VERSION = 3

_LONG = 128  # numbers that are written as one text
_MOST = 1 << 24  # numbers of a text
_TEXT, _PAIRS = {"numbers", "least", "step", "bytes", "text"}, {"pairs"}

#: Workers are told the epoch in an int64.
LAST_EPOCH = (1 << 63) - 1

#: What a split has.
PARTS = frozenset(
    ("next_place", "read", "count", "draws", "shuffle", "flight", "window", "places", "packer", "ready")
) | {"left_out"}


def upgraded(state: Mapping[str, Any], window: int, buffer: int) -> Mapping[str, Any]:
    """A state of any version as one of this version with its numbers in lists.

    Args:
        window, buffer: of a split.

    Raises:
        ForeignArtefactError: it is damaged.
    """
    if state.get("version") == VERSION:
        return _runs(state, _listed)
    if state.get("version") == 2:
        return {**state, "version": VERSION}
    if state.get("version") != 1:
        return state
    place = [state.get(name) for name in ("world_size", "rank", "workers", "worker")]
    if not _are_counts(place) or not all(part < whole for whole, part in (place[:2], place[2:])):  # type: ignore[operator]
        raise _damaged(f"the reader is {place!r}")
    ranks, rank, workers, worker = (int(one) for one in place)  # type: ignore[arg-type]
    if type(state.get("epoch")) is not int or "run" not in state:
        raise _damaged(f"epoch is {state.get('epoch')!r}, or the run is missing")
    split = {"split": rank * workers + worker, "epoch": state["epoch"], "turn": 0, "run": state["run"]}
    kept = {name: state[name] for name in ("settings", "seed", "epoch", "data", "ended") if name in state}
    divided = {"splits": ranks * workers, "window": window, "buffer": buffer}
    return {"version": VERSION, **kept, **divided, "reader": place, "held": [split]}


def differing(saved: Any, own: Mapping[str, Any]) -> str:
    """Which settings differ, with both values; "" where a state (of an earlier version) does not say."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("spec"), Mapping):
        return ""
    held, here = ({**one["spec"], **one, "spec": None} for one in (saved, own))
    names = [name for name in {**here, **held} if held.get(name) != here.get(name)]
    told = ", ".join(f"{name} {held.get(name)!r} (this one {here.get(name)!r})" for name in names)
    return f"settings {told}" if told else ""


def written(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as it is given out: long lists of numbers as texts."""
    return _runs(state, _text)


def _runs(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The state with the lists of its splits changed; what is no split stays, to be refused later."""

    def inside(value: Any, depth: int) -> Any:
        if depth and isinstance(value, Mapping) and value.keys() not in (_TEXT, _PAIRS):
            return {name: inside(part, depth - 1) for name, part in value.items()}
        return change(value)

    held: Any = state.get("held")
    if not _is_list(held):
        return dict(state)
    split = (
        {**one, "run": inside(one["run"], 3)} if isinstance(one, Mapping) and "run" in one else one
        for one in held
    )
    return {**state, "held": list(split)}


def _text(value: Any) -> Any:
    """A long list of numbers (or of pairs of them) as texts; anything else as it is."""
    if not isinstance(value, list) or len(value) < _LONG:
        return value
    if isinstance(value[0], list | tuple):
        pairs = {len(row) for row in value} == {2}
        return {"pairs": [_text(list(column)) for column in zip(*value, strict=True)]} if pairs else value
    try:
        numbers = np.array(value, dtype=np.int64)
    except (OverflowError, ValueError, TypeError):
        return value
    least = int(numbers.min())
    numbers -= least
    step = int(np.gcd.reduce(numbers)) or 1
    numbers //= step
    size = max(1, (int(numbers.max()).bit_length() + 7) // 8)
    planes = numbers.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :size].T
    text = b64encode(zlib.compress(planes.tobytes(), 1)).decode()
    return {"numbers": len(numbers), "least": least, "step": step, "bytes": size, "text": text}


def _listed(value: Any) -> Any:
    """The list that `_text` was given."""
    if isinstance(value, Mapping) and value.keys() == _PAIRS and _is_list(value["pairs"]):
        columns = [_listed(one) for one in value["pairs"]]
        if len(columns) != 2 or not all(map(_is_list, columns)) or len(columns[0]) != len(columns[1]):
            raise _damaged("pairs of numbers are not of two lists")
        return list(map(list, zip(*columns, strict=True)))
    if not isinstance(value, Mapping) or value.keys() != _TEXT:
        return value
    count, least, step, size = (value[name] for name in ("numbers", "least", "step", "bytes"))
    told = _are_counts([count, least, step, size]) and isinstance(value["text"], str)
    found: list[int] = []
    opened, planes = zlib.decompressobj(), b""
    if told and 1 <= size <= 8 and 1 <= count <= _MOST and max(least, step) <= LAST_EPOCH:
        with suppress(binascii.Error, zlib.error, ValueError):
            planes = opened.decompress(b64decode(value["text"], validate=True), count * size + 1)
    if opened.eof and not opened.unused_data and len(planes) == count * size:
        rows = np.zeros((count, 8), dtype=np.uint8)
        rows[:, :size] = np.frombuffer(planes, dtype=np.uint8).reshape(size, count).T
        found = [least + step * number for number in rows.view("<u8")[:, 0].tolist()]
    if not found or max(found) > LAST_EPOCH:
        raise _damaged("a list of numbers cannot be read")
    return found


def saved_ranks(state: Any) -> int | None:
    """How many ranks saved a state, of whichever version; None: it does not say."""
    reader = state.get("reader", [state.get("world_size")]) if isinstance(state, Mapping) else None
    ranks = reader[0] if _is_list(reader) and reader else None
    return ranks if type(ranks) is int and 1 <= ranks <= MOST else None


def joined(states: Sequence[Mapping[str, Any]], *, cyclic: bool) -> Mapping[str, Any]:
    """The states of several readers, saved at one step, as one.

    Args:
        cyclic: they may be in different epochs.

    Raises:
        ForeignArtefactError: they are of different streams or moments, or hold a split twice.
    """
    first = states[0]
    if len(states) == 1:
        return first
    held: list[Record] = []
    every_ended = all(state.get("ended") is True for state in states)
    for state in states:
        for name in ("version", "settings", "seed", "splits", "window", "buffer", "data"):
            if state.get(name) != first.get(name):
                raise _unlike(f"streams: {name} {first.get(name)!r}, {state.get(name)!r}")
        done = {"done": True} if state.get("ended") is True and not every_ended else {}
        held += [{**one, **done} for one in state["held"]]
    going = {state["epoch"] for state in states if state.get("ended") is not True}
    epochs = sorted(going | {state["epoch"] for state in states if state["epoch"] < max(going, default=0)})
    if len(epochs) > 1 and not cyclic:
        raise _unlike(f"moments: epoch {epochs[0]}, {epochs[-1]}")
    if len({one["split"] for one in held}) != len(held):
        raise ForeignArtefactError(
            "the states hold a split twice", hint="give the state of every reader once, all saved at one step"
        )
    ranks, rank = first["reader"][:2]
    same = all(list(state["reader"][:2]) == [ranks, rank] for state in states)
    one_rank = same and len(held) * ranks == first["splits"]
    if not one_rank and len(held) != first["splits"]:
        raise _incomplete(held, first["splits"], f"{counted(len(states), 'readers')}")
    made = {name: value for name, value in first.items() if name != "ended" or every_ended}
    made["reader"] = [ranks, rank, 1, 0] if one_rank else None
    made["epoch"] = max(state["epoch"] for state in states)
    made["held"] = sorted(held, key=lambda one: int(one["split"]))
    return made


def _unlike(what: str) -> ForeignArtefactError:
    return ForeignArtefactError(
        f"the states are of different {what}", hint="give the states that all readers saved at one step"
    )


def of_reader(state: Mapping[str, Any], here: Reader) -> Mapping[str, Any]:
    """The part of a checked state that this reader goes on with.

    Raises:
        ForeignArtefactError: its splits are not there, or the readers cannot share them.
    """
    saved = None if state["reader"] is None else Reader(*state["reader"])
    if saved == here:
        return state
    check_divides(state["splits"], here.ranks, here.workers)
    held = state["held"]
    if saved == (here.ranks, here.rank, 1, 0):
        own = deal(held, here.worker, here.workers)
    elif len(held) == state["splits"]:
        own = deal(deal(held, here.rank, here.ranks), here.worker, here.workers)
    else:
        raise _incomplete(held, state["splits"], str(saved), here)
    return {**state, "reader": list(here), "held": sorted(own, key=lambda one: int(one["split"]))}


def _incomplete(
    held: Sequence[Record], splits: int, who: str, here: Reader | None = None
) -> ForeignArtefactError:
    listed = ", ".join(str(one["split"]) for one in held[:8]) + (", …" if len(held) > 8 else "")
    asked = "" if here is None else f"; this is {here}"
    return ForeignArtefactError(
        f"the state of {who} holds {len(held)} of {counted(splits, 'splits')} ({listed}){asked}",
        hint="other readers need every split: load_state_dict([state, …]) with the states of all readers, "
        "saved at one step",
    )


def check_held(state: Mapping[str, Any], new_packer: Callable[[int], Any], *, cyclic: bool) -> None:
    """Refuse a damaged state.

    Args:
        new_packer: samples planned together -> a packer of this stream, to load a split's part into.
        cyclic: splits may be in different epochs.

    Raises:
        ForeignArtefactError: says which part.
    """
    for fault in _faults(state, new_packer, cyclic):
        raise _damaged(fault)


def check_moment(state: Mapping[str, Any]) -> None:
    """Refuse states of all splits that were not saved at one step.

    Packs come by (turn, split): while every split goes on, what was given is a beginning of that order.
    """
    held = sorted(state["held"], key=lambda one: int(one["split"]))
    if len(held) < state["splits"] or state.get("ended") or any(one.get("done") for one in held):
        return
    turns = [one["turn"] for one in held]
    if turns[0] - turns[-1] > 1 or any(after > before for before, after in pairwise(turns)):
        raise _unlike(f"moments: splits gave {min(turns)} to {max(turns)} packs, out of turn")


def _faults(state: Mapping[str, Any], new_packer: Callable[[int], Any], cyclic: bool) -> Iterator[str]:
    """What is wrong with a state, one by one; what follows a fault may not be computable any more."""
    yield from _odd_parts(state, _STATE)
    splits, held, reader = state["splits"], state["held"], state["reader"]
    readers, numbers = reader[0] * reader[2], [one.get("split") for one in held]
    if len(held) * readers != splits:
        told = counted(readers, "readers")
        yield f"{counted(len(held), 'splits')} of {splits} are there for one of {told}"
    if not _are_counts(numbers) or len(set(numbers)) != len(numbers) or max(numbers) >= splits:
        yield "held names a split twice, or one that the stream has not"
    for one in held:
        yield from _of_split(one, new_packer(state["window"]), splits)
    if not cyclic and len({one["epoch"] for one in held}) > 1:
        yield "its splits are in different epochs"


def _of_split(one: Mapping[str, Any], packer: Any, splits: int) -> Iterator[str]:
    yield from _odd_parts({"done": True, **one}, _SPLIT)
    run = one.get("run", 0)
    if run is None:
        return
    if not isinstance(run, Mapping) or not set(run) >= PARTS:
        yield "a part is missing"
    yield from _odd_parts(run, _RUN)
    yield from _of_places(run, one["split"], splits)
    yield from _of_numbers(run, packer)
    if one.get("done") and any(len(run[name]) for name in ("shuffle", "flight", "places", "ready")):
        yield "a split that has no further pack holds samples"


def _of_places(run: Mapping[str, Any], first: int, step: int) -> Iterator[str]:
    """`first` is the first place of the split, `step` the splits of the stream."""
    packed = [place for pack in run["ready"] for place in pack]
    places = [*run["shuffle"], *run["flight"], *(place for _, place in run["places"]), *packed]
    # What was read waits in the buffer, is in flight, reached the packer, or was left out before it.
    before = run["read"] - len(run["shuffle"]) - len(run["flight"]) - run["count"]
    end = run["next_place"]
    if end != first + run["read"] * step:
        yield f"{counted(run['read'], 'samples')} read do not end before place {end}"
    if len(set(places)) != len(places):
        yield "a sample is held twice"
    if any(place >= end or place % step != first % step for place in places):
        yield "a sample is held that this split has not read"
    if not 0 <= before <= sum(run["left_out"].values()):
        yield "the counts of samples do not add up"


def _of_numbers(run: Mapping[str, Any], packer: Any) -> Iterator[str]:
    held = run["packer"]
    if not isinstance(held, Mapping) or not _is_even(held):
        yield "the packer's part holds something else than counts, as many of each"
    try:
        packer.load_state_dict(held)
        same = packer.state_dict() == held
        waiting = held["ids"]
    except Exception as error:  # numbers without measure, lists that lack: whatever a packer meets
        raise _damaged("the packer's part cannot be read") from error
    windows, part = getattr(packer, "after", packer), held.get("after", held)
    waits = isinstance(windows, WindowPacker) and bool(part["ids"])
    numbers = [number for number, _ in run["places"]]
    if waits and part["costs"].keys() != windows.spec.limits.keys():
        yield "what waits was counted by other limits"
    if not same or len(held["tokens"]) != len(waiting):
        yield "the packer's part is not what a packer says"
    if sorted([*run["window"], *waiting]) != sorted(numbers) or len(set(numbers)) != len(numbers):
        yield "samples that wait have no place"
    if any(n >= run["count"] for n in numbers):
        yield "a sample waits that did not reach the packer"
    if list(run["window"]) != list(range(run["count"] - len(run["window"]), run["count"])):
        yield "the window does not hold the samples that reached the packer last"


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


def _odd_parts(held: Mapping[str, Any], parts: Mapping[str, Callable[[Any], bool]]) -> Iterator[str]:
    for name, fits in parts.items():
        if not fits(held.get(name)):
            yield f"{name} is {str(held.get(name))[:60]!r}"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_counts(values: Any) -> bool:
    return _is_list(values) and all(map(_is_count, values))


def _is_reader(value: Any) -> bool:
    return _are_counts(value) and len(value) == 4 and value[1] < value[0] and value[3] < value[2]


#: What a state, one of its splits and the run of a split hold, and what each has to be.
_STATE: dict[str, Callable[[Any], bool]] = {
    "splits": lambda value: _is_count(value) and 1 <= value <= MOST,
    "window": lambda value: _is_count(value) and value >= 1,
    "buffer": _is_count,
    "held": lambda value: _is_list(value) and bool(value) and all(isinstance(one, Mapping) for one in value),
    "reader": _is_reader,
}
_SPLIT: dict[str, Callable[[Any], bool]] = {
    "turn": _is_count,
    "epoch": lambda value: _is_count(value) and value <= LAST_EPOCH,
    "done": lambda value: value is True,
}
_RUN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("next_place", "read", "count", "draws"), _is_count),
    **dict.fromkeys(("shuffle", "flight", "window"), _are_counts),
    "ready": lambda value: _is_list(value) and all(_are_counts(pack) and pack for pack in value),
    "places": lambda value: _is_list(value) and all(_are_counts(one) and len(one) == 2 for one in value),
    "left_out": lambda value: isinstance(value, Mapping) and _are_counts(list(value.values())),
    "total": lambda value: value is None or _is_count(value),
}


def _damaged(what: str) -> ForeignArtefactError:
    return ForeignArtefactError(
        f"the saved stream is incomplete or damaged: {what}", hint="pass the whole of what state_dict() gave"
    )


# --------------------------------------------------------------------------------------------
# What a state says of the data that it belongs to, and whether a source still has them
# --------------------------------------------------------------------------------------------
#     {"fingerprint": …, "records": n, "size"?: …, "sha256"?: …}                    of files
#     {"weights": [[name, share], …], "stopping": …, "sources": {name: …, …}}       a mixture; parts as above,
#                                                                     of samples in memory their number alone
#
# Nobody knows what an iterable or a function gives, so nothing is told of them.
Data = dict[str, Any]


def data_of(source: Any) -> Data | None:
    """What a state says of a source; None: nothing is known of it."""
    if callable(getattr(source, "mixture", None)):
        told = source.mixture()
        parts = {name: _part_of(part) for name, part in _parts(source).items()}
        known = {name: part for name, part in parts.items() if part is not None}
        return {**told, "sources": known}
    held = _of_files(source)
    if held is None:
        return None
    rows = held.fields().get("files") or []
    one = rows[0] if len(rows) == 1 else {}
    return {"fingerprint": held.fingerprint, "records": len(held), **one}


def check_data(source: Any, saved: Any) -> None:
    """Refuse other content than a state was saved with. At the end of files there may be more.

    Args:
        saved: what `data_of` was; None: the state is of an earlier version, or nothing was known.

    Raises:
        ForeignArtefactError: the file changed; or the mixture is another one.
    """
    now = data_of(source)
    if not isinstance(saved, Mapping) or now is None:
        return
    if "weights" in now and "weights" in saved:
        _check_mixture(source, saved, now)
    elif "weights" in now or "weights" in saved or not _goes_on(source, saved, now):
        raise _changed(source, saved, now)


def _check_mixture(source: Any, saved: Mapping[str, Any], now: Data) -> None:
    for key in ("stopping", "weights"):
        before, here = _told(saved.get(key)), _told(now[key])
        if saved.get(key) != now[key]:
            raise ForeignArtefactError(
                f"the saved stream has a mixture of {key} {before}, this one {here}",
                hint="mix the sources as the saved stream did, or start anew",
            )
    held = saved.get("sources")
    for name, part in _parts(source).items():
        was, is_now = held.get(name) if isinstance(held, Mapping) else None, now["sources"].get(name)
        if not isinstance(was, Mapping) or is_now is None:
            continue
        if now["stopping"] != "first" and was.get("records") != is_now.get("records"):
            raise ForeignArtefactError(
                f"source {name} had {was.get('records')!r} samples when the state was saved and now has "
                f"{is_now.get('records')!r}: it comes again at other places",
                hint="restore the source, or start anew",
            )
        if "fingerprint" in was or "weights" in was:
            check_data(part, was)


def _parts(mixture: Any) -> dict[str, Any]:
    return {str(name): source for name, source in mixture.sources.items()}


def _part_of(source: Any) -> Data | None:
    """Of a part of a mixture."""
    told = data_of(source)
    if callable(source) or not hasattr(source, "__len__"):
        return told
    return {"records": len(source), **(told or {})}


def _goes_on(source: Any, saved: Mapping[str, Any], now: Data) -> bool:
    """Whether the files are those of before, or begin with them."""
    if saved.get("fingerprint") == now.get("fingerprint"):
        return True
    held = _of_files(source)
    size, sha256, records = (saved.get(name) for name in ("size", "sha256", "records"))
    if held is None or type(records) is not int:
        return False
    if hasattr(held, "begins_with") and type(size) is int and isinstance(sha256, str):
        return bool(held.begins_with(size, sha256, records))
    return hasattr(held, "beginnings") and saved.get("fingerprint") in held.beginnings(records)


def _changed(source: Any, saved: Mapping[str, Any], now: Data) -> ForeignArtefactError:
    records = saved.get("records")
    of = f"{counted(records, 'records')} of " if type(records) is int else ""
    return ForeignArtefactError(
        f"the file changed: the stream was saved over {of}data {str(saved.get('fingerprint'))[:12]}, "
        f"{source!r} holds {str(now.get('fingerprint', 'a mixture'))[:12]}",
        hint="restore the data, or start anew",
    )


def _told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in value)
    return repr(value)


def _of_files(source: Any) -> Any:
    """The source of raw records below wrappers, where it knows the digests of its files; else None."""
    while callable(getattr(source, "fields", None)) and hasattr(source, "source"):
        source = source.source
    known = callable(getattr(source, "fields", None)) and isinstance(source.fingerprint, str)
    return source if known else None
