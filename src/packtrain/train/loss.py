"""Token losses without the logits of a whole row.

The logits of a 4 k row over 151,936 tokens take 2.5 GB in float32, their gradient and the softmax as
much again. `chunked_cross_entropy` works through the supervised positions in chunks: logits of a
chunk, its loss, its gradient, then the chunk is forgotten. Unsupervised positions cost nothing.

Loss sums are exact sums over tokens; whoever averages divides by the number of supervised tokens of
the whole optimizer step, over micro-batches and ranks. Then the gradient does not depend on how the
samples were packed. No supervised token gives a sum of exactly 0, with a gradient of zeros.

Trade-off: gradients are computed in the forward pass (no logits are recomputed), so a gradient of
the head's weight, one more tensor of its size, lives until the backward pass takes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..collate import IGNORE
from ..collate.boundaries import text_config
from ..errors import ConfigError

__all__ = [
    "CHUNK",
    "bare_model",
    "chunked_cross_entropy",
    "count_correct",
    "fused_head",
    "plain_head",
    "shift_labels",
    "token_loss_sum",
]

#: Supervised positions per chunk: 512 x 151,936 float32 logits take 311 MB.
CHUNK = 512

#: Config values that stand between head and logits; with one of them the logits are the model's own.
_SCALED = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)


#: Where `count_correct` collects; None: nobody counts.
_counted: list[torch.Tensor] | None = None


@contextlib.contextmanager
def count_correct() -> Iterator[list[torch.Tensor]]:
    """Inside, every loss adds to the list how many of its targets were the likeliest token (0-d int64).

    Not thread-safe: one training loop a process.
    """
    global _counted
    before, _counted = _counted, []
    try:
        yield _counted
    finally:
        _counted = before


def _count(logits: torch.Tensor, targets: torch.Tensor) -> None:
    """logits [K, V], targets [K]; ignored targets are never hit."""
    if _counted is not None:
        _counted.append((logits.argmax(-1) == targets).sum())


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels [..., T] of tokens -> targets [..., T] of positions: position t is to predict token t+1."""
    return functional.pad(labels[..., 1:], (0, 1), value=IGNORE)


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Sum of the next-token losses of a row, through the linear head.

    Args:
        hidden: [..., T, H], last hidden states.
        weight: [V, H] of the head.
        labels: [..., T] of the tokens, not shifted; -100 is not trained. The first label of every segment
            is -100, so no target crosses a boundary.
        bias: [V] of the head, or None.
        token_weights: [..., T], weight of each label's loss; None: 1.
        chunk: supervised positions whose logits exist at a time. The result does not depend on it
            beyond rounding.

    Returns:
        float32 scalar (float64 for float64 inputs).
    """
    targets = shift_labels(labels).reshape(-1)
    keep = (targets != IGNORE).nonzero().flatten()
    rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, keep.to(hidden.device))
    weights = None
    if token_weights is not None:
        shifted = functional.pad(token_weights[..., 1:], (0, 1)).reshape(-1)
        weights = shifted.index_select(0, keep.to(shifted.device))
    total: torch.Tensor = _ChunkedLoss.apply(
        rows, weight, bias, targets.index_select(0, keep).to(hidden.device), weights, chunk
    )
    return total


class _ChunkedLoss(torch.autograd.Function):  # type: ignore[misc]
    """Sum over rows of (logsumexp - target logit), gradients made on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        token_weights: torch.Tensor | None,
        chunk: int,
    ) -> torch.Tensor:
        wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
        head = weight.to(rows.dtype)  # under autocast the weight is wider than the hidden states
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_rows = torch.zeros_like(rows) if needs_rows else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias and bias is not None else None
        total = torch.zeros((), dtype=wide, device=rows.device)
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = functional.linear(rows[part], head, None if bias is None else bias.to(rows.dtype))
            _count(logits, targets[part])
            loss, slopes = _chunk_loss(logits.to(wide), targets[part], token_weights, part)
            total += loss
            if grad_rows is not None:
                grad_rows[part] = slopes.to(rows.dtype) @ head
            if grad_weight is not None:
                _add_outer(grad_weight, slopes.to(rows.dtype), rows[part])
            if grad_bias is not None:
                grad_bias += slopes.sum(0)
        ctx.save_for_backward(grad_rows, grad_weight, grad_bias)
        ctx.narrow = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale what the forward pass made, in place: a second backward pass is an error of autograd."""
        (upstream,) = grads
        scaled = [
            None if made is None else made.mul_(upstream.to(made.dtype)).to(kind)
            for made, kind in zip(ctx.saved_tensors, ctx.narrow, strict=True)
        ]
        return (*scaled, None, None, None)


def _chunk_loss(
    logits: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor | None, part: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss sum of a chunk and its slope per logit; the slopes take the place of the logits."""
    normaliser = torch.logsumexp(logits, dim=-1)
    losses = normaliser - logits.gather(1, targets[:, None])[:, 0]
    slopes = logits.sub_(normaliser[:, None]).exp_()
    slopes.scatter_add_(1, targets[:, None], slopes.new_full((targets.shape[0], 1), -1.0))
    if token_weights is not None:
        scale = token_weights[part].to(slopes.dtype)
        return (losses * scale).sum(), slopes.mul_(scale[:, None])
    return losses.sum(), slopes


