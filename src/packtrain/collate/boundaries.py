"""Which boundary arguments a model may get.

Boundaries always stand on the `PackBatch` attributes. As model inputs they help on some setups and
break others: Qwen-VL towers take a `cu_seq_lens_q` meant for the text layers as their own, layers
with a state (convolution, SSM, linear attention) need `seq_idx`, sdpa and eager read neither.
The facts per family and backend are declared by the family; this file only applies them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..errors import InputError, IsolationError, UnknownNameError
from ..families import BACKENDS, FLASH_KWARGS, STATEFUL_MODEL_TYPES, Family, family_of

BOUNDARY_KWARGS = (*FLASH_KWARGS, "seq_idx")

#: `config.layer_types` whose layers carry a state along the row.
_STATE_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})

_STATE_CLASS = re.compile(r"Mamba|SSM|DeltaNet|LinearAttention|Rwkv|RecurrentBlock|ShortConv|RgLru|Rglru")


def config_of(model: Any) -> Any | None:
    """The config of a model, of a wrapped model, or the config itself; None for a name or None."""
    if model is None or isinstance(model, str):
        return None
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    config = getattr(model, "config", model)
    if not hasattr(config, "model_type"):
        raise InputError(
            f"model is a {type(model).__name__} without a config", hint="pass a transformers model or config"
        )
    return config


def text_config(config: Any) -> Any:
    """The config of the language layers."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def attention_of(model: Any) -> str | None:
    """Attention implementation of the language layers, or None when the model is not known."""
    config = config_of(model)
    chosen = None if config is None else getattr(text_config(config), "_attn_implementation", None)
    return None if chosen is None else str(chosen)


def family_for(model: Any) -> Family | None:
    """The family of a model, config or model_type name; None when no family may claim it."""
    name = model if isinstance(model, str) else getattr(config_of(model), "model_type", None)
    if name is None:
        return None
    try:
        return family_of(model_type=name)
    except (UnknownNameError, IsolationError):
        return None


def state_layers(model: Any) -> list[str]:
    """Kinds of layers that carry a state from token to token; empty for pure attention."""
    config = config_of(model)
    if config is None:
        return [model] if isinstance(model, str) and model in STATEFUL_MODEL_TYPES else []
    text = text_config(config)
    found = sorted(set(getattr(text, "layer_types", None) or ()) & _STATE_LAYER_TYPES)
    if not found and hasattr(model, "modules"):
        classes = {type(module).__name__ for module in model.modules()}
        found = sorted(name for name in classes if _STATE_CLASS.search(name))
    if not found and {config.model_type, text.model_type} & set(STATEFUL_MODEL_TYPES):
        found = [str(text.model_type)]
    return found


def choose_kwargs(wanted: str | Iterable[str], model: Any) -> tuple[str, ...]:
    """The boundary arguments to put into the batch.

    Args:
        wanted: "auto", or the names to give.
        model: model, config, model_type or None (every flash argument is then given).

    Raises:
        IsolationError: the model cannot run packed on its backend, or a wanted name breaks it there.
    """
    backend = attention_of(model)
    forbidden = _forbidden(family_for(model), backend)
    if wanted == "auto":
        names = [*FLASH_KWARGS, *(["seq_idx"] if state_layers(model) else [])]
        return tuple(name for name in names if name not in forbidden)
    if not isinstance(wanted, Iterable):
        raise InputError(
            f"boundary_kwargs is {wanted!r}", hint=f'"auto", or names of {", ".join(BOUNDARY_KWARGS)}'
        )
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in BOUNDARY_KWARGS:
            raise UnknownNameError("boundary kwarg", name, ["auto", *BOUNDARY_KWARGS])
        if name in forbidden:
            raise IsolationError(
                f"{name} cannot be given to this model on {backend}",
                hint='leave boundary_kwargs="auto": restarting position_ids carry the boundaries there',
            )
    return tuple(names)


def _forbidden(family: Family | None, backend: str | None) -> frozenset[str]:
    if family is None or backend is None:
        return frozenset()
    if backend not in BACKENDS:  # a registered function or a hub kernel: positions are what it must honour
        return frozenset(FLASH_KWARGS)
    return frozenset(family.forbidden_kwargs(backend))
