"""Segments of a row: offsets for kernels, and layers with a state (linear attention, SSM), apart by them.

    isolate_states(model)       afterwards every state layer starts afresh at each packed sample

Without special kernels transformers runs the state of such a layer through the whole row, whatever
mask or offsets it gets. Here the layer itself is called once for each segment, so it cannot see
another sample: exact on any device, and differentiable. Boundaries come from the restarting text
positions that the model is called with; offsets and `seq_idx` are kept from the layer.

Trade-off: one call per segment and layer. Rows of many short samples run slower than with kernels.

With gradient checkpointing a layer runs again in the backward pass, for the boundaries of the last
forward pass: two forward passes of different rows before one backward pass are refused then.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..collate.model_traits import state_layers
from ..collate.pack_batch import on_host, remember, remembered, to_device
from ..errors import IsolationError
from ..families import FLASH_KWARGS, VARLEN_KWARGS

# --------------------------------------------------------------------------------------------
# Segments of a row as attention kernels want them: offsets, the longest one, lengths
# --------------------------------------------------------------------------------------------
# They are read from what reaches a layer: restarting text positions, or offsets that a caller gives.
# The first layer of a forward pass pays one device-to-host copy; the result stays with the tensor it
# was read from, so that the other layers (and a recomputation for gradient checkpointing, which
# brings the same tensor) pay nothing. A tensor changed in place is read again. What a batch moved to
# the device is read where it came from: then the host waits for nothing.
_KEPT = "_packtrain_segments"


@dataclass(frozen=True)
class Segments:
    """Attributes:
    lengths: tokens of every segment, in row order.
    cu: int32 [segments + 1] on the device of the tensors: 0, then running sums.
    longest: the longest segment.
    """

    lengths: tuple[int, ...]
    cu: torch.Tensor
    longest: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def of_positions(positions: torch.Tensor) -> Segments:
    """Segments of rows whose text positions [B,T] restart; every row starts a segment.

    Raises:
        IsolationError: `positions` is not [B,T] (mRoPE rows without the text row, for example).
    """
    if positions.ndim != 2:
        raise IsolationError(
            f"position_ids reach the attention as {list(positions.shape)}: samples cannot be told apart",
            hint="give restarting text positions [1,T]; for mRoPE models [4,1,T] with the text row first",
        )
    return _kept(positions, _read_positions)


def of_offsets(offsets: torch.Tensor) -> Segments:
    """Segments of running offsets [n + 1] (`cu_seq_lens`); empty ones are kept."""
    return _kept(offsets, _read_offsets)


def of_lengths(lengths: tuple[int, ...], device: torch.device) -> Segments:
    """Segments of known lengths."""
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Segments(lengths, to_device(cu, device), max(lengths))


def _read_positions(row: torch.Tensor) -> Segments:
    host = on_host(row)
    positions = row if host is None else host
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = torch.diff(positions, dim=-1) != 1
    edges = [*starts.flatten().nonzero().flatten().tolist(), positions.numel()]
    return of_lengths(tuple(b - a for a, b in itertools.pairwise(edges)), row.device)


def _read_offsets(offsets: torch.Tensor) -> Segments:
    edges = offsets.tolist()
    lengths = tuple(b - a for a, b in itertools.pairwise(edges))
    if not lengths or edges[0] != 0 or min(lengths) < 0:
        raise IsolationError(
            f"sequence offsets {edges[:4]}… do not start at 0 and grow",
            hint="give int32 offsets 0, l1, l1+l2, …",
        )
    return Segments(lengths, offsets.to(torch.int32), max(lengths))


def _kept(tensor: torch.Tensor, read: Callable[[torch.Tensor], Segments]) -> Segments:
    kept: Segments | None = remembered(tensor, _KEPT)
    if kept is None:
        kept = read(tensor)
        remember(tensor, _KEPT, kept)
    return kept


# --------------------------------------------------------------------------------------------
# Segments of a row: offsets for kernels, and layers with a state (linear attention, SSM), apart by them
# --------------------------------------------------------------------------------------------
#: Class names of layers that carry a state along the row; their first argument is [B,T,hidden].
_CLASS = re.compile(
    r"(Mamba2?Mixer|Mamba|Bamba|FalconH1|GraniteMoeHybridMamba\w*)Mixer$|MambaLayer$|GatedDeltaNet$|"
    r"ShortConv$|RecurrentBlock$|LightningAttention$|DeltaAttention$|MambaMixer$|Mamba2Mixer$"
)

_DROPPED = ("seq_idx", *FLASH_KWARGS, *VARLEN_KWARGS)

_MARK = "_packtrain_states"


class _Boundaries:
    """Segments of the forward pass that runs."""

    def __init__(self) -> None:
        self.segments: Segments | None = None
        self._open: set[tuple[int, ...]] = set()
        self._replayed = False
        self.inside = False

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.note(module, args, kwargs)
        self.inside = True

    def leave(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.inside = False

    def note(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Boundaries of a pass that begins. Inside they are known; some models hand no positions on."""
        if self.inside:
            return
        positions = kwargs.get("position_ids")
        if positions is not None and positions.ndim == 3:
            if positions.shape[0] != 4:
                raise IsolationError(
                    f"position_ids {list(positions.shape)} have no text row: state layers cannot be kept "
                    "apart",
                    hint="use PaddingFreeCollator(model), which gives [4,1,T]",
                )
            positions = positions[0]
        self.segments = None if positions is None else of_positions(positions)
        if not torch.is_grad_enabled():
            return
        if self._replayed:
            self._open, self._replayed = set(), False
        if self.segments is not None:
            self._open.add(self.segments.lengths)

    def of_row(self, tokens: int) -> tuple[int, ...]:
        if torch._C._current_graph_task_id() != -1:  # a backward pass that computes the layer again
            self._replayed = True
            if len(self._open) > 1:
                raise IsolationError(
                    "gradient checkpointing replays a state layer after forward passes of different rows",
                    hint="run backward after every forward pass, or switch gradient checkpointing off",
                )
        if self.segments is None or self.segments.tokens != tokens:
            known = None if self.segments is None else self.segments.tokens
            raise IsolationError(
                f"a layer with a state got {tokens} tokens, the boundaries are of {known}",
                hint="call the model with restarting position_ids [1,T]",
            )
        return self.segments.lengths


