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
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..collate import IGNORE
from ..collate.model_traits import text_config
from ..errors import ConfigError, InputError
from .reduction import Reduction

#: float32 logits of one chunk of supervised positions take so much at most: on a card fewer, larger kernels.
_CHUNK_BYTES = {"cpu": 5 * 2**26, "cuda": 2**30}

#: Whether 16-bit matrices multiply onto a float32 one on a card (torch 2.8).
_ADDS_WIDE = torch.version.cuda is not None and "dtype_out" in torch.ops.aten.addmm.overloads()

#: Config values that stand between head and logits; with one of them the logits are the model's own.
_SCALED = (
    *("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"),
    *("logits_soft_cap", "output_logit_soft_cap", "unpadded_vocab_size", "z_loss_coefficient"),
)


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels [..., T] of tokens -> targets [..., T] of positions: position t is to predict token t+1."""
    return functional.pad(labels[..., 1:], (0, 1), value=IGNORE)


def trained_places(targets: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """Where targets [T] are trained, in row order, int64.

    Args:
        count: how many there are, where that is known; then the host need not wait for the device.
    """
    if count is None:
        return (targets != IGNORE).nonzero().flatten()
    return (targets == IGNORE).to(torch.uint8).sort(stable=True).indices[:count]


def rows_at_a_time(vocabulary: int, device: str) -> int:
    """Positions whose logits make one chunk, in steps of 256: of 151,936 tokens 512, on a card 1,536."""
    most = _CHUNK_BYTES.get(device, _CHUNK_BYTES["cpu"])
    return int(max(256, most // (4 * vocabulary) // 256 * 256))


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    chunk: int | None = None,
    count: int | None = None,
) -> torch.Tensor:
    """Sum of the next-token losses of a row, through the linear head.

    Args:
        hidden: [..., T, H], last hidden states.
        weight: [V, H] of the head.
        labels: [..., T] of the tokens, not shifted; -100 is not trained. The first label of every segment
            is -100, so no target crosses a boundary.
        bias: [V] of the head, or None.
        token_weights: [..., T], weight of each label's loss; None: 1.
        chunk: supervised positions whose logits exist at a time (None: `rows_at_a_time`). The result does
            not depend on it beyond rounding.
        count: see `trained_places`.

    Returns:
        float32 scalar (float64 for float64 inputs).
    """
    targets = shift_labels(labels).reshape(-1)
    keep = trained_places(targets, count)
    chunk = chunk or rows_at_a_time(weight.shape[0], weight.device.type)
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
            logits = logits.to(rows.dtype)  # autocast narrows what wide rows give
            note(logits, targets[part])
            losses = _losses_and_slopes(logits, targets[part], wide)
            note(logits, targets[part], losses)
            if token_weights is not None:
                scale = token_weights[part].to(wide)
                losses = losses * scale
                logits.mul_(scale[:, None])
            total += losses.sum()
            if grad_rows is not None:
                grad_rows[part] = logits @ head
            if grad_weight is not None:
                _add_outer(grad_weight, logits, rows[part])
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=wide)
        ctx.save_for_backward(grad_rows, grad_weight, grad_bias)
        ctx.narrow = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale what the forward pass made, in place: a second backward pass is an error of autograd."""
        upstream = grads[0].reshape(1)  # one dimension keeps it wide: 1/N in 16 bit would bend every gradient
        scaled = [
            None if made is None else made.mul_(upstream).to(kind)
            for made, kind in zip(ctx.saved_tensors, ctx.narrow, strict=True)
        ]
        return (*scaled, None, None, None)


