"""Rotary embeddings that change with the longest sample of a row: which samples may stand beside each other.

Most rotations depend on a token's position alone. Two kinds of transformers look at the largest position of
the row as well: `longrope` turns every token of a row in which one sample is longer than
`original_max_position_embeddings` by its long factors, `dynamic` scales with the longest sample from
`max_position_embeddings` on. A short sample beside such a one would be trained with other rotations than
alone. Rows that stand on one side of the limit are as their samples alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import IsolationError
from .boundaries import config_of, text_config

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Rotations:
    """Of a model whose rotations look at the whole row.

    Attributes:
        kind: "longrope" or "dynamic".
        limit: samples of at most so many tokens may stand together, whatever their lengths.
        model_type: of the model's config.
    """

    kind: str
    limit: int
    model_type: str

    def mixes(self, longest: Any, shortest: Any) -> Any:
        """Would rows with these longest and shortest samples turn one of them as it is not turned alone?"""
        other = shortest < longest if self.kind == "dynamic" else shortest <= self.limit
        return (longest > self.limit) & other

    def refusal(self, what: str, long: tuple[Any, int], short: tuple[Any, int]) -> IsolationError:
        """One line for a row that mixes, by (name, tokens) of its longest and shortest sample."""
        return IsolationError(
            f"{what} holds {long[0]} of {long[1]} tokens beside {short[0]} of {short[1]}: above "
            f"{self.limit} the rotary embedding of {self.model_type} ({self.kind}) changes for the row, "
            "so the shorter would be trained with other rotations than alone",
            hint=f"set the pack length (template.max_length, pack_length) to {self.limit} or less: a longer "
            "sample then gets a pack of its own; or pack short and long samples in runs of their own",
        )


def rotations_of(model: Any) -> Rotations | None:
    """Of a model, its config, or None: its rotations depend on positions alone, or it is not known."""
    config = config_of(model)
    if config is None:
        return None
    text = text_config(config)
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    most = getattr(text, "max_position_embeddings", None)
    for one in (given, *(part for part in given.values() if isinstance(part, dict))):
        kind = str(one.get("rope_type") or one.get("type"))
        own = getattr(text, "original_max_position_embeddings", None)
        limit = own or one.get("original_max_position_embeddings") or most
        if kind == "longrope" and limit:
            return Rotations("longrope", int(limit), str(config.model_type))
        if "dynamic" in kind and most:  # what it grew to stays until a row is shorter than the limit
            return Rotations("dynamic", int(most) - 1, str(config.model_type))
    return None


def check_row(rotations: Rotations, lengths: Sequence[int], names: Sequence[str | None]) -> None:
    """Refuse a row in which a sample is not turned as alone.

    Args:
        lengths: of its segments, padding included.
        names: how messages call the samples; None: nothing of it is trained, so it may be turned as it likes.

    Raises:
        IsolationError: names the longest and the shortest.
    """
    trained = [number for number, name in enumerate(names) if name is not None]
    if len(lengths) < 2 or not trained:
        return
    long = max(range(len(lengths)), key=lengths.__getitem__)
    short = min(trained, key=lengths.__getitem__)
    if rotations.mixes(lengths[long], lengths[short]):
        longest = names[long] if long < len(names) else None
        raise rotations.refusal(
            "a row", (longest or "padding", lengths[long]), (names[short], lengths[short])
        )


def check_packs(model: Any, plan: Any, tokens: Any) -> None:
    """Refuse a plan that would put such samples into one row, before anything is trained.

    Args:
        model: model or config that will train.
        plan: a PackPlan.
        tokens: int[n], lengths of the samples.

    Raises:
        IsolationError: names the first such pack, and how many there are.
    """
    rotations = rotations_of(model)
    if rotations is None or not len(plan):
        return
    tokens = np.asarray(tokens)
    held = tokens[plan.indices]
    starts = np.asarray(plan.offsets[:-1])
    longest: I64 = np.maximum.reduceat(held, starts)
    shortest: I64 = np.minimum.reduceat(held, starts)
    packs = np.flatnonzero(rotations.mixes(longest, shortest))
    if not len(packs):
        return
    first = int(packs[0])
    ids = plan[first]
    long, short = (int(ids[f(tokens[ids])]) for f in (np.argmax, np.argmin))
    what = f"pack {first}" + (f" (one of {len(packs)})" if len(packs) > 1 else "")
    raise rotations.refusal(
        what, (f"sample {long}", int(tokens[long])), (f"sample {short}", int(tokens[short]))
    )
