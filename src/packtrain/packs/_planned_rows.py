"""A plan of rows in memory: what `PackedDataset(dataset, template, packing_length=…)` makes of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, InputError, counted
from ..measuring.run import measure_range
from ..planning.build import plan
from ..planning.lengths import Lengths
from ..planning.packplan import PackPlan

__all__ = ["plan_rows"]

logger = logging.getLogger(__name__)


def plan_rows(samples: Any, template: Any, pack_length: int | None, lengths: Any) -> tuple[PackPlan, Any]:
    """The plan of indexable samples, and the lengths it was made from.

    Args:
        template: an `extend.Template`, a function sample -> encoded sample, or None: encoded already.
        pack_length: None: the template's `max_length`.
        lengths: None: the column `length` of the samples, else what the template measures, else what it
            encodes to.

    Raises:
        ConfigError: there is no cap.
        InputError: the samples cannot be indexed, or none of them can be used.

    Samples that are left out are one warning; `plan.ledger` has each of them.
    """
    pack_length = getattr(template, "max_length", None) if pack_length is None else pack_length
    if pack_length is None:
        raise ConfigError(
            "PackedDataset has neither a plan nor a pack length",
            hint="PackedDataset(plan, samples, encode), or PackedDataset(samples, template, pack_length=…)",
        )
    if isinstance(samples, str | Path | Mapping):
        raise InputError(
            f"a {type(samples).__name__} is no dataset", hint="packtrain.open_chats(path) opens a file"
        )
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        raise InputError(
            f"a {type(samples).__name__} cannot be indexed", hint="StreamingPackedDataset packs what streams"
        )
    why = ""
    if lengths is None and "length" in (getattr(samples, "column_names", None) or ()):
        lengths = samples["length"]
    if lengths is None:
        measures: Any = template if hasattr(template, "measure") else _ByEncoding(template)
        found = measure_range((_Rows(samples), measures), (0, len(samples)))
        lengths = Lengths(found.tokens, found.costs or None, found.status, found.reasons or None)
        why = next((f"; the first: {line}" for line in found.details.values()), "")
    made = plan(lengths, pack_length)
    if not len(made):
        raise InputError(
            f"none of {counted(len(samples), 'samples')} can be packed: {made.ledger.counts()}{why}",
            hint="records as they are in files become samples through packtrain.open_chats",
        )
    if len(made.ledger):
        logger.warning(
            "%d of %d samples are left out: %s%s", len(made.ledger), len(samples), made.ledger.counts(), why
        )
    return made, lengths


class _Rows:
    """Indexable samples as an `extend.Source`."""

    fingerprint = "rows"

    def __init__(self, samples: Any) -> None:
        self.source = samples

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]

    def where(self, index: int) -> str:
        return str(self.source.where(index)) if hasattr(self.source, "where") else f"row {index}"


class _ByEncoding:
    """Measures a sample by encoding it."""

    def __init__(self, template: Any) -> None:
        self.encode = getattr(template, "encode", template)

    def measure(self, sample: Any) -> int:
        encoded = sample if self.encode is None else self.encode(sample)
        if "input_ids" not in encoded:
            raise InputError("the samples have no input_ids", hint="pass the template that encodes them")
        return int(np.shape(encoded["input_ids"])[-1])