def _losses_and_slopes(logits: torch.Tensor, targets: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Losses [K] of a chunk, of the wide type; their slopes take the place of its logits [K,V].

    A card reads the narrow logits once, in one kernel; `log_softmax` of a CPU rounds more than `logsumexp`.
    The target's slope comes from its loss: its probability less 1 would lose what 16 bits of it do not hold.
    """
    if logits.is_cuda:
        logs = torch.log_softmax(logits, dim=-1, dtype=wide)
    else:
        logs = logits.to(wide)
        logs -= torch.logsumexp(logs, dim=-1)[:, None]
    losses = -logs.gather(1, targets[:, None])
    torch.exp(logs, out=logits)
    logits.scatter_(1, targets[:, None], torch.expm1(-losses).to(logits.dtype))
    return losses[:, 0]


def _add_outer(total: torch.Tensor, slopes: torch.Tensor, rows: torch.Tensor) -> None:
    """total += slopes.T @ rows; 16-bit products are added up in the wide type of `total`."""
    if total.dtype is rows.dtype:
        total.addmm_(slopes.T, rows)
    elif total.is_cuda and _ADDS_WIDE:
        torch.addmm(total, slopes.T, rows, out_dtype=total.dtype, out=total)
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
    """The model's output head when logits are exactly `linear(hidden)` and the loss is ours to give.

    None for all others: Qwen2-Audio computes its loss itself, past `loss_function`, and keeps its logits.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    text = text_config(model.config)
    scaled = any(getattr(text, name, None) not in (None, 0, 1) for name in _SCALED)
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)  # seen through its decorators
    ours = hasattr(model, "loss_function") and (code is None or "loss_function" in code.co_names)
    own = type(head) is nn.Linear and "forward" not in vars(head)
    return head if own and not scaled and ours else None


@contextlib.contextmanager
def fused_head(
    model: Any,
    *,
    chunk: int | None = None,
    count: int | None = None,
    labels: torch.Tensor | None = None,
    items: torch.Tensor | float | None = None,
) -> Iterator[None]:
    """Inside, `model(labels=…)` returns the loss *sum* over tokens, and never builds its logits.

    The head itself computes the loss, inside the model's own forward, so that wrappers around the model
    (DDP, FSDP) see an ordinary call. Models without a plain head (`plain_head`) must not be given.

    Args:
        model: the transformers model, not wrapped.
        chunk, count: see `chunked_cross_entropy`.
        labels: those that were counted; others that the model gets (a hook, a prompt) are counted anew.
        items: what the sum is divided by, whether or not the model hands it on to its loss.
    """
    head = plain_head(model)
    if head is None:
        raise ConfigError(f"{type(model).__name__} has no plain linear head", hint="use token_loss_sum")
    row: dict[str, torch.Tensor | None] = {}
    version = _version_of(labels)

    def head_forward(hidden: torch.Tensor) -> torch.Tensor:
        given = row["labels"]
        if given is None:
            return functional.linear(hidden, head.weight, head.bias)
        counted = given is labels and _version_of(given) == version
        total = chunked_cross_entropy(
            hidden, head.weight, given,
            bias=head.bias, token_weights=row["weights"], chunk=chunk, count=count if counted else None,
        )  # fmt: skip
        return total.reshape(1, 1, 1)

    given = model.forward

    @functools.wraps(given)
    def forward(*args: Any, **kwargs: Any) -> Any:  # no hook: some versions of PEFT call it past the module
        row["labels"] = kwargs.get("labels")
        row["weights"] = kwargs.pop("token_weights", None)
        return given(*args, **kwargs)

    def loss_function(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits.sum() if items is None else step_share(logits.sum(), items)

    with (
        _replaced(model, "forward", forward),
        _replaced(head, "forward", head_forward),
        _replaced(model, "_loss_function", loss_function),
    ):
        yield


def _version_of(tensor: torch.Tensor | None) -> int | None:
    """Changes with every write into it; None: nobody counts."""
    return None if tensor is None or tensor.is_inference() else tensor._version


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
    model: Any,
    inputs: Mapping[str, Any],
    *,
    fused: bool = True,
    chunk: int | None = None,
    count: int | None = None,
) -> torch.Tensor:
    """Sum of the token losses of a batch, float32 scalar with gradient.

    Plain heads never build logits; other models build theirs and the sum is taken over them.

    Args:
        model: what is called: the model, or a wrapper (DDP, PEFT) around it.
        inputs: a collated batch with `labels`; `loss_scale`, when present, weights each token.
        fused: False: build the logits in any case.
        chunk, count: see `chunked_cross_entropy`.
    """
    kwargs = dict(inputs)
    weights = kwargs.pop("loss_scale", None)
    bare = bare_model(model)
    if fused and plain_head(bare) is not None:
        if weights is not None:
            kwargs["token_weights"] = weights
        with fused_head(bare, chunk=chunk, count=count, labels=kwargs.get("labels")):
            return first_of(model(**kwargs), "loss")
    labels = kwargs.pop("labels")
    return logits_loss(first_of(model(**kwargs), "logits"), labels, weights, count)