def _add_outer(total: torch.Tensor, slopes: torch.Tensor, rows: torch.Tensor) -> None:
    """total += slopes.T @ rows; 16-bit products are added up in the wide type of `total`."""
    if total.dtype is rows.dtype:
        total.addmm_(slopes.T, rows)
    else:
        total += slopes.T @ rows


def bare_model(model: Any) -> Any:
    """The transformers model inside wrappers (DDP, PEFT)."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        else:
            return model


def plain_head(model: Any) -> nn.Linear | None:
    """The model's output head when logits are exactly `linear(hidden)`, else None."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    text = text_config(model.config)
    scaled = any(getattr(text, name, None) not in (None, 1, 1.0) for name in _SCALED)
    return head if type(head) is nn.Linear and not scaled and hasattr(model, "loss_function") else None


@contextlib.contextmanager
def fused_head(model: Any, *, chunk: int = CHUNK) -> Iterator[None]:
    """Inside, `model(labels=…)` returns the loss *sum* over tokens, and never builds its logits.

    The head itself computes the loss, inside the model's own forward, so that wrappers around the model
    (DDP, FSDP) see an ordinary call. Models without a plain head (`plain_head`) must not be given.

    Args:
        model: the transformers model, not wrapped.
        chunk: see `chunked_cross_entropy`.
    """
    head = plain_head(model)
    if head is None:
        raise ConfigError(f"{type(model).__name__} has no plain linear head", hint="use token_loss_sum")
    row: dict[str, torch.Tensor | None] = {}

    def head_forward(hidden: torch.Tensor) -> torch.Tensor:
        labels = row["labels"]
        if labels is None:
            return functional.linear(hidden, head.weight, head.bias)
        total = chunked_cross_entropy(
            hidden, head.weight, labels, bias=head.bias, token_weights=row["weights"], chunk=chunk
        )
        return total.reshape(1, 1, 1)

    def take(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        row["labels"] = kwargs.get("labels")
        row["weights"] = kwargs.pop("token_weights", None)
        return args, kwargs

    def loss_function(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits.sum()

    with contextlib.ExitStack() as stack:
        handle = model.register_forward_pre_hook(take, with_kwargs=True)
        stack.callback(handle.remove)
        stack.enter_context(_replaced(head, "forward", head_forward))
        stack.enter_context(_replaced(model, "_loss_function", loss_function))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An instance attribute for the time of the block; what was there before comes back."""
    before = owner.__dict__.get(name)
    had = name in owner.__dict__
    owner.__dict__[name] = value
    try:
        yield
    finally:
        if had:
            owner.__dict__[name] = before
        else:
            del owner.__dict__[name]


def token_loss_sum(
    model: Any, inputs: Mapping[str, Any], *, fused: bool = True, chunk: int = CHUNK
) -> torch.Tensor:
    """Sum of the token losses of a batch, float32 scalar with gradient.

    Plain heads never build logits; other models build theirs and the sum is taken over them.

    Args:
        model: what is called: the model, or a wrapper (DDP, PEFT) around it.
        inputs: a collated batch with `labels`; `loss_scale`, when present, weights each token.
        fused: False: build the logits in any case.
        chunk: see `chunked_cross_entropy`.
    """
    kwargs = dict(inputs)
    weights = kwargs.pop("loss_scale", None)
    bare = bare_model(model)
    if fused and plain_head(bare) is not None:
        if weights is not None:
            kwargs["token_weights"] = weights
        with fused_head(bare, chunk=chunk):
            total: torch.Tensor = model(**kwargs).loss
        return total
    labels = kwargs.pop("labels")
    logits = model(**kwargs).logits
    flat = logits.reshape(-1, logits.shape[-1]).float()
    targets = shift_labels(labels).reshape(-1).to(flat.device)
    _count(flat.detach(), targets)
    losses = functional.cross_entropy(flat, targets, ignore_index=IGNORE, reduction="none")
    if weights is not None:
        losses = losses * functional.pad(weights[..., 1:], (0, 1)).reshape(-1).to(losses)
    return losses.sum()
