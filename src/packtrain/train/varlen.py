"""Variable-length attention behind transformers' interface: `attn_implementation="varlen"`.

    register_varlen_attention()          once; then from_pretrained(..., attn_implementation="varlen")
    use_varlen(model)                    a loaded model, its vision tower included

No flash-attn is needed: the kernel is torch's own, and where it cannot run every
segment is computed by itself, so a CPU proves the same isolation. Where the boundaries come from:

    causal layers    `cu_seq_lens_q`, else `pack_cu` / `pack_max`, else the restarting text positions
                     that transformers hands to its attention; none of them: refused
    vision towers    the offsets of the tower itself; text boundaries never apply to it
    other encoders   (audio, SigLIP) transformers' own sdpa with its own mask

Boundaries are read from the positions themselves, so neither an all-ones mask nor a cache object
switches isolation off here. Refused, since the kernel has no such thing: score caps, attention
sinks, position biases, dropout, chunked or bidirectional text masks, padded rows, decoding.

A tower computes image by image unless its attention name contains "flash"; transformers' loader in
turn takes such a name for a hub kernel. `use_varlen` therefore names the tower's config directly.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch
from torch.nn import functional

from ..collate.model_traits import text_config
from ..collate.pack_batch import on_host, to_device
from ..errors import IsolationError, counted, optional
from .segments import Segments, of_offsets, of_positions

logger = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------------
# One attention over segments: torch's variable-length kernel, or every segment by itself
# --------------------------------------------------------------------------------------------
#     kernel        CUDA (8.0 and later), bfloat16 or float16, head size a multiple of 8 up to 256:
#                   `torch.nn.attention.varlen`, one launch, no mask, work of sum(l^2)
#     per segment   everything else (CPU, float32, float64): scaled_dot_product_attention once for each
#                   segment. Exact and differentiable anywhere; slow for many segments on a GPU
#
# The kernel's signature differs between torch versions (2.11: grouped heads without a flag; 2.13 asks
# for `enable_gqa`); it is read from the function, not guessed from the version.
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    *,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention inside every segment.

    Args:
        query: [T, heads, size].
        key: [T, kv heads, size].
        value: [T, kv heads, value size].
        segments: of the T tokens.
        causal: a token sees itself and what is before it; else its whole segment.
        scale: of the scores; None: 1 / sqrt(size).
        window: a token sees this many tokens, itself included (causal only).

    Returns:
        [T, heads, value size].
    """
    window = None if window is None or window >= segments.longest else window
    if kernel_takes(query, value):
        return kernel(
            query, key, value, segments.cu, segments.longest, causal=causal, scale=scale, window=window
        )
    if query.is_cuda:
        _tell_once(str(query.dtype), int(query.shape[-1]))
    rows = (tensor.split([n for n in segments.lengths if n]) for tensor in (query, key, value))
    return torch.cat(
        [_alone(q, k, v, causal=causal, scale=scale, window=window) for q, k, v in zip(*rows, strict=True)]
    )


#: torch's function, whether it has `enable_gqa`, and whether a GPU here runs it; read once.
_FUNCTION: Any = None
_HAS_GQA = False
_AVAILABLE: bool | None = None


def kernel_available() -> bool:
    """Has this torch a variable-length kernel, and this machine a GPU that runs it?"""
    global _FUNCTION, _HAS_GQA, _AVAILABLE
    if _AVAILABLE is None:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            names: Any = ()
        else:
            names = inspect.signature(varlen_attn).parameters
            _FUNCTION, _HAS_GQA = varlen_attn, "enable_gqa" in names
        known = "window_size" in names and "scale" in names
        _AVAILABLE = known and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return _AVAILABLE


