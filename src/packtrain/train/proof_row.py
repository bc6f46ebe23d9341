"""The row of the start-up proof: three short samples that stand for those of training, and more behind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..collate import attention_of
from ..collate.boundaries import family_for
from ..collate.rotations import rotations_of
from .probe import Sample, media_fields, opening, other_media, size_of

__all__ = ["any_row", "backend_of", "proof_row"]

#: Tokens of the third sample.
_LAST = 16

#: Samples behind the third, at most, and their tokens together, at least.
_MORE, _MORE_TOKENS = 16, 10


def backend_of(model: Any) -> str | None:
    """Attention implementation; None for a model without a transformers config."""
    return attention_of(model) if hasattr(getattr(model, "config", None), "model_type") else None


def _budget(model: Any) -> int:
    """Tokens of the row: as many as take seconds on this device."""
    first = next(iter(model.parameters()), None)
    if first is None or first.device.type != "cpu":
        return 2048
    count = sum(p.numel() for p in model.parameters())
    floor = 320 if backend_of(model) == "flex_attention" else 48
    return int(min(512, max(floor, 2e10 / max(1, count))))


def proof_row(packs: Sequence[Sequence[Mapping[str, Any]]], model: Any) -> list[Sample] | None:
    """Three short samples, two with media where there are any, and more cut short. None: no sample."""
    tokens = _budget(model)
    true = (dict(one) for pack in packs for one in pack if not (one.get("stand_in") or one.get("filler")))
    every = sorted(true, key=size_of)
    every = [sample for sample in every if size_of(sample) > 1] or every
    if not every:
        return None
    most = tokens // 2
    if backend_of(model) is not None and (rotations := rotations_of(model)) is not None:
        most = min(most, rotations.limit)
    fitting = [sample for sample in every if size_of(sample) <= most]
    kinds: dict[tuple[str, ...], list[Sample]] = {}
    for sample in fitting:
        kinds.setdefault(media_fields(sample), []).append(sample)
    chosen, *pairs = [
        [first, *(others or [other_media(first)])[:1]] for kind, (first, *others) in kinds.items() if kind
    ] or [fitting[:2]]
    taken = {id(sample) for sample in chosen}
    for sample in every:
        if len(chosen) < 2 and id(sample) not in taken:
            cut = opening(sample, model, most)
            chosen += [] if cut is None else [cut]
    chosen = chosen or every[:1]
    last = [one for one in (opening(sample, model, min(_LAST, most)) for sample in every) if one is not None]
    row = [chosen[0], dict(chosen[-1]), dict((last or chosen)[0])]
    for pair in pairs:
        row += pair if sum(map(size_of, (*row, *pair))) <= tokens else []
    room = max(_MORE_TOKENS, tokens // 2 - sum(map(size_of, row)))
    texts = itertools.cycle(reversed(every))
    for sample in itertools.islice(texts, _MORE):
        cut = opening(sample, model, max(2, min(room, most, 2 * room // _MORE)))
        if cut is not None and size_of(cut) <= room:
            row, room = [*row, cut], room - size_of(cut)
    return row


def any_row(model: Any) -> list[Sample]:
    """Three samples of any text, on a rank that has no pack."""
    family = family_for(model)
    rows = 1 if family is None else family.position_rows
    made = []
    for number, length in enumerate((9, 7, 8)):
        ids = torch.arange(1, length + 1) + number
        places = torch.arange(length)
        positions = places if rows == 1 else places.expand(rows, -1)
        made.append({"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "sample_id": number})
    return made
