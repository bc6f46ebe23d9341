"""Measure one range of sample ids: the pure part of `measure`, run in this process or in a worker.

`measure_range((source, template), (start, stop))` is the work function that an executor maps over
ranges. A sample that cannot be used gets a status and a reason and never stops the range; an error
that is no `SampleError` is a fault of the source or the template and stops the run, named with the
record it happened on. The result depends on the source and the template only, so ranges measured by
any number of workers join to the same arrays.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, LengthError, PacktrainError, SampleError, counted, one_line
from ..extend import Source, Template, measure_many
from ..media.location import identity, media_refs
from ..planning.lengths import STATUS_BEYOND, STATUS_EMPTY, STATUS_FAILED, STATUS_OK

I64 = NDArray[np.int64]

#: Samples handed to the template in one call.
BATCH = 256

#: Reason of a line on a sample that is trained without some of its answers: it is not left out.
CUT = "truncated_answers"

Reason = tuple[int, str, str]  # id, ledger reason or `CUT`, one line for people

MediaRow = tuple[str, int, str]  # name, size in bytes, digest of the header bytes


@dataclass(kw_only=True)
class Part:
    """What was measured of ids `start <= id < stop`; arrays have `stop - start` entries.

    Attributes:
        tokens: int64, lengths; 0 for a sample that cannot be used.
        status: uint8, `STATUS_OK`, `STATUS_EMPTY`, `STATUS_FAILED` or `STATUS_BEYOND`.
        costs: name -> int64, further costs; 0 for a sample that lacks one or cannot be used.
        told: rows of samples whose status is not ok, and of those of which truncation removed answers, or cut
            one short (`CUT`): where the record stands and what is wrong; ids ascend.
        media: rows of every file used, ascending, each once.
        keys: counts of keys that nothing read, and of spellings that were read as a field.
    """

    start: int
    stop: int
    tokens: I64
    status: NDArray[np.uint8]
    costs: dict[str, I64] = field(default_factory=dict)
    told: list[Reason] = field(default_factory=list)
    media: list[MediaRow] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[int, str]:
        """id -> ledger reason of every sample whose status is not ok."""
        return {i: reason for i, reason, _ in self.told if reason != CUT}

    @property
    def details(self) -> dict[int, str]:
        """id -> one line for people."""
        return {i: line for i, _, line in self.told}


def measure_range(context: tuple[Source, Template], shard: tuple[int, int]) -> Part:
    """Measure the ids of one shard.

    Args:
        context: the source and the template.
        shard: (start, stop).

    Raises:
        SourceError: the source itself cannot be read.
        InputError: the source or template raised something that is no `SampleError`.
        LengthError: the template gave a length that is not one.
    """
    source, template = context
    start, stop = int(shard[0]), int(shard[1])
    tokens = np.zeros(stop - start, dtype=np.int64)
    status = np.zeros(stop - start, dtype=np.uint8)
    costs: dict[str, I64] = {}
    errors: dict[int, SampleError] = {}
    notes: dict[int, str] = {}
    media: set[MediaRow] = set()
    limit = getattr(template, "model_limit", None)
    cuts = getattr(template, "truncation", "error") != "error"
    drained(source)
    for first in range(start, stop, BATCH):
        samples, ids = _read(source, first, min(first + BATCH, stop), errors)
        media.update(_identities(source, samples))
        for i, outcome in zip(ids, _measure(source, template, ids, samples), strict=True):
            fault = outcome if isinstance(outcome, SampleError) else None
            found = getattr(outcome, "costs", {})
            if fault is None and (cuts or found.get("audio_cut")):
                fault = left_out(outcome, template, partial(_named, source, i))
            if fault is not None:
                errors[i] = fault
                continue
            tokens[i - start] = _length(source, i, outcome)
            if note := getattr(outcome, "note", ""):
                notes[i] = note
            for name, value in found.items():
                if name not in costs:
                    costs[name] = np.zeros(stop - start, dtype=np.int64)
                costs[name][i - start] = _length(source, i, value)
    told: list[Reason] = []
    for i in range(start, stop):
        verdict = _verdict(source, i, int(tokens[i - start]), errors.get(i), limit, notes.get(i))
        if verdict is not None:
            status[i - start], reason, line = verdict
            told.append((i, reason, line))
    return Part(
        start=start,
        stop=stop,
        tokens=tokens,
        status=status,
        costs={name: costs[name] for name in sorted(costs)},
        told=told,
        media=sorted(media),
        keys=drained(source),
    )


def _verdict(
    source: Source, i: int, tokens: int, error: SampleError | None, limit: int | None, note: str | None
) -> tuple[int, str, str] | None:
    """(status, reason, line for people) of a sample that there is something to say of; else None."""
    if error is not None:
        status = STATUS_EMPTY if error.reason == "empty" else STATUS_FAILED
        return status, error.reason, located(source.where(i), one_line(error))
    if tokens == 0:
        return STATUS_EMPTY, "empty", f"{source.where(i)}: the sample has no tokens"
    if limit is not None and tokens > limit:
        return STATUS_BEYOND, "beyond_model", f"{source.where(i)}: {tokens} tokens, the model takes {limit}"
    return None if note is None else (STATUS_OK, CUT, f"{source.where(i)}: {note}")


def _named(source: Source, i: int) -> str:
    return f"{source.where(i)} (id {i})"


def left_out(outcome: Any, template: Template, where: Callable[[], str]) -> SampleError | None:
    """Why a measured sample is not trained: nothing of it is supervised, or its sound would be cut.

    Raises:
        InputError: its sound would be cut, and nobody said that it may (`long_audio: error`).
    """
    found = getattr(outcome, "costs", {})
    if getattr(template, "truncation", "error") != "error" and found.get("supervised") == 0:
        return SampleError("unsupervised", "truncation leaves no token that is trained")
    policy = getattr(template, "long_audio", "cut") if found.get("audio_cut") else "cut"
    if policy == "error":
        raise InputError(
            f"{where()}: a clip is longer than the model hears, and its text stays whole",
            hint="long_audio='drop' leaves such samples out, long_audio='cut' trains them as they are",
        )
    if policy == "drop":
        return SampleError("long_audio", f"{found['audio_cut']} of its clips are longer than the model hears")
    return None


def drained(source: Any) -> dict[str, int]:
    """The counts of keys (`sources._account`) since the last call, of a source and those it is made of."""
    counts: Counter[str] = Counter()
    account = getattr(source, "account", None)
    if account is not None:
        counts.update(account.drain())
    inner = [getattr(source, "source", None), *(part.source for part in getattr(source, "parts", ()))]
    for one in inner:
        if one is not None:
            counts.update(drained(one))
    return dict(sorted(counts.items()))


def walk_media(source: Source, shard: tuple[int, int]) -> tuple[list[MediaRow], dict[str, int]]:
    """The media rows and counts of keys that measuring one shard would give, without measuring it."""
    drained(source)
    rows: set[MediaRow] = set()
    for first in range(shard[0], shard[1], BATCH):
        samples, _ = _read(source, first, min(first + BATCH, shard[1]), {})
        rows.update(_identities(source, samples))
    return sorted(rows), drained(source)


def _read(
    source: Source, first: int, last: int, errors: dict[int, SampleError]
) -> tuple[list[Mapping[str, Any]], list[int]]:
    samples: list[Mapping[str, Any]] = []
    ids: list[int] = []
    for i in range(first, last):
        try:
            samples.append(source[i])
            ids.append(i)
        except SampleError as error:
            errors[i] = error
        except PacktrainError:
            raise
        except Exception as error:
            raise _fault(source, i, "the source", error) from error
    return samples, ids


def _measure(
    source: Source, template: Template, ids: list[int], samples: list[Mapping[str, Any]]
) -> list[Any]:
    try:
        outcomes = measure_many(template, samples)
    except Exception as error:
        raise _culprit(source, template, ids, samples, error) from error
    if len(outcomes) != len(samples):
        raise LengthError(
            f"{type(template).__name__} gave {counted(len(outcomes), 'answers')} for "
            f"{counted(len(samples), 'samples')}",
            hint="it must answer each sample with a length or its SampleError",
        )
    return outcomes


def _culprit(
    source: Source, template: Template, ids: list[int], samples: list[Mapping[str, Any]], error: Exception
) -> PacktrainError:
    """Find the sample of a failed batch by measuring one at a time."""
    for i, sample in zip(ids, samples, strict=True):
        try:
            template.measure(sample)
        except SampleError:
            continue
        except PacktrainError as single:
            return single.at(source.where(i))
        except Exception as single:
            return _fault(source, i, type(template).__name__, single)
    if isinstance(error, PacktrainError):
        return error
    return InputError(
        f"{source.where(ids[0])} … {source.where(ids[-1])}: {type(template).__name__} failed on the batch: "
        f"{type(error).__name__}: {one_line(error)}",
        hint="measure_batch fails where measure does not; repair the template",
    )


def _fault(source: Source, i: int, culprit: str, error: Exception) -> InputError:
    return InputError(
        f"{source.where(i)}: {culprit} failed: {type(error).__name__}: {one_line(error)}",
        hint="raise SampleError for a record that cannot be used; anything else stops the run",
    )


def _length(source: Source, i: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise LengthError(
            f"{source.where(i)}: the template measured {value!r}", hint="a length is an integer >= 0"
        )
    return int(value)


def _identities(source: Source, samples: list[Mapping[str, Any]]) -> set[MediaRow]:
    """Identity of each medium that is a file; a missing one counts as (name, -1, "")."""
    root = getattr(source, "media_root", None)
    rows: set[MediaRow] = set()
    for sample in samples:
        for ref in media_refs(sample, sounds=True):
            try:
                row = identity(ref, root)
            except SampleError:
                if isinstance(ref, bytes) or str(ref).startswith("data:"):
                    continue
                row = (_relative(str(ref), root), -1, "")
            if row[0]:
                rows.add(row)
    return rows


def _relative(path: str, root: Any) -> str:
    """A path as `identity` names it: relative to the media root where it lies inside."""
    if root is not None:
        inside = os.path.relpath(os.path.abspath(path), os.path.abspath(root))
        if inside.split(os.sep)[0] != os.pardir:
            path = inside
    return path.replace(os.sep, "/")


def located(where: str, text: str) -> str:
    """`where: text`, or the text alone; sources that say where themselves are not repeated.

    >>> located("a:4", "it is cut"), located("a:4", "a:4: it is cut"), located("a:4", "a:4 is cut")
    ('a:4: it is cut', 'a:4: it is cut', 'a:4: is cut')
    >>> located("mix: a:4", "a:4: it is cut")  # a part of a mixture says its own place
    'mix: a:4: it is cut'
    """
    own = where
    while own:
        for sign in (": ", " "):
            if text.startswith(own + sign):
                return f"{where}: {text[len(own + sign) :]}"
        own = own.partition(": ")[2]
    return f"{where}: {text}" if where else text