def kernel_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Will `attend` use the kernel for these tensors?"""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _HALF
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= _LARGEST_HEAD
        and kernel_available()
    )


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu: torch.Tensor,
    longest: int,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """torch's kernel for segments of offsets `cu` int32 [segments + 1], none longer than `longest`."""
    left = -1 if window is None else window - 1
    more = {"enable_gqa": True} if _HAS_GQA and query.shape[1] != key.shape[1] else {}
    rows = (query, key, value, cu, cu, longest, longest)
    size = (left, 0) if causal else (-1, -1)
    out: torch.Tensor = _FUNCTION(*rows, scale=scale, window_size=size, **more)
    return out


def _alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """One segment [l, heads, size], as torch's scaled_dot_product_attention computes it."""
    length = query.shape[0]
    mask = None
    if causal and window is not None and length > window:
        places = torch.arange(length, device=query.device)
        gap = places[:, None] - places[None, :]
        mask = (gap >= 0) & (gap < window)
    q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
    made = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None and length > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return made[0].transpose(0, 1)


@functools.lru_cache(maxsize=8)
def _tell_once(dtype: str, size: int) -> None:
    logger.warning("varlen runs segment by segment here: no kernel for %s with heads of %d", dtype, size)


# --------------------------------------------------------------------------------------------
# Variable-length attention behind transformers' interface: `attn_implementation="varlen"`
# --------------------------------------------------------------------------------------------
#: Attention name of the language layers.
VARLEN = "varlen"

#: Attention name of a vision tower that hands over its own offsets.
TOWER = "packtrain_flash_varlen"

SDPA = "use model.attn: sdpa"

#: Models that transformers offers no sdpa for (attention sinks): eager is their plain backend.
NO_SDPA = ("gpt_oss", "gpt_oss_text")


def register_varlen_attention() -> str:
    """Make "varlen" known to transformers; returns the name. Calling it again changes nothing."""
    optional("transformers", "transformers", "train")
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (VARLEN, TOWER):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, _mask)
    _wait_for_nothing()
    return VARLEN


