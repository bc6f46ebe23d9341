"""Audit: does encoding give the lengths that were measured, and do media have the sizes that the data give?

A plan is only as good as its lengths. Before planning, a seeded random subset of the usable samples
is encoded for real and compared: tokens, and the costs supervised, images and patches where both
sides have them. One difference is enough to stop: it means the measuring rule and the encoder
disagree, and every length is in doubt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DriftError, InputError, SampleError, counted
from ..extend import Source
from ..media.hints import HINTS, differences

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# Are the sizes that the data give beside their media true? Asked on a sample, before they are trusted
# --------------------------------------------------------------------------------------------
# `trust_hints` lets a template take width, height and duration from the data without opening a file. Numbers
# in data lie (stored before rotation, of another copy), so measuring with it first reads the headers of a
# seeded random sample and compares. One difference stops the measurement.
_HINTED = 64  # samples looked at
_SHOWN_HINTS = 3  # differences named in the message


def audit_hints(source: Source) -> int:
    """Compare the hints of some random samples, always the same ones, with their media.

    Args:
        source: chat samples; ones that cannot be read, or whose media cannot, are passed over.

    Returns:
        How many parts with hints were compared.

    Raises:
        DriftError: a hint differs from its medium; names records and values.
    """
    compared, unread, wrong = 0, 0, []
    for index in _drawn(len(source), _HINTED, 0):
        for part in _hinted_parts(source, index):
            try:
                found = differences(part)
            except SampleError:
                unread += 1
                continue
            compared += 1
            wrong += [f"{source.where(index)}: {line}" for line in found]
    if wrong:
        more = f" and {len(wrong) - _SHOWN_HINTS} more" if len(wrong) > _SHOWN_HINTS else ""
        raise DriftError(
            f"sizes given in the data are not those of the media: {'; '.join(wrong[:_SHOWN_HINTS])}{more}",
            hint="measure without trusting them (leave trust_hints out)",
        )
    if unread and not compared:
        logger.warning("sizes in the data are trusted, but none of %d media could be read to compare", unread)
    return compared


def _drawn(total: int, count: int | None, seed: int) -> Sequence[int]:
    """So many of the places below `total`, ascending; all of them where there are no more, or for None."""
    if count is None or count >= total:
        return range(total)
    generator = np.random.Generator(np.random.PCG64(seed))
    found: list[int] = np.sort(generator.choice(total, size=count, replace=False), kind="stable").tolist()
    return found


def _hinted_parts(source: Source, index: int) -> Iterator[Mapping[str, Any]]:
    try:
        sample = source[index]
    except SampleError:
        return
    for message in sample.get("messages", ()):
        for part in message.get("content", ()):
            names = HINTS.get(str(part.get("type")), ()) if isinstance(part, Mapping) else ()
            if any(part.get(name) is not None for name in names):
                yield part


# --------------------------------------------------------------------------------------------
# Audit: does encoding give the lengths that were measured, and do media have the sizes that the data give?
# --------------------------------------------------------------------------------------------
_SHOWN = 5  # drifting samples named in the message


@dataclass(frozen=True)
class Drift:
    """One difference: sample `id`, cost `name` (`tokens`, `supervised`, …), both values."""

    id: int
    name: str
    measured: int
    encoded: int


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Result of an audit without drift.

    Attributes:
        ids: int64[k], the samples that were encoded, ascending.
        tokens: their tokens in all.
        failed: id -> reason, samples whose media turned out to be broken only when decoded.
    """

    ids: NDArray[np.int64]
    tokens: int
    failed: dict[int, str] = field(default_factory=dict)


