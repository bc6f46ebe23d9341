"""Patches of a Qwen3 under which packed samples read each other, as libraries and users make them.

    with ExitStack() as stack: leak(model, stack)

`LEAKS`: (patch, where the proof finds it, what it calls it). Nothing of pytest: hosts with an environment of
their own run them too.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

__all__ = ["LEAKS", "on_the_object", "plain_causal"]


def plain_causal(
    self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
) -> Any:
    """As acceleration libraries patch an attention: causal over the whole row, whatever the mask says."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
    value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = (part.repeat_interleave(self.num_key_value_groups, 1) for part in (key, value))
    made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return self.o_proj(made.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


def on_the_object(model: Any, stack: ExitStack) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(plain_causal, layer.self_attn)


def on_the_class(model: Any, stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(type(model.model.layers[0].self_attn), "forward", plain_causal))


def mask_ignored(model: Any, stack: ExitStack) -> None:
    def no_mask(*args: Any, **kwargs: Any) -> None:
        return None

    stack.enter_context(mock.patch("transformers.models.qwen3.modeling_qwen3.create_causal_mask", no_mask))


def registered(model: Any, stack: ExitStack) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def causal_only(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        groups = module.num_key_value_groups
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return made.transpose(1, 2).contiguous(), None

    stack.enter_context(mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {"sdpa": causal_only}))


def inside_torch(model: Any, stack: ExitStack) -> None:
    inner = functional.scaled_dot_product_attention

    def fast_sdpa(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        kept = {name: v for name, v in kwargs.items() if name in ("scale", "enable_gqa")}
        return inner(query, key, value, is_causal=True, **kept)

    stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", fast_sdpa))


def cache_forced(model: Any, stack: ExitStack) -> None:
    forward = model.model.forward

    @functools.wraps(forward)
    def with_cache(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**kwargs, "use_cache": True})

    model.model.forward = with_cache


def positions_ignored(model: Any, stack: ExitStack) -> None:
    forward = model.model.forward

    def without_positions(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.model.forward = without_positions


def pooled(model: Any, stack: ExitStack) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def with_mean(hidden: Any) -> Any:
        return forward(hidden) + 1e-3 * hidden.mean(1, keepdim=True)

    mlp.forward = with_mean


def hooked(model: Any, stack: ExitStack) -> None:
    def ones(module: Any, args: Any, kwargs: Any) -> Any:
        row = kwargs.get("input_ids", args[0] if args else None)
        return args, {**kwargs, "attention_mask": torch.ones_like(row)}

    model.register_forward_pre_hook(ones, with_kwargs=True)


ATTENTION = "first in model.layers.0.self_attn"
LEAKS: list[tuple[Callable[..., None], str, str]] = [
    (on_the_object, ATTENTION, "forward of Qwen3Attention is plain_causal in"),
    (on_the_class, ATTENTION, "forward of Qwen3Attention is plain_causal in"),
    (mask_ignored, ATTENTION, "create_causal_mask is mask_ignored.<locals>.no_mask in"),
    (registered, ATTENTION, "the attention function is registered.<locals>.causal_only in"),
    (inside_torch, ATTENTION, "scaled_dot_product_attention is inside_torch.<locals>.fast_sdpa in"),
    (cache_forced, ATTENTION, "forward of Qwen3Model is cache_forced.<locals>.with_cache in"),
    (
        positions_ignored,
        ATTENTION,
        "forward of Qwen3Model is positions_ignored.<locals>.without_positions in",
    ),
    (pooled, "first in model.layers.1.mlp", "forward of Qwen3MLP is pooled.<locals>.with_mean in"),
    (hooked, ATTENTION, "a forward hook is hooked.<locals>.ones in"),
]
