"""Optimizer steps of a run, and its resolved runtime: packs per step, what is repeated or dropped, warnings.

Packing forces one pack per device and micro step, so accumulation is computed for that: from
`effective_batch_size` (packs per optimizer step over all ranks) where it is set, else from the product of
batch size, accumulation and ranks that the file implies. Everything here follows from (configuration, plan,
world size): no model, no process group, no torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ..errors import ConfigError, counted
from ..planning.align import AlignedPlan
from ..planning.balance import Balance
from ..planning.costs import DeviceProfile
from ..planning.epoch_order import EpochOrder
from ..planning.ledger import read_skip_file
from ..planning.packplan import PackPlan
from ..planning.replan import EpochPlans
from ..planning.stats import step_warnings
from ..report.contents import plan_words
from .config import Planned, RunConfig, told_of

# --------------------------------------------------------------------------------------------
# Optimizer steps of a run: how a configuration asks for them, and what packing does to them, said aloud.
# --------------------------------------------------------------------------------------------
# Steps of packs (the default): a step is world_size * accumulation packs, and holds as many samples as they
# do. Steps of samples (`training.samples_per_step`): the plan is made step by step, accumulation follows
# from it, and training equals the unpacked run with that batch. No torch here.
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
        made |= {
            "samples_per_step": training.samples_per_step,
            "packs_multiple": world_size * product,
            "seed": training.seed,
            "last_step": "drop" if training.dataloader_drop_last else "keep",
        }
    return made


def skipped_samples(config: RunConfig) -> tuple[int, ...]:
    """Ids of the samples that the configuration leaves out; empty without `data.skip_samples`.

    Raises:
        ConfigError: the file cannot be read, or names none.
    """
    path = config.data.skip_samples
    if path is None:
        return ()
    with told_of("training.skip_samples", "one id a line, or a JSON list"):
        ids = read_skip_file(path)
        if not ids:
            raise ConfigError(f"{path} names no sample", hint="remove the key")
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
            f"{counted(plan.spec.samples_per_step, 'samples')}, {counted(aligned.block, 'packs')} on "
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


# --------------------------------------------------------------------------------------------
# `training.replan: epoch`: the plans of a run's epochs. No torch here
# --------------------------------------------------------------------------------------------
# Epoch 0 is the plan on disk; the others are made in memory when they begin, on every rank alike, and are
# never written: (plan, lengths, epoch) names them, and their checksum stands in the log and in checkpoints.
#: Epochs whose checksums a dry run tells.
_TOLD = 4


def epoch_plans(config: RunConfig, plan: PackPlan, lengths: Any) -> EpochPlans | None:
    """The plans of the run's epochs; None without `training.replan`.

    Raises:
        ConfigError: there are no lengths to plan from.
        PlanError: they are not those of the plan, or the plan cannot be made anew.
    """
    if config.training.replan is None:
        return None
    if lengths is None:
        raise ConfigError("training.replan needs the lengths of the plan", hint="pass lengths to train()")
    return EpochPlans(plan, lengths)


def epoch_checksums(config: RunConfig, plan: PackPlan, lengths: Any, steps: int) -> list[str] | None:
    """Checksums of the raw plans of the first epochs of the run; None without `training.replan`.

    Args:
        steps: optimizer steps of an epoch.
    """
    plans = epoch_plans(config, plan, lengths)
    if plans is None:
        return None
    training = config.training
    count = math.ceil(training.max_steps / steps if training.max_steps > 0 else training.num_train_epochs)
    return [plans.plan(epoch).checksum for epoch in range(min(_TOLD, max(1, count)))]


# --------------------------------------------------------------------------------------------
# The resolved runtime of a run: packs per step, steps per epoch, what is repeated or dropped, and warnings
# --------------------------------------------------------------------------------------------
#: Repeated packs named in a log line.
_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """What training will do. Fields in the order of `to_dict`; those marked (log) are not in it.

    Attributes:
        packs_per_step_requested: what the file asks for per optimizer step, over all ranks.
        packs_per_step_realised: world_size * gradient_accumulation_steps, or all packs of an epoch.
        samples_per_step: mean over the plan; exact where the plan was made by steps of samples.
        repeated: raw pack ids that occur a second time to fill the last step of all ranks.
        steps_per_epoch: optimizer steps; a partial window at the end of an epoch is a step.
        eval: the same figures of the validation plan, of several by name, or None.
        plan: (log) statistics of the raw plan.
        replan: None; "epoch": every epoch has a plan of its own, of as many packs (only then in `to_dict`).
        epoch_checksums: of the raw plans of the first epochs, where a dry run made them; else None.
        drop_last: (log) packs that do not fill all ranks are dropped instead of repeated.
    """

    packing_length: int
    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    packs_per_step_requested: int
    packs_per_step_realised: int
    samples_per_step: float
    n_raw_packs: int
    n_aligned_packs: int
    pad_needed: int
    repeated: list[int]
    steps_per_epoch: int
    raw_checksum: str
    aligned_checksum: str
    warnings: list[str]
    eval: dict[str, Any] | None
    plan: dict[str, Any] = field(repr=False)
    drop_last: bool
    dropped_packs: int
    replan: str | None = None
    epoch_checksums: list[str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: what `packtrain train --dry-run --json` prints."""
        hidden = ["plan", "drop_last", "dropped_packs"]
        hidden += [name for name in ("replan", "epoch_checksums") if getattr(self, name) is None]
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}

    def figures(self) -> dict[str, Any]:
        """Everything, for `run.json`: `to_dict`, and fill, long and dropped samples."""
        return {
            **self.to_dict(),
            "dataloader_drop_last": self.drop_last,
            "dropped_packs": self.dropped_packs,
            "fill": self.plan["efficiency"],
            "long_samples": self.plan["long_samples"],
            "over_long_packs": self.plan["over_long_packs"],
            "longest_pack": self.plan["longest_pack"],
            "dropped_samples": self.plan["dropped"],
            "dropped_by_reason": self.plan["dropped_by_reason"],
        }

    def row(self) -> dict[str, float | int | str]:
        """The same as one row for Trainer's loggers: numbers and texts only."""
        out: dict[str, float | int | str] = {}
        for name, value in self.figures().items():
            if name == "repeated":
                out[name] = _short(value)
            elif name == "dataloader_drop_last":
                out[name] = int(value)
            elif isinstance(value, int | float | str):
                out[name] = value
        return out

    def log(self) -> None:
        """The start-up lines, and the warnings."""
        plan = self.plan
        if plan["over_long_packs"]:
            logger.info(
                "%d of %s exceed %d tokens, longest %d: each is one long sample",
                plan["over_long_packs"],
                counted(plan["packs"], "packs"),
                self.packing_length,
                plan["longest_pack"],
            )
        logger.info(
            "static packing: N_raw_packs=%d N_aligned_packs=%d world_size=%d dataloader_drop_last=%s",
            self.n_raw_packs, self.n_aligned_packs, self.world_size, self.drop_last,
        )  # fmt: skip
        if self.pad_needed:
            logger.info("pad_needed=%d: packs %s are repeated", self.pad_needed, _short(self.repeated))
        if self.dropped_packs:
            logger.info("%s dropped at the end of every epoch", counted(self.dropped_packs, "packs"))
        logger.info("raw_plan checksum %s", self.raw_checksum)
        logger.info("aligned_plan checksum %s", self.aligned_checksum)
        if self.replan is not None:
            later = ", ".join((self.epoch_checksums or [])[1:]) or "told as they begin"
            logger.info("a new plan every epoch, of as many packs; checksums after epoch 0: %s", later)
        logger.info(
            "fill %.2f%% of %d tokens a pack, %.2f samples a pack; %d of %d samples packed, %d long alone; "
            "%d left out: %s",
            100 * plan["efficiency"], self.packing_length, plan["samples_per_pack"], plan["samples"],
            plan["read"], plan["long_samples"], plan["dropped"], plan["dropped_by_reason"] or "none",
        )  # fmt: skip
        logger.info(
            "packs per optimizer step: %d requested, %d realised (%s x %d accumulated x 1 a device), "
            "%.1f samples; %s an epoch",
            self.packs_per_step_requested, self.packs_per_step_realised, counted(self.world_size, "ranks"),
            self.gradient_accumulation_steps, self.samples_per_step, counted(self.steps_per_epoch, "steps"),
        )  # fmt: skip
        if self.eval is not None:
            for name, told in plan_words(self.eval):
                logger.info("validation %s: %s", name, told)
        for warning in self.warnings:
            logger.warning("%s", warning)


