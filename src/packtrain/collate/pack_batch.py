"""PackBatch: what the collator returns. Boundaries are data of the batch, not something to derive.

They stand on attributes, so they are there even where a model may not get them as inputs, and survive
pickling (data loader workers), copies, pinning, and `to`, by which accelerate moves a batch; a mapping that
somebody rebuilds item by item is without them.
`packed_seq_params` gives them in Megatron's words without importing it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..errors import InputError, counted
from .fields import IGNORE

# --------------------------------------------------------------------------------------------
# The filler pack: what a rank trains on when it must take a step and has no sample left
# --------------------------------------------------------------------------------------------
# It has pack id `FILLER` (-1), one segment of one pad token, label -100 and no sample. Collated it gives a
# batch with `filler=True`, empty `sample_ids` and no supervised token, so it adds exactly nothing to the loss
# and the gradients, and the ranks stay in step. A filler never stands in a raw plan, and whoever hands one
# out logs it.
#: The pack id of a filler. No pack of a plan has it.
FILLER = -1


def filler_pack(pad_token_id: int = 0) -> list[dict[str, Any]]:
    """The pack that keeps a rank in step: one segment of one pad token, not trained, no sample."""
    return [{"input_ids": [pad_token_id], "labels": [IGNORE], "filler": True}]


def is_filler(pack: Sequence[Mapping[str, Any]]) -> bool:
    """Does this pack (a list of samples) hold nothing but fillers?"""
    return len(pack) > 0 and all(bool(sample.get("filler")) for sample in pack)


# --------------------------------------------------------------------------------------------
# Packs that come as one row and still know their samples (`packs.Pack`): the collator takes those
# --------------------------------------------------------------------------------------------
def members_of(packs: Sequence[Any]) -> Sequence[Any]:
    """The packs of a call, rows with `members()` replaced by their samples; all else as it is.

    A row without members (a plain mapping with `cu_seq_lens`) stays, and is refused as one sample with
    undeclared fields: boundaries are never guessed.
    """
    if isinstance(packs, Mapping):
        return [packs.members()] if hasattr(packs, "members") else packs
    if not isinstance(packs, Sequence) or not any(hasattr(pack, "members") for pack in packs):
        return packs
    return [pack.members() if hasattr(pack, "members") else pack for pack in packs]


# --------------------------------------------------------------------------------------------
# PackBatch: what the collator returns
# --------------------------------------------------------------------------------------------
#: Segment source of a tail, filler or dummy: it belongs to no sample.
NO_SAMPLE = -1


# --------------------------------------------------------------------------------------------
# What is known of a tensor, as long as it is as it was: read where that is free, believed later
# --------------------------------------------------------------------------------------------
class _Known:
    """On a tensor: something that was read from it. Copies of the tensor, pickled ones too, know nothing:
    torch counts their changes anew, so a copy of a changed tensor may have the version of the first one.
    """

    __slots__ = ("of", "value", "version")

    def __init__(self, tensor: torch.Tensor, value: Any) -> None:
        self.of, self.version, self.value = weakref.ref(tensor), tensor._version, value

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()  # nothing, in a type that torch.load reads with weights_only


def remember(tensor: torch.Tensor, name: str, value: Any) -> None:
    """Keep on a tensor what was read from it, until it changes in place (`remembered`)."""
    if _tells_changes(tensor):
        setattr(tensor, name, _Known(tensor, value))


def remembered(tensor: torch.Tensor, name: str) -> Any:
    """What `remember` kept on this very tensor; None: nothing, or it has changed since."""
    known = getattr(tensor, name, None) if _tells_changes(tensor) else None
    if isinstance(known, _Known) and known.version == tensor._version and known.of() is tensor:
        return known.value
    return None


def _tells_changes(tensor: torch.Tensor) -> bool:
    """Not where torch.compile traces: the version would be that of the trace; nor outside of autograd."""
    return not torch.compiler.is_compiling() and not tensor.is_inference()


#: Of a tensor that a batch moved to a device: the tensor on the host, that one's version then.
_HOST = "_packtrain_host"

#: Of labels: how many of them are targets.
_TRAINED = "_packtrain_trained"


def on_host(tensor: torch.Tensor) -> torch.Tensor | None:
    """The equal tensor on the host that a batch moved `tensor` from, while neither has changed; else None.

    Also of the first part of such a tensor (the text row of four rows of positions). To read it there is no
    wait for the device.
    """
    whole = tensor if hasattr(tensor, _HOST) else tensor._base
    kept = None if whole is None else remembered(whole, _HOST)
    if whole is None or kept is None:
        return None
    host: torch.Tensor = kept[0]
    if host._version != kept[1]:
        return None
    if whole is tensor:
        return host
    if not whole.ndim or not len(whole):
        return None
    first = whole[0]
    same = (first.shape, first.stride(), first.storage_offset())
    return host[0] if same == (tensor.shape, tensor.stride(), tensor.storage_offset()) else None


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Moved to a device that the host does not wait for: through pinned memory to a card."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class PackBatch(dict[str, Any]):
    """A batch for `model(**batch)` that also carries its boundaries as attributes.

    Attributes:
        lengths: tokens of every segment in row order, the tail and any padding included; they sum to T.
        unpadded: the same without padding inside segments (`context_parallel`).
        sample_ids: ids of the samples in row order; fillers, dummies and the tail have none.
        segment_sources: per segment the position in `sample_ids` it belongs to, -1 for none.
        sample_values: `source`, `channel`, `weight` -> one value per sample (None where it has none);
            only fields that a sample of the row carries.
        tail: tokens of the pad tail, 0 without one (then it is the last segment).
        filler: True when the row holds no sample at all.
        dummies: segments added so that every tower runs (`dummy_media`).
        per_token: names of the [1,T] fields that samples carry.
    """

    lengths: tuple[int, ...] = ()
    unpadded: tuple[int, ...] = ()
    sample_ids: tuple[Any, ...] = ()
    segment_sources: tuple[int, ...] = ()
    sample_values: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    tail: int = 0
    filler: bool = False
    dummies: int = 0
    per_token: tuple[str, ...] = ()

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        if values and isinstance(values[0], PackBatch):
            self.__dict__.update(values[0].__dict__)

    @classmethod
    def of(cls, values: Mapping[str, Any], members: Sequence[Mapping[str, Any]], total: int = 0) -> PackBatch:
        """The row that another collator made of samples.

        Args:
            values: of the row.
            members: the samples, in row order.
            total: tokens of the row; those behind its samples are its tail.
        """
        lengths = [len(one["input_ids"]) for one in members]
        made = cls(values)
        made.tail = max(0, total - sum(lengths))
        made.lengths = (*lengths, made.tail) if made.tail else tuple(lengths)
        made.sample_ids = tuple(one["sample_id"] for one in members if one.get("sample_id") is not None)
        return made

    def to(self, device: Any, non_blocking: bool = False) -> PackBatch:
        """The same batch with its tensors on `device`, as `accelerate` and a training loop move it.

        A tensor that leaves the host remembers the one that it is a copy of (`on_host`).
        """

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            made = value.to(device, non_blocking=non_blocking)
            if value.device.type == "cpu" != made.device.type and not value.is_inference():
                remember(made, _HOST, (value, value._version))
            return made

        return self.with_values({name: moved(value) for name, value in self.items()})

    def count_trained(self, labels: torch.Tensor) -> None:
        """Note how many targets are trained, from the same labels where looking at them is free."""
        remember(self["labels"], _TRAINED, int((labels[..., 1:] != IGNORE).sum()))

    @property
    def trained(self) -> int | None:
        """Targets that are trained, if they were counted and the labels are still those; else None."""
        labels = self.get("labels")
        return None if labels is None else remembered(labels, _TRAINED)

    def copy(self) -> PackBatch:
        """The same values and boundaries."""
        return self.with_values(self)

    @property
    def cu_seq_lens(self) -> torch.Tensor:
        """int32 [segments + 1]: 0, then the running sum of `lengths`."""
        return offsets(self.lengths)

    def with_values(self, values: Mapping[str, Any]) -> PackBatch:
        """Other values (moved to a device, for example), the same boundaries."""
        moved = PackBatch(values)
        moved.__dict__.update(self.__dict__)
        return moved

    def packed_seq_params(self, device: Any = None) -> dict[str, Any]:
        """Keyword arguments of Megatron's `PackedSeqParams`, thd layout.

        `cu_seqlens_*` count tokens as encoded, `cu_seqlens_*_padded` where segments begin in the row; both
        are equal without `context_parallel`. Longest segment as in the row, Python int.
        """
        real = offsets(self.unpadded or self.lengths).to(device)
        padded = offsets(self.lengths).to(device)
        longest = max(self.lengths)
        return {
            "qkv_format": "thd",
            "cu_seqlens_q": real,
            "cu_seqlens_kv": real.clone(),
            "cu_seqlens_q_padded": padded,
            "cu_seqlens_kv_padded": padded.clone(),
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }

    def seq_start_id(self) -> torch.Tensor:
        """int64 [segments]: where each segment begins in the row."""
        return offsets(self.lengths)[:-1].long()

    def context_parallel_part(self, size: int, rank: int) -> PackBatch:
        """The tokens of one context-parallel rank: every [.., T] tensor cut, boundaries those of the row.

        `labels` are cut as they are: each still stands at its own token, so shift them before (or take the
        loss's targets from `packtrain.train.loss.shift_labels` of the whole row).
        """
        index, total = context_parallel_index(self.lengths, size, rank), sum(self.lengths)
        cut = ("seq_idx", "padding_mask", "position_ids", *self.per_token)
        values = {
            key: value.index_select(-1, index) if key in cut and value.shape[-1] == total else value
            for key, value in self.items()
        }
        return self.with_values(values)


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """int32 [n + 1]: 0, then the running sum."""
    return torch.from_numpy(np.array([0, *lengths]).cumsum().astype(np.int32))


def context_parallel_index(lengths: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """int64 [T / size]: places of the row that `rank` computes, per segment chunks r and 2 N - 1 - r.

    Raises:
        InputError: a segment does not divide into 2 N chunks, or no such rank.
    """
    if not 0 <= rank < size:
        raise InputError(f"rank {rank} of a context-parallel group of {size}")
    if size == 1:
        return torch.arange(sum(lengths))
    parts, start = [], 0
    for length in lengths:
        chunk, left = divmod(length, 2 * size)
        if left:
            raise InputError(
                f"a segment of {length} tokens does not divide into {counted(2 * size, 'chunks')}",
                hint=f"collate with context_parallel={size}",
            )
        for number in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return torch.cat(parts)