def _wait_for_nothing() -> None:
    """transformers looks for samples in the positions of every step: here it looks at them on the host.

    What it finds is the same; without this the host waits for all that the device has yet to do.
    """
    from transformers import masking_utils

    look = getattr(masking_utils, "find_packed_sequence_indices", None)
    if look is None or hasattr(look, "__wrapped__"):
        return

    @functools.wraps(look)
    def on_the_host(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host = None if torch.compiler.is_compiling() else on_host(position_ids)
        if host is None:
            return look(position_ids, *args, **kwargs)
        found = look(host, *args, **kwargs)
        return None if found is None else to_device(found, position_ids.device)

    masking_utils.find_packed_sequence_indices = on_the_host


def varlen_refusal(config: Any) -> str | None:
    """Why the language layers of this config cannot run on varlen; None when they can."""
    text = text_config(config)
    if getattr(text, "attn_logit_softcapping", None):
        return f"its attention caps scores (attn_logit_softcapping {text.attn_logit_softcapping})"
    if text.model_type in NO_SDPA:
        return "its attention has sinks"
    kinds = getattr(text, "layer_types", None) or ()
    if getattr(text, "attention_chunk_size", None) or "chunked_attention" in kinds:
        return "its layers attend in fixed chunks"
    dropout = getattr(text, "attention_dropout", 0.0) or 0.0
    if dropout:
        return f"attention_dropout is {dropout}, which the kernel does not have"
    if config is not text and config.model_type in _BIDIRECTIONAL:
        return "the tokens of an image see each other in both directions"
    return None


def check_varlen(config: Any) -> None:
    """Refuse a model whose language layers cannot run on varlen, with the reason."""
    reason = varlen_refusal(config)
    if reason is not None:
        kind = str(config.model_type)
        hint = "use model.attn: eager" if kind in NO_SDPA else SDPA
        raise IsolationError(f"{kind} cannot run on varlen: {reason}", hint=hint)


#: Multimodal models whose text mask is bidirectional inside an image.
_BIDIRECTIONAL = ("gemma3", "gemma3n", "gemma4", "paligemma", "colpali", "emu3", "chameleon")


def use_varlen(model: Any) -> Any:
    """Switch a loaded transformers model to varlen: language layers, and towers with own offsets.

    Other encoders keep the implementation they have (sdpa instead of "varlen").

    Raises:
        IsolationError: the model cannot run on varlen, with the reason.
    """
    register_varlen_attention()
    check_varlen(model.config)
    text = text_config(model.config)
    for config in (model.config, text):
        config._attn_implementation_internal = VARLEN
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or config is text or config is model.config:
            continue
        if has_offsets(module):
            config._attn_implementation_internal = TOWER
        elif getattr(config, "_attn_implementation", None) == VARLEN:
            config._attn_implementation_internal = "sdpa"
    return model


def has_offsets(module: Any) -> bool:
    """Is this attention of a tower: not causal, with offsets of its own?"""
    return (
        getattr(module, "is_causal", True) is False
        and "cu_seqlens" in inspect.signature(type(module).forward).parameters
    )


#: Attention outside of the graphs of compiled layers; set by `compiles`.
_outside: Any = None


def compiles() -> None:
    """Layers will be compiled: attention is part of their graphs where the kernel runs, else outside."""
    global _outside
    if _outside is None:
        kernel_available()  # what a graph asks is known before
        _outside = torch.compiler.disable(_attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, heads, T, size] -> ([B, T, heads, size], None).

    In the graph of a compiled layer the boundaries are those that were read before the layers ran: nothing is
    copied to the host (`compiled`). A model that its owner compiled as a whole breaks its graphs here.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    own, traced = kwargs.get("cu_seq_lens_q"), _outside is not None and torch.compiler.is_compiling()
    # `compiled` hands both down where the boundaries cover the row, or neither
    handed = kwargs.get("pack_cu") is not None and kwargs.get("pack_max") is not None
    if traced and (not causal or own is not None or not handed or not kernel_takes(query, value)):
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return _outside(module, query, key, value, attention_mask, **given)  # type: ignore[no-any-return]
    if not causal and own is None:  # an encoder, or a tower that calls image by image
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # transformers' sdpa, without the text boundaries that a tower is handed too
        kept = {name: kwargs[name] for name in ("position_bias", "softcap") if kwargs.get(name) is not None}
        kept |= {"dropout": dropout, "scaling": scaling, "is_causal": False}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kept)[0], None
    _refuse_extras(kwargs, attention_mask, dropout if module.training else 0.0)
    batch, heads, length, _ = query.shape
    if key.shape[2] != length:
        raise IsolationError(
            f"varlen got {length} queries and {key.shape[2]} keys: it trains packed rows, it does not decode",
            hint="model.set_attn_implementation('sdpa') before generating",
        )
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else _window_of(module)
    window = window if causal else None
    q, k, v = (
        tensor.transpose(1, 2).reshape(batch * length, *tensor.shape[1::2]) for tensor in (query, key, value)
    )
    if traced:
        cu, longest = kwargs["pack_cu"], kwargs["pack_max"]
        out = kernel(q, k, v, cu, longest, causal=True, scale=scaling, window=window)
        return out.view(batch, length, heads, -1), None
    segments = of_offsets(own) if own is not None else _boundaries(kwargs, batch, length)
    if segments.tokens != batch * length:
        raise IsolationError(
            f"the boundaries cover {segments.tokens} tokens, the row has {batch * length}",
            hint="give the boundaries of this row, a pad tail included",
        )
    out = attend(q, k, v, segments, causal=causal, scale=scaling, window=window)
    return out.view(batch, length, heads, -1), None


def _window_of(module: torch.nn.Module) -> int | None:
    window = getattr(module, "sliding_window", None)
    return window if isinstance(window, int) and not isinstance(window, bool) else None


