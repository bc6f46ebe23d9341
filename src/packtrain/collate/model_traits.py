"""Which boundary arguments a model may get, and which samples may stand in one row.

Boundaries always stand on the `PackBatch` attributes. As model inputs they help on some setups and
break others: Qwen-VL towers take a `cu_seq_lens_q` meant for the text layers as their own, layers
with a state (convolution, SSM, linear attention) need `seq_idx`, sdpa and eager read neither.
The facts per family and backend are declared by the family; this file only applies them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


# --------------------------------------------------------------------------------------------
# Rotary embeddings that change with the longest sample of a row: which samples may stand beside each other.
# --------------------------------------------------------------------------------------------
# Most rotations depend on a token's position alone. Two kinds of transformers look at the largest position of
# the row as well: `longrope` turns every token of a row in which one sample is longer than
# `original_max_position_embeddings` by its long factors, `dynamic` scales with the longest sample from
# `max_position_embeddings` on. A short sample beside such a one would be trained with other rotations than
# alone. Rows that stand on one side of the limit are as their samples alone.
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