def audit(
    source: Source,
    lengths: Any,
    encode: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    count: int | None = 32,
    seed: int = 0,
    start: int | None = None,
    check: Callable[[Mapping[str, Any], Mapping[str, Any]], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Encode a random subset of the usable samples and compare with what was measured.

    Args:
        source: where the samples are.
        lengths: a `Lengths` of that source.
        encode: sample -> encoded sample with `input_ids`, for example `template.encode`.
        count: how many samples; all usable ones where there are fewer, or for None.
        seed: chooses the subset.
        start: the id of the first length, for lengths of a part of the source; None: of all of it.
        check: called with each sample and its encoding; raises where something of the sample is not in it
            (`HFTemplate.check_decoded`).
        progress: called with (samples checked, samples to check).

    Returns:
        What was checked. Samples that fail to decode are in `failed`, not an error here: training
        treats them by its `on_error` policy.

    Raises:
        DriftError: a measured value differs; names ids, measured and encoded values.
        ConfigError: something that a sample says is not in its ids.
        InputError: the lengths are of another source (their number differs).
    """
    first = start or 0
    if len(lengths.tokens) > len(source) - first or (start is None and len(lengths.tokens) != len(source)):
        raise InputError(
            f"{len(lengths.tokens)} lengths for a source of {counted(len(source), 'samples')}",
            hint="measure this source again",
        )
    status = np.zeros(len(lengths.tokens), np.uint8) if lengths.status is None else np.asarray(lengths.status)
    usable = np.flatnonzero((status == 0) | (status == 3))
    chosen = usable[_drawn(len(usable), count, seed)].tolist()
    drifts: list[Drift] = []
    failed: dict[int, str] = {}
    total = 0
    for number, place in enumerate(chosen):
        i = first + place
        if progress is not None:
            progress(number, len(chosen))
        try:
            sample = source[i]
            try:
                encoded = encode(sample)
            except SampleError as error:
                failed[i] = error.reason
                continue
            if check is not None:
                check(sample, encoded)
        except (DriftError, ConfigError) as error:
            raise error.at(f"{source.where(i)} (id {i})") from error
        found = encoded_costs(encoded)
        total += found["tokens"]
        drifts += _compare(i, place, lengths, found)
    if drifts:
        raise DriftError(
            _message(source, drifts, len(chosen)), hint="measure again with the processor used for training"
        )
    return AuditReport(ids=np.asarray(chosen, dtype=np.int64) + first, tokens=total, failed=failed)


def encoded_costs(encoded: Mapping[str, Any]) -> dict[str, int]:
    """Costs of an encoded sample: tokens, and those of its labels and media that its tensors tell."""
    found = {"tokens": len(encoded["input_ids"])}
    if "labels" in encoded:
        found["supervised"] = int((np.asarray(encoded["labels"]) != -100).sum())
    rows = 0
    for key, cost in (("image_grid_thw", "images"), ("video_grid_thw", "")):
        if key in encoded:
            grid = np.asarray(encoded[key]).reshape(-1, 3)
            rows += int(grid.prod(axis=1).sum())
            if cost:
                found[cost] = len(grid)
            found["patches"] = rows
    if "image_sizes" in encoded:
        found["images"] = len(encoded["image_sizes"])
    if "patches" not in found:  # no grids: crops, and frames [videos, frames, …]
        crops = len(encoded["pixel_values"]) if "pixel_values" in encoded else 0
        if "pixel_values_videos" in encoded:
            found["video_frames"] = int(np.prod(encoded["pixel_values_videos"].shape[:2]))
        if crops or "video_frames" in found:
            found["patches"] = crops + found.get("video_frames", 0)
    if "feature_attention_mask" in encoded:
        found["audio_frames"] = int(np.asarray(encoded["feature_attention_mask"]).sum())
    return found


def _compare(i: int, place: int, lengths: Any, found: Mapping[str, int]) -> list[Drift]:
    measured = {"tokens": int(lengths.tokens[place])}
    measured.update({name: int(values[place]) for name, values in (lengths.costs or {}).items()})
    return [
        Drift(i, name, measured[name], value)
        for name, value in found.items()
        if measured.get(name, value) != value
    ]


def _message(source: Source, drifts: list[Drift], checked: int) -> str:
    ids = sorted({drift.id for drift in drifts})
    shown = "; ".join(
        f"id {d.id} ({source.where(d.id)}) {d.name}: measured {d.measured}, encoded {d.encoded}"
        for d in drifts[:_SHOWN]
    )
    more = f" … and {len(drifts) - _SHOWN} more" if len(drifts) > _SHOWN else ""
    return f"encoding disagrees with measuring on {len(ids)} of {checked} audited samples: {shown}{more}"
