"""What packs cannot keep in a host's trainer, told before anything is planned; and what may leak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..collate.boundaries import attention_of, text_config
from ..data import PackedDataset
from ..errors import ConfigError, IsolationError
from ..train.attention import check_attention
from ..train.loss import shift_labels
from ..train.proof import proof_samples, prove_isolation

__all__ = ["check_isolation", "check_trainer", "prove_packs"]


def check_trainer(trainer: Any, samples_per_step: int | str | None) -> None:
    """Refuse what packs cannot keep, each with its reason."""
    args = trainer.args
    rows = trainer.train_dataset
    if samples_per_step is None and args.per_device_train_batch_size != 1:
        raise ConfigError(
            f"per_device_train_batch_size is {args.per_device_train_batch_size}: a row is one pack",
            hint='set it to 1, or pass samples_per_step="same" to keep the samples of a step',
        )
    if isinstance(samples_per_step, str) and samples_per_step != "same":
        raise ConfigError(f"samples_per_step is {samples_per_step!r}", hint='pass a number or "same"')
    if rows is None or not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise ConfigError(
            f"train_dataset is a {type(rows).__name__} without length or index: it cannot be planned",
            hint="use a map-style dataset",
        )
    strategy = str(getattr(args, "train_sampling_strategy", "random"))
    for name, wrong, why in (
        ("label_smoothing_factor", bool(args.label_smoothing_factor), "its loss is a mean over rows"),
        ("n_gpu", args.n_gpu > 1, "one process would split packs over GPUs; start it with torchrun"),
        ("train_sampling_strategy", strategy not in ("random", "sequential"), "packs have equal lengths"),
        (
            "average_tokens_across_devices",
            args.world_size > 1 and not args.average_tokens_across_devices,
            "ranks hold different numbers of tokens, and the loss would not be the mean over them",
        ),
        ("auto_find_batch_size", bool(args.auto_find_batch_size), "a plan has its row length"),
    ):
        if wrong:
            raise ConfigError(f"{name}={getattr(args, name)} cannot be kept: {why}", hint=f"unset {name}")
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        trainer.compute_loss_func = _token_mean


def check_isolation(bare: Any) -> bool:
    """Refuse a setup that leaks; False: the proof must decide.

    The cache is judged as each batch sets it; the config stays as it is.
    """
    configs = {id(part): part for part in (bare.config, text_config(bare.config))}
    before = [(part, part.use_cache) for part in configs.values() if hasattr(part, "use_cache")]
    try:
        for part, _ in before:
            part.use_cache = False
        setup = check_attention(bare)
    finally:
        for part, value in before:
            part.use_cache = value
    return setup.proven


def prove_packs(bare: Any, data: PackedDataset, convert: Callable[[Any], Any] = dict) -> None:
    """The proof on two packs, for models of no listed family.

    Args:
        convert: member of a pack -> encoded sample.
    """
    packs = [[convert(member) for member in data[position]] for position in range(min(2, len(data)))]
    samples = proof_samples(packs, bare)
    report = prove_isolation(bare, samples, (attention_of(bare) or "eager",), gradients=False)
    if not report.ok:
        raise IsolationError(
            f"packed samples read each other in {bare.config.model_type}, first in {report.first_leak}",
            hint="train it unpacked, or use a listed family (docs/hosts.md)",
        )


def _token_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """For models whose own loss cannot be told the tokens of a step."""
    logits = outputs["logits"].float().reshape(-1, outputs["logits"].shape[-1])
    targets = shift_labels(labels).reshape(-1).to(logits.device)
    total = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return total / torch.as_tensor(count, device=total.device).clamp(min=1)
