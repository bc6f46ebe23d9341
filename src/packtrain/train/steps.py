"""Optimizer steps of a run: how a configuration asks for them, and what packing does to them, said aloud.

Steps of packs (the default): a step is world_size * accumulation packs, and holds as many samples as they
do. Steps of samples (`training.samples_per_step`): the plan is made step by step, accumulation follows
from it, and training equals the unpacked run with that batch. No torch here.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ..errors import ConfigError, InputError, counted
from ..planning.align import AlignedPlan
from ..planning.balance import Balance
from ..planning.epoch_order import EpochOrder
from ..planning.ledger import read_skip_file
from ..planning.packplan import PackPlan
from .config import RunConfig

logger = logging.getLogger(__name__)

#: Samples per step of the first so many packs of an epoch are looked at.
_PLACES = 1 << 20


def step_plan_options(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Keyword arguments of `packtrain.plan` that the training samples get besides the usual ones."""
    training = config.training
    made: dict[str, Any] = {}
    if config.data.skip_samples is not None:
        made["skip"] = skipped_samples(config)
    if training.samples_per_step is not None:
        product = training.per_device_train_batch_size * training.gradient_accumulation_steps
        made["samples_per_step"] = training.samples_per_step
        made["packs_multiple"] = world_size * product
        made["seed"] = training.seed
        made["last_step"] = "drop" if training.dataloader_drop_last else "keep"
    return made


def skipped_samples(config: RunConfig) -> tuple[int, ...]:
    """Ids of the samples that the configuration leaves out; empty without `data.skip_samples`.

    Raises:
        ConfigError: the file cannot be read, or names none.
    """
    path = config.data.skip_samples
    if path is None:
        return ()
    try:
        ids = read_skip_file(path)
    except InputError as error:
        raise ConfigError(
            f"training.skip_samples: {error.message}", hint=error.hint or "one id a line, or a JSON list"
        ) from None
    if not ids:
        raise ConfigError(f"training.skip_samples: {path} names no sample", hint="remove the key")
    return ids


def accumulation_of(config: RunConfig, plan: PackPlan, world_size: int) -> int:
    """Micro steps of an optimizer step: from the plan where it was made by steps, else from the file."""
    if plan.spec.samples_per_step is None:
        return config.accumulation(world_size)
    return plan.align(world_size).block // world_size


def balance_of(config: RunConfig, accumulation: int, sync: str | None = None) -> Balance | None:
    """The sampler's balance. Where `step` has nothing to rearrange: None.

    Data-parallel ranks of the Trainer meet once an optimizer step, so their step totals are evened out.
    Sharded ones (fsdp, deepspeed) gather weights in every micro step, so every micro step is.

    Args:
        sync: None: as these two say.
    """
    mode = config.training.balance
    if mode is None or (mode == "step" and accumulation == 1):
        return None
    sharded = any(config.training.trainer.get(key) for key in ("fsdp", "fsdp_config", "deepspeed"))
    sync = sync or ("step" if mode == "step" and not sharded else "micro")
    return Balance(grad_accum=accumulation, mode=mode, sync=sync)


def announce_steps(aligned: AlignedPlan, accumulation: int, seed: int, *, packing: bool = True) -> None:
    """Log `_step_lines`; as a warning where packing changed how many samples a step holds."""
    by_packs = packing and aligned.plan.spec.samples_per_step is None
    changed = by_packs and len(aligned.plan.indices) > len(aligned.plan)
    for line in _step_lines(aligned, accumulation, seed, packing):
        logger.log(logging.WARNING if changed else logging.INFO, "%s", line)


def _step_lines(aligned: AlignedPlan, accumulation: int, seed: int, packing: bool) -> list[str]:
    """What packing does to the optimizer steps of an epoch, one fact a line."""
    plan = aligned.plan
    steps = -(-aligned.steps // accumulation)
    if plan.spec.samples_per_step is not None:
        lines = [
            f"steps of samples: an epoch has {counted(steps, 'steps')} of "
            f"{counted(plan.spec.samples_per_step, 'samples')}, "
            f"{counted(aligned.block, 'packs')} on "
            f"{counted(aligned.world_size, 'ranks')} ({counted(accumulation, 'micro steps')})"
        ]
        rest = len(plan.indices) % plan.spec.samples_per_step
        if rest and not aligned.drop_last:
            lines.append(f"the last step of every epoch holds {counted(rest, 'samples')}")
        if len(fillers := aligned.fillers):
            lines.append(f"{len(fillers):,} places are fillers: one untrained token each")
        return lines
    width = aligned.world_size * accumulation
    held = _samples(aligned, accumulation, seed)
    holds = f"a step holds {held.mean():.1f} samples (sd {held.std():.1f}, {held.min():,} to {held.max():,})"
    if not packing:
        return [f"an epoch has {counted(steps, 'steps')} of {counted(width, 'rows')}", holds]
    unpacked = -(-len(plan.indices) // width)
    keep = (
        f"to keep the batch set training.samples_per_step: {width} (a "
        f"step then holds {counted(width, 'samples')})"
    )
    return [
        f"steps of packs: an epoch has {counted(steps, 'steps')} of {counted(width, 'packs')}, "
        f"{unpacked / steps:.1f} times fewer than the {unpacked:,} of {counted(width, 'unpacked samples')}",
        holds,
        *([keep] if width > 1 else []),  # a sample a step would be no packing
    ]


def _samples(aligned: AlignedPlan, accumulation: int, seed: int) -> np.ndarray:
    """Samples of each of the first full steps of an epoch."""
    order = EpochOrder(aligned, seed=seed, grad_accum=accumulation)
    steps = max(1, min(len(aligned) // order.width, _PLACES // order.width))
    packs = aligned.pack_ids_at(order.of_steps(0, steps, 0))
    sizes = np.diff(np.asarray(aligned.plan.offsets))[packs]
    starts = np.arange(0, len(sizes), order.width)
    found: np.ndarray = np.add.reduceat(sizes, starts)
    return found