def check_runtime(config: RunConfig, world_size: int) -> None:
    """Refuse, before anything is measured, what cannot be carried out on so many ranks.

    Raises:
        ConfigError: names the key.
    """
    if not isinstance(config.data, Planned):
        raise ConfigError(
            f"data of kind {config.data.kind} have no plan: there is nothing to measure or plan",
            hint="use packtrain train",
        )
    _ = config.pack_length
    if config.data.samples_per_step is None:
        config.accumulation(world_size)


def resolve_runtime(
    config: RunConfig,
    plan: PackPlan,
    world_size: int,
    eval_plan: PackPlan | Mapping[str, PackPlan] | None = None,
    lengths: Any = None,
) -> Runtime:
    """The runtime of a plan on `world_size` ranks.

    `eval_plan` is the validation plan, or several by name (one without a name: "").
    With `lengths`, and `training.replan`, the plans of the next epochs are made too, for their checksums.

    Raises:
        ConfigError, PlanError: see `check_runtime`; or the plan holds no packs.
    """
    check_runtime(config, world_size)
    training = config.training
    aligned = plan.align(world_size, training.dataloader_drop_last)
    accumulation = accumulation_of(config, plan, world_size)
    realised = min(accumulation * world_size, len(aligned))
    asked = training.per_device_train_batch_size * training.gradient_accumulation_steps * world_size
    if plan.spec.samples_per_step is not None:
        asked = realised  # the file asks for samples, and the packs of a step follow from the plan
    stats = plan.stats()
    steps = -(-aligned.steps // accumulation)
    return Runtime(
        world_size=world_size,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        packs_per_step_requested=training.effective_batch_size or asked,
        packs_per_step_realised=realised,
        samples_per_step=min(
            plan.spec.samples_per_step or realised * len(plan.indices) / len(plan), len(plan.indices)
        ),
        steps_per_epoch=steps,
        **_of_view(aligned),
        warnings=_warnings(config, aligned, accumulation),
        eval=_eval_of(config, eval_plan, world_size),
        plan=stats,
        drop_last=training.dataloader_drop_last,
        dropped_packs=len(aligned.dropped),
        replan=training.replan,
        epoch_checksums=None if lengths is None else epoch_checksums(config, plan, lengths, steps),
    )


def window_warnings(per_rank_batches: int, grad_accum: int, world_size: int = 1) -> list[str]:
    """What to say of an epoch whose packs do not fill whole accumulation windows.

    >>> len(window_warnings(15, 32)), len(window_warnings(15, 8)), len(window_warnings(16, 8))
    (1, 1, 0)
    """
    whole, rest = divmod(per_rank_batches, grad_accum)
    if not rest:
        return []
    held, size = counted(rest * world_size, "packs"), "fewer than"
    if whole:
        size = f"{per_rank_batches / grad_accum:.2f} windows of"
    return [
        f"{counted(per_rank_batches, 'packs')} per rank and epoch are {size} gradient_accumulation_steps "
        f"{grad_accum}: the {'last' if whole else 'one'} optimizer step of an epoch holds {held} instead of "
        f"{grad_accum * world_size}"
    ]


def _memory_warnings(path: str | None, plan: PackPlan) -> list[str]:
    """What to say of packs that the device would not hold, where a profile tells."""
    profile = None if path is None else DeviceProfile.load(path)
    if profile is None or profile.fits(plan) is not False:
        return []
    peak, there = profile.peak_bytes(plan), profile.memory_bytes
    assert peak is not None and there is not None  # or it would not say that it does not fit
    return [
        f"the heaviest pack needs about {peak / 2**30:.1f} GiB, and {profile.name} has {there / 2**30:.1f}: "
        "use a shorter pack length (packtrain forecast --profile), checkpointing, or long_samples: drop"
    ]


def _warnings(config: RunConfig, aligned: AlignedPlan, accumulation: int) -> list[str]:
    found = window_warnings(aligned.steps, accumulation, aligned.world_size)
    found += step_warnings(aligned.plan, aligned.world_size)
    repeated = len(aligned.repeated)
    if repeated > len(aligned.plan):
        found.append(
            f"{counted(len(aligned.plan), 'packs')} on {counted(aligned.world_size, 'ranks')}: packs are "
            f"repeated {len(aligned) / len(aligned.plan):.1f} times in one micro step"
        )
    found += _without_effect(config, aligned)
    return found + _memory_warnings(config.training.device_profile, aligned.plan)


def _without_effect(config: RunConfig, aligned: AlignedPlan) -> list[str]:
    """Keys that this plan on these ranks leaves without effect."""
    training, found = config.training, []
    if training.repeat_loss != "keep" and not training.dataloader_drop_last and not len(aligned.repeated):
        found.append(f"data.repeat_loss: {training.repeat_loss} has no effect: no pack is repeated")
    if training.balance == "step" and "balance" in config.data.model_fields_set and aligned.world_size == 1:
        found.append("data.balance: step has no effect on one rank: it spreads a step over the ranks")
    if training.balance not in (None, "step") and aligned.world_size == 1:
        found.append(f"data.balance: {training.balance} evens out no ranks, there is one: it reorders packs")
    return found


def _eval_of(
    config: RunConfig, plans: PackPlan | Mapping[str, PackPlan] | None, world_size: int
) -> dict[str, Any] | None:
    named = {"": plans} if isinstance(plans, PackPlan) else plans or {}
    found = {name: _eval(config, plan, world_size) for name, plan in named.items()}
    return found.get("", found or None)


def _eval(config: RunConfig, plan: PackPlan, world_size: int) -> dict[str, Any]:
    """Evaluation drops nothing, whatever the training options say."""
    aligned, stats = plan.align(world_size, drop_last=False), plan.stats()
    same = ("read", "samples", "packs", "over_long_packs", "longest_pack", "dropped", "dropped_by_reason")
    return {
        "fill": stats["efficiency"],
        **{name: stats[name] for name in same},
        "packing": config.training.eval_packing,
        "per_device_eval_batch_size": 1,
        "packing_drop_last": False,
        "dataloader_drop_last": False,
        **_of_view(aligned),
    }


def _of_view(aligned: AlignedPlan) -> dict[str, Any]:
    """Figures of a plan on some ranks."""
    return {
        "packing_length": aligned.plan.spec.pack_length,
        "n_raw_packs": len(aligned.plan),
        "n_aligned_packs": len(aligned),
        "pad_needed": len(aligned.repeated),
        "repeated": aligned.pack_ids[aligned.repeated].tolist(),
        "raw_checksum": aligned.plan.checksum,
        "aligned_checksum": aligned.checksum,
    }


def _short(ids: Sequence[int]) -> str:
    """A list of ids for people: the first and the last of a long one."""
    if len(ids) <= _SHOWN:
        return str(list(ids))
    return f"[{', '.join(map(str, ids[: _SHOWN - 1]))}, …, {ids[-1]}]"