def states_isolated(model: Any) -> bool:
    """True when `isolate_states` has been applied to the model."""
    return hasattr(model, _MARK)


def isolate_states(model: Any) -> Any:
    """Keep packed samples apart in every state layer of a loaded model; applied once.

    Raises:
        IsolationError: its state layers are not of a kind that can be called per segment.
    """
    if states_isolated(model) or not state_layers(model):
        return model
    layers = [m for m in model.modules() if _CLASS.search(type(m).__name__)]
    if not layers:
        raise IsolationError(
            f"{model.config.model_type} carries a state in layers that packtrain cannot run per segment",
            hint="train it unpacked, or choose a model with attention layers only",
        )
    boundaries = _Boundaries()
    model.register_forward_pre_hook(boundaries.enter, with_kwargs=True)
    model.register_forward_hook(boundaries.leave, always_call=True)
    inner = getattr(model, "base_model", model)
    if inner is not model:  # a loss without logits calls it directly
        inner.register_forward_pre_hook(boundaries.note, with_kwargs=True)
    for layer in layers:
        layer.forward = _per_segment(layer.forward, boundaries)
    setattr(model, _MARK, boundaries)
    return model


def _per_segment(forward: Callable[..., Any], boundaries: _Boundaries) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if any(kwargs.get(name) is not None for name in ("cache", "cache_params", "past_key_values")):
            raise IsolationError(
                "a cache lets the state of one sample reach the next",
                hint="call the model with use_cache=False",
            )
        batch, tokens = hidden.shape[:2]
        lengths = boundaries.of_row(batch * tokens)
        kept = {name: value for name, value in kwargs.items() if name not in (*_DROPPED, "hidden_states")}
        for name, value in kept.items():
            wide = isinstance(value, torch.Tensor) and value.ndim > 1 and tokens in value.shape
            if wide and name != "attention_mask":
                raise IsolationError(
                    f"a state layer takes {name} {list(value.shape)} per token; it cannot run per segment",
                    hint="train this model unpacked",
                )
        kept.pop("attention_mask", None)
        row = hidden.reshape(1, batch * tokens, hidden.shape[-1])
        made = [forward(part, *args[1:], **kept) for part in row.split(list(lengths), dim=1)]
        if isinstance(made[0], tuple):
            joined = torch.cat([part[0] for part in made], dim=1).reshape(batch, tokens, -1)
            return (joined, *made[0][1:])
        return torch.cat(made, dim=1).reshape(batch, tokens, -1)

    return run