def _boundaries(kwargs: dict[str, Any], batch: int, length: int) -> Segments:
    """Of a causal layer, from the batch's own offsets or from restarting positions."""
    if kwargs.get("pack_cu") is not None:
        return of_offsets(kwargs["pack_cu"])
    positions = kwargs.get("position_ids")
    if positions is None:
        raise IsolationError(
            "no boundaries reach the attention layers: neither text positions nor pack_cu",
            hint="give restarting position_ids (mRoPE models: [4,1,T], the text row first), or "
            "use model.attn: sdpa where the layers pass no positions on",
        )
    if positions.ndim == 2 and positions.shape[0] == 1 and batch > 1:
        positions = positions.expand(batch, -1)
    if positions.shape[-1] != length:
        raise IsolationError(
            f"position_ids have {counted(positions.shape[-1], 'entries')}, the row has {length} tokens",
            hint="give one position per token",
        )
    return of_positions(positions)


def _refuse_extras(kwargs: dict[str, Any], mask: Any, dropout: float) -> None:
    reason = None
    if kwargs.get("softcap") is not None:
        reason = "its attention caps scores (softcap)"
    elif kwargs.get("s_aux") is not None:
        reason = "its attention has sinks"
    elif kwargs.get("position_bias") is not None:
        reason = "its attention adds a position bias"
    elif mask is not None:
        reason = "an attention mask was built or given"
    elif dropout:
        reason = f"attention dropout is {dropout}"
    if reason is not None:
        raise IsolationError(f"this model cannot run on varlen: {reason}", hint=SDPA)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask interface: none for causal layers, sdpa's for encoders; others are refused."""
    from transformers.masking_utils import sdpa_mask

    if "allow_is_bidirectional_skip" in kwargs:
        made: torch.Tensor | None = sdpa_mask(*args, **kwargs)
        return made
    padding = kwargs.get("attention_mask")
    if padding is not None and not bool(padding.all()):
        raise IsolationError(
            "the row is padded (attention_mask has zeros): varlen reads boundaries from positions only",
            hint="pack with PaddingFreeCollator, which gives no attention_mask, or use sdpa",
        )
    size, config = kwargs.get("local_size"), kwargs.get("config")
    chunks = size is not None and size != getattr(config, "sliding_window", None)
    if chunks or _looks_ahead(kwargs):
        what = "attend in fixed chunks" if chunks else "run a text mask that looks ahead"
        raise IsolationError(f"varlen cannot {what}", hint=SDPA)
    return None


def _looks_ahead(kwargs: dict[str, Any]) -> bool:
    """Does any token see the next one? (Overlays for images and prefixes do.)"""
    length = int(kwargs.get("q_length") or 0)
    if length < 2 or kwargs.get("kv_length", length) != length:
        return False
    if _is_causal(kwargs["mask_function"]):
        return False
    device = kwargs.get("device")
    here = torch.arange(length - 1, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    sees = kwargs["mask_function"](zero, zero, here, here + 1)
    return bool(sees.any()) if isinstance(sees, torch.Tensor) else bool(sees)


def _is_causal(function: Any) -> bool:
    """Is this transformers' causal mask, or one that others only narrow? Nothing is computed for it.

    Newer versions count from the start of each sample: causal too, beside the mask that keeps samples apart.
    """
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return True
    if not _made_by("and_masks", function):
        return False
    parts = inspect.getclosurevars(function).nonlocals["mask_functions"]
    if any(_made_by("packed_sequence_mask_function", part) for part in parts):
        parts = [
            inspect.getclosurevars(part).nonlocals["mask_function"]
            if _made_by("remap_positions_for_packed_sequence", part)
            else part
            for part in parts
        ]
    return any(map(_is_causal, parts))


def _made_by(name: str, function: Any) -> bool:
    """Did this function of transformers' `masking_utils` return it?"""
    from transformers import masking_utils

    maker = getattr(masking_utils, name, None)
    return maker is not None and getattr(function, "__code__", None) in maker.__code__.co_consts
