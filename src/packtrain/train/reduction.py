"""How token losses become the loss of a step: one weight for each token, one normaliser for the step.

    token    every supervised token weighs 1: the mean over the supervised tokens of the step
    sample   a token weighs 1/n of its sample's n supervised tokens: the mean over samples
    sqrt     a token weighs 1/sqrt(n) (square averaging): between the two
    sources  each of them times the weight of the sample's source

The loss is sum(weight * loss) / sum(weight), both sums over all micro steps and ranks of the step. Weights
need the boundaries of the row and nothing else, so how samples were packed, split or ordered changes nothing.
`loss_scale` multiplies the loss of its token and leaves the normaliser, as hosts that define the field do.
Without any weight in a step, the loss is 0.

Tails and fillers have no supervised token and so no weight; a sample without any is not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..checks import number
from ..collate import IGNORE
from ..collate.pack_batch import to_device
from ..errors import ConfigError, InputError, nearest

_REDUCTIONS = ("token", "sample", "sqrt")

SourceOf = Callable[[Any], str]


@dataclass(frozen=True)
class Reduction:
    """A reduction and the weights of sources.

    Attributes:
        kind: "token", "sample" or "sqrt".
        source_weights: source name -> weight; a source that is not named weighs 1.
        source_of: sample id -> source name; needed with `source_weights`.
    """

    kind: str = "token"
    source_weights: Mapping[str, float] = field(default_factory=dict)
    source_of: SourceOf | None = None

    def __post_init__(self) -> None:
        if self.kind not in _REDUCTIONS:
            raise ConfigError(
                f"loss_reduction is {self.kind!r}",
                hint=f"did you mean {nearest(str(self.kind), _REDUCTIONS) or 'token'}? "
                f"Known: {', '.join(_REDUCTIONS)}",
            )
        for name, weight in self.source_weights.items():
            number(f"the weight of source {name!r}", weight, 0, hint="use a number >= 0", error=ConfigError)
        if self.source_weights and self.source_of is None:
            raise ConfigError("source weights without sources", hint="pass source_of")

    def over(self, source: Any) -> Reduction:
        """The same reduction over the samples of another source."""
        return replace(self, source_of=source_names(source)[1])

    def weigh(self, batch: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Weights of a row's labels, and their sum over its supervised tokens.

        Args:
            batch: a collated row (`owners` says what it has to carry).

        Returns:
            float64 [1,T] (None: each weighs 1; `loss_scale` is not in it), and a float64 scalar.
        """
        labels = batch["labels"]
        trained = (labels.reshape(-1) != IGNORE).to(torch.float64)
        if self.kind == "token" and not self.source_weights:
            return None, trained.sum()
        place, ids = owners(batch)
        place = to_device(place, labels.device)
        counts = trained.new_zeros(len(ids) + 1).index_add_(0, place, trained)
        of_sample = torch.ones_like(counts)
        if self.kind != "token":
            of_sample = counts.clamp(min=1).pow(-1.0 if self.kind == "sample" else -0.5)
        if self.source_weights and self.source_of is not None:
            own = [self.source_weights.get(self.source_of(sample), 1.0) for sample in ids]
            of_sample = of_sample * to_device(torch.tensor([*own, 1.0], dtype=torch.float64), labels.device)
        weights = of_sample.index_select(0, place)
        return weights.reshape(labels.shape), (weights * trained).sum()

    def scaled(self, batch: Any) -> tuple[dict[str, Any], torch.Tensor]:
        """The row with its weights in `loss_scale` (times what stood there), and their sum without it."""
        weights, total = self.weigh(batch)
        row = dict(batch)
        if weights is not None:
            scale = row.get("loss_scale")
            row["loss_scale"] = weights if scale is None else weights * scale.to(weights)
        return row, total


def loss_normaliser(batches: Iterable[Any], reduction: Reduction | str = "token") -> torch.Tensor:
    """What the losses of some rows are divided by together, float64: sum it over ranks and micro steps."""
    chosen = Reduction(reduction) if isinstance(reduction, str) else reduction
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        total = total + chosen.weigh(batch)[1].to(total.device)
    return total


def owners(batch: Any) -> tuple[torch.Tensor, Sequence[Any]]:
    """Which sample each token of a row belongs to.

    Args:
        batch: a PackBatch; or a mapping with `cu_seq_lens_q`, whose every segment then is a sample.

    Returns:
        int64 [T], positions in the second value, or its length for tokens of no sample; the sample ids.
    """
    lengths = getattr(batch, "lengths", ())
    if lengths:
        ids = batch.sample_ids
        sources = [len(ids) if source < 0 else source for source in batch.segment_sources]
    elif batch.get("cu_seq_lens_q") is not None:
        ends = batch["cu_seq_lens_q"].tolist()
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        sources = list(range(len(lengths)))
        ids = [None] * len(lengths)
    else:
        raise InputError(
            "the row carries no boundaries, and a loss by sample needs them",
            hint="collate it with PaddingFreeCollator and keep the PackBatch",
        )
    # numpy: torch's own (an index by brackets too) wakes a thread on every core, which spins for milliseconds
    place = torch.from_numpy(np.repeat(np.array(sources, np.int64), lengths))
    if place.numel() != batch["labels"].numel():
        raise InputError(
            f"the boundaries of the row cover {place.numel()} tokens, its labels {batch['labels'].numel()}",
            hint="labels and boundaries must be those of the same row",
        )
    return place, ids


def source_names(source: Any) -> tuple[tuple[str, ...], SourceOf]:
    """Names of the sources inside `source`, and the one of each sample id; without a mixture one: "data"."""
    inner = source
    while inner is not None and not (hasattr(inner, "place") and hasattr(inner, "parts")):
        inner = getattr(inner, "source", None)
    if inner is None:
        return ("data",), lambda sample: "data"
    names = tuple(part.name for part in inner.parts)
    return tuple(dict.fromkeys(names)), lambda sample: names[inner.place(sample)[0]]


def reduction_of(kind: str, weights: Mapping[str, float], source: Any) -> Reduction:
    """The reduction of a configuration.

    Raises:
        ConfigError: a weight names no source of the data.
    """
    names, of = source_names(source)
    for name in weights:
        if name not in names or names == ("data",):
            close = nearest(name, names)
            raise ConfigError(
                f"training.source_weights names {name!r}, the data have no such source",
                hint=f"did you mean {close}?"
                if close
                else f"sources: {', '.join(names)} (names of the parts of data.mixture)",
            )
    return Reduction(kind, dict(weights), of)
