"""Are the sizes that the data give beside their media true? Asked on a sample, before they are trusted.

`trust_hints` lets a template take width, height and duration from the data without opening a file. Numbers in
data lie (stored before rotation, of another copy), so measuring with it first reads the headers of a seeded
random sample and compares. One difference stops the measurement.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import DriftError, SampleError
from ..extend import Source
from ..media.hints import HINTS, differences

__all__ = ["audit_hints"]

logger = logging.getLogger(__name__)

_SHOWN = 3  # differences named in the message


def audit_hints(source: Source, *, count: int = 64, seed: int = 0) -> int:
    """Compare the hints of `count` random samples with their media.

    Args:
        source: chat samples; ones that cannot be read, or whose media cannot, are passed over.
        count: samples to look at; all where there are fewer.
        seed: chooses them.

    Returns:
        How many parts with hints were compared.

    Raises:
        DriftError: a hint differs from its medium; names records and values.
    """
    total = len(source)
    chosen = range(total)
    if count < total:
        generator = np.random.Generator(np.random.PCG64(seed))
        chosen = np.sort(generator.choice(total, size=count, replace=False), kind="stable").tolist()
    compared, unread, wrong = 0, 0, []
    for index in chosen:
        for part in _hinted_parts(source, index):
            try:
                found = differences(part)
            except SampleError:
                unread += 1
                continue
            compared += 1
            wrong += [f"{source.where(index)}: {line}" for line in found]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise DriftError(
            f"sizes given in the data are not those of the media: {'; '.join(wrong[:_SHOWN])}{more}",
            hint="measure without trusting them (leave trust_hints out)",
        )
    if unread and not compared:
        logger.warning("sizes in the data are trusted, but none of %d media could be read to compare", unread)
    return compared


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
