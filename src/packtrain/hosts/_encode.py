"""A host's own collator, run on one sample alone, as the encoder of packs.

What a sample's tokens and labels are stays the host's decision: its collator gets a list of one row, and
what comes back, without padding, is the encoded sample. So a script keeps its chat template, its label mask
and its processor settings when it begins to pack. Positions are those of the sample alone; for mRoPE
families the model's own `get_rope_index` makes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..collate.fields import IGNORE, media_rules
from ..collate.model_traits import config_of, family_for
from ..errors import InputError
from ..sources._values import absent

#: Keys that say nothing a pack does not say better.
_REPLACED = frozenset(
    {"attention_mask", "position_ids", "rope_deltas", "token_type_ids", "mm_token_type_ids", "seq_lengths"}
)


_PROBED = 8  # rows of a column that are encoded with and without it


class RopeIndex:
    """The [3,T] positions of one sample, by the model class's own function. Picklable: it holds no weights.

    Args:
        model: transformers model (not wrapped) of an mRoPE family.
    """

    def __init__(self, model: Any) -> None:
        owner = next((part for part in model.modules() if hasattr(type(part), "get_rope_index")), None)
        if owner is None:
            raise InputError(f"{type(model).__name__} has no get_rope_index", hint="use a Qwen-VL-like model")
        shell: Any = object.__new__(type(owner))
        nn.Module.__init__(shell)
        shell.config = owner.config
        self._shell = shell

    def __call__(self, ids: torch.Tensor, media: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """ids int64[T] -> int64[3,T]."""
        grids = {
            key: media[key]
            for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
            if key in media
        }
        if not grids:
            return torch.arange(len(ids)).expand(3, -1).clone()
        config = self._shell.config
        kinds = torch.zeros_like(ids)
        kinds[ids == config.image_token_id] = 1
        kinds[ids == config.video_token_id] = 2
        typed = {"mm_token_type_ids": kinds[None]}
        if "mm_token_type_ids" not in inspect.signature(self._shell.get_rope_index).parameters:
            typed = {}  # transformers 4 finds the media by their placeholders
        positions, _ = self._shell.get_rope_index(ids[None], **typed, **grids)
        found: torch.Tensor = positions[:, 0].long()
        return found


class HostEncoder:
    """Row -> encoded sample, through the host's collator.

    Args:
        collate: the host's collator.
        model: the transformers model (not wrapped) that trains.

    Raises (when called):
        InputError: the collator gives no labels, or a key that packs do not know.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]], model: Any) -> None:
        family = family_for(model)
        self.collate = collate
        self.media = media_rules(family)
        self.rope = RopeIndex(model) if family is not None and family.position_rows == 3 else None
        self.name = getattr(config_of(model), "model_type", "this model")

    def reads(self, rows: Any, name: str) -> bool:
        """Whether a column of rows changes what they are encoded to, in the first rows that have it."""
        found = 0
        for index in range(len(rows)):
            row = rows[index]
            if absent(row.get(name)):
                continue
            found += 1
            try:
                whole, without = self(row), self({key: row[key] for key in row if key != name})
            except Exception:  # it cannot do without, or the row is told where it is encoded
                return True
            if name == "position_ids" and self.rope is not None:
                if not torch.equal(torch.as_tensor(row[name]), whole[name]):
                    return False
            elif whole.keys() != without.keys() or not all(
                torch.equal(value, without[key]) for key, value in whole.items()
            ):
                return True
            if found == _PROBED:
                break
        return name == "position_ids" and self.rope is not None

    def __call__(self, row: Any) -> dict[str, Any]:
        batch = self.collate([dict(row) if isinstance(row, Mapping) else row])  # some write into their rows
        ids, labels = batch.get("input_ids"), batch.get("labels")
        if ids is None or labels is None:
            raise InputError(
                f"the data collator gives {', '.join(sorted(batch)) or 'nothing'}: no "
                f"{'input_ids' if ids is None else 'labels'}",
                hint="use the collator that the script trains with unpacked",
            )
        ids, labels = torch.as_tensor(ids), torch.as_tensor(labels)
        if ids.ndim != 2 or len(ids) != 1 or ids.shape != labels.shape:
            raise InputError(
                f"the data collator makes input_ids {list(ids.shape)} and labels {list(labels.shape)} of one "
                "row, expected [1,T] twice",
                hint="packing is for causal language models",
            )
        keep = _kept(batch.get("attention_mask"), ids)
        encoded: dict[str, Any] = {"input_ids": ids[0][keep], "labels": labels[0][keep].clone()}
        encoded["labels"][:1] = IGNORE
        media = {}
        for key, value in batch.items():
            if key in _REPLACED or key in ("input_ids", "labels") or value is None:
                continue
            if key not in self.media:
                raise InputError(
                    f"the data collator gives {key!r}, which packs of {self.name} do not know",
                    hint="remove the key in the collator, or train unpacked",
                )
            media[key] = torch.as_tensor(value)
        if self.rope is not None:
            encoded["position_ids"] = self.rope(encoded["input_ids"], media)
        return {**encoded, **media}


def _kept(mask: Any, ids: torch.Tensor) -> slice:
    """The tokens that are not padding; padding is only at the two ends."""
    if mask is None:
        return slice(None)
    mask = torch.as_tensor(mask)
    if mask.ndim != 2:
        return slice(None)
    places: Sequence[int] = mask[0].nonzero().flatten().tolist()
    if not places:
        raise InputError("the data collator masks every token of a row", hint="check attention_mask")
    first, last = places[0], places[-1] + 1
    if last - first != len(places):
        raise InputError("the attention_mask of a row has holes", hint="packs hold whole samples")
    return slice(first, last)
