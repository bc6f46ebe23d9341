"""Does this model keep packed samples apart, on this attention backend, with these inputs?

    sdpa, eager     transformers derives a block mask from restarting text positions, but only while
                    there is no attention_mask, no cache, and (mRoPE) a text row in front
    flash, flex     as the family declares
    varlen          torch's variable-length kernel (train.varlen), tower included
    state layers    convolution, SSM and linear attention carry a state across samples: run segment
                    by segment (train.segments) or refused; the start-up proof decides

Three answers: *known* (the family lists the backend), *refused* (`IsolationError` with reason and
fix), *unproven* (nobody has shown either): an unproven setup may start only after `prove_isolation`
has passed on it. Gradient checkpointing changes nothing here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..collate import PackBatch, attention_of, state_layers
from ..collate.model_traits import config_of, family_for, text_config
from ..errors import InputError, IsolationError
from ..families import BACKENDS
from .segments import states_isolated
from .varlen import NO_SDPA, SDPA, VARLEN, check_varlen, kernel_available, varlen_refusal


@dataclass(frozen=True)
class AttentionSetup:
    """A setup that may run packed.

    Attributes:
        model_type: of the model's config.
        backend: attention implementation of the language layers.
        family: name of its family, or None.
        proven: False when the start-up proof must show the isolation first.
        why: one line for the log.
    """

    model_type: str
    backend: str
    family: str | None
    proven: bool
    why: str


def choose_backend(model_or_type: Any, attn: str = "auto", *, dtype: str = "auto") -> str:
    """The attention implementation to load a model with.

    "auto" is varlen where its kernel runs (a GPU, bfloat16 or float16, a family that is known), else
    sdpa, or eager for models without sdpa.

    Args:
        model_or_type: model, config or model_type.
        attn: "auto" or a backend.
        dtype: the model's: "auto" (its config's), "bfloat16", …

    Raises:
        IsolationError: the model cannot run packed, or not on `attn`.
    """
    family = family_for(model_or_type)
    config = config_of(model_or_type)
    if attn == "auto":
        wanted = str(getattr(config, "dtype", None) if dtype == "auto" else dtype).removeprefix("torch.")
        runs = kernel_available() and wanted in ("bfloat16", "float16")
        fits = family is not None and config is not None and varlen_refusal(config) is None
        plain = "eager" if getattr(config, "model_type", model_or_type) in NO_SDPA else "sdpa"
        return VARLEN if runs and fits else plain
    if attn == VARLEN and config is not None:
        check_varlen(config)
    if family is not None and attn in family.refused:
        raise IsolationError(f"{family.name} cannot run packed on {attn}: {family.refused[attn]}", hint=SDPA)
    return attn


def is_installed(backend: str) -> bool:
    """Can transformers load this backend here?"""
    from transformers import utils

    check = {
        "flash_attention_2": utils.is_flash_attn_2_available,
        "flash_attention_3": utils.is_flash_attn_3_available,
    }.get(backend)
    return check is None or bool(check())


def check_attention(model: Any) -> AttentionSetup:
    """Decide for a loaded model.

    Raises:
        IsolationError: packed samples would read each other, with the reason and the fix.
    """
    config = config_of(model)
    if config is None:
        raise InputError("no model to check", hint="pass a loaded transformers model")
    backend = attention_of(model) or "eager"
    states = state_layers(model)
    if states and not states_isolated(model):
        raise IsolationError(
            f"{config.model_type} has layers that carry a state from sample to sample ({', '.join(states)})",
            hint="load it with packtrain.train.load_model, or call packtrain.train.isolate_states(model)",
        )
    for part in (config, text_config(config)):
        if getattr(part, "use_cache", False):
            raise IsolationError(
                f"use_cache is on in the config of {config.model_type}: packed detection is then off",
                hint="call packtrain.train.model.switch_cache_off(model)",
            )
    check_causal(config)
    return known(config, backend)


def check_causal(config: Any) -> None:
    if getattr(text_config(config), "is_causal", True) is False:
        raise IsolationError(f"{config.model_type} is not causal", hint="packtrain trains causal models")


def known(config: Any, backend: str) -> AttentionSetup:
    """What the family of a model says of a backend.

    Raises:
        IsolationError: packed samples would read each other there.
    """
    kind = str(config.model_type)
    family = family_for(config)
    if family is None:
        return AttentionSetup(kind, backend, None, False, f"no family declares {kind}; the proof decides")
    if backend not in BACKENDS:
        return AttentionSetup(kind, backend, family.name, False, f"{backend} is unknown; the proof decides")
    family.allowed_kwargs(backend)  # refuses what the family refuses
    told, why = f"{family.name} on {backend}", "restarting text positions, no mask, no cache"
    if backend == VARLEN:
        check_varlen(config)
        why = "segments from restarting text positions"
    elif not family.isolates_by_positions(backend):
        raise IsolationError(f"{told}: restarting positions do not isolate packed samples there", hint=SDPA)
    return AttentionSetup(kind, backend, family.name, True, f"{told}: {why}")


def check_batch(batch: Mapping[str, Any], model: Any) -> None:
    """Refuse inputs that switch isolation off, and boundaries that differ from ours.

    Args:
        batch: what is about to go into `model(**batch)`; a PackBatch brings the true boundaries.
        model: the model, its config or model_type.

    Raises:
        IsolationError: naming the input and the fix.
    """
    if batch.get("attention_mask") is not None:
        raise IsolationError(
            "the batch holds an attention_mask: even all ones, it makes packed samples read each other",
            hint="remove attention_mask from the batch",
        )
    if batch.get("use_cache") is not False:
        raise IsolationError(
            f"use_cache is {batch.get('use_cache')!r} in the batch: a cache lets samples read each other",
            hint="keep the collator's use_cache=False",
        )
    positions = batch.get("position_ids")
    if positions is None:
        raise IsolationError("the batch holds no position_ids", hint="use PaddingFreeCollator(model)")
    family = family_for(model)
    rows = 1 if family is None else family.packed_position_rows
    shape = tuple(positions.shape)
    mrope = positions.ndim == 3
    if family is not None and (shape[0] != rows or mrope != (rows > 1)):
        needed = "[4,1,T]" if rows > 1 else "[1,T]"
        raise IsolationError(
            f"position_ids have shape {list(shape)}, {family.name} needs {needed}: "
            "without the restarting text row packed samples read each other",
            hint="use PaddingFreeCollator(model) with this model",
        )
    if isinstance(batch, PackBatch) and batch.lengths:
        derived = segments_of(positions[0, 0] if mrope else positions[0])
        if derived != list(batch.lengths):
            raise IsolationError(
                f"position_ids restart after {derived} tokens, the pack's segments are {list(batch.lengths)}",
                hint="hand the collator's batch to the model unchanged",
            )


def segments_of(text_positions: torch.Tensor) -> list[int]:
    """Segment lengths that transformers derives from the text positions of a row [T]."""
    steps = torch.diff(text_positions)
    cuts = (steps != 1).nonzero().flatten().cpu() + 1
    edges = [0, *cuts.tolist(), int(text_positions.shape[0])]
    return [after - before for before, after in itertools.pairwise(edges)]