def first_of(outputs: Any, name: str) -> torch.Tensor:
    """A model's loss where it got labels, else its logits; of `return_dict=False` the first of a tuple."""
    if isinstance(outputs, Mapping):
        found: torch.Tensor = outputs[name]
    else:
        found = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, name)
    return found


def logits_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None, count: int | None = None
) -> torch.Tensor:
    """Sum of the token losses from logits [..., T, V]; labels and weights [..., T] of the tokens."""
    targets = shift_labels(labels).reshape(-1).to(logits.device)
    keep = trained_places(targets, count)
    rows, targets = logits.reshape(-1, logits.shape[-1]).index_select(0, keep), targets[keep]
    note(rows.detach(), targets)
    losses = functional.cross_entropy(
        rows if rows.dtype is torch.float64 else rows.float(), targets, reduction="none"
    )
    note(rows.detach(), targets, losses)
    if weights is not None:
        shifted = functional.pad(weights[..., 1:], (0, 1)).reshape(-1).to(losses)
        losses = losses * shifted[keep]
    return losses.sum()


def packed_loss(
    outputs: Any,
    batch: Any,
    reduction: Reduction | str = "token",
    normaliser: torch.Tensor | float | None = None,
    *,
    head: Any = None,
    ranks: int = 1,
    chunk: int | None = None,
) -> torch.Tensor:
    """Loss of a packed row as its share of the step's: for trainers of other hosts.

    Args:
        outputs: what the model returned (`.logits`), or logits [1,T,V]; with `head` hidden states [1,T,H].
        batch: the collated row with `labels` (not shifted), its boundaries and perhaps `loss_scale`.
        reduction: "token", "sample", "sqrt", or a `Reduction` with source weights.
        normaliser: `loss_normaliser` of all rows of the step, summed over ranks; None: of this row alone.
        head: linear layer from hidden states to logits, when those are to be made in chunks only.
        ranks: processes whose gradients are averaged afterwards: each counts that often.
        chunk: see `chunked_cross_entropy`.

    Returns:
        Scalar with gradient; 0 where the step has no supervised token.
    """
    chosen = Reduction(reduction) if isinstance(reduction, str) else reduction
    row, total = chosen.scaled(batch)
    weights = row.get("loss_scale")
    found = getattr(outputs, "logits", outputs)
    if not isinstance(found, torch.Tensor):
        raise InputError(
            f"a loss needs logits or hidden states, not {type(outputs).__name__}",
            hint="pass the model's output, or hidden states with head=",
        )
    if head is None:
        loss = logits_loss(found, row["labels"], weights)
    else:
        loss = chunked_cross_entropy(
            found, head.weight, row["labels"], bias=head.bias, token_weights=weights, chunk=chunk
        )
    return step_share(loss, total if normaliser is None else normaliser, ranks)


def step_share(total: torch.Tensor, normaliser: torch.Tensor | float, ranks: int = 1) -> torch.Tensor:
    """A row's weighted loss sum over the step's normaliser; no weight at all gives 0, never a division."""
    over = torch.as_tensor(normaliser, device=total.device)
    return (total * ranks / torch.where(over > 0, over, torch.ones_like(over))).to(total.dtype)


# Trade-off: these are the module's, so one training loop a process; the figures then reach the caller
# through any wrapper (DDP, FSDP, PEFT) without another output of the model.
_collected: dict[str, list[torch.Tensor]] = {}


@contextlib.contextmanager
def _collect(what: str) -> Iterator[list[torch.Tensor]]:
    before, found = dict(_collected), list[torch.Tensor]()
    _collected[what] = found
    try:
        yield found
    finally:
        _collected.clear()
        _collected.update(before)


def count_correct() -> contextlib.AbstractContextManager[list[torch.Tensor]]:
    """Inside, every loss adds to the list how many of its targets were the likeliest token (0-d int64)."""
    return _collect("hits")


def token_losses() -> contextlib.AbstractContextManager[list[torch.Tensor]]:
    """Inside, every loss adds the loss of its supervised targets, in row order, without weights ([K])."""
    return _collect("losses")


def note(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor | None = None) -> None:
    """logits [K,V], targets [K] without ignored ones, losses [K]; called by the losses themselves.

    Call it once with the logits and without losses, and once with both or the losses alone later.
    """
    if losses is not None and "losses" in _collected:
        _collected["losses"].append(losses.detach())
    if losses is None and "hits" in _collected:
        _collected["hits"].append((logits.argmax(-1) == targets).sum())
