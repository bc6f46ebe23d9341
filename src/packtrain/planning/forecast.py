"""Forecast: what training on a set of lengths will look like, before a GPU is booked.

Every pack length is planned for real; spreads and predicted times are taken over the first steps of an
epoch (about a million packs), which are a random part of it. Times are in token equivalents
(`costs.FlopsCost`), in seconds where a device profile is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import whole
from ..errors import InputError, counted
from .align import AlignedPlan
from .balance import Balance
from .build import plan
from .costs import DeviceProfile, FlopsCost
from .epoch_order import EpochOrder
from .lengths import Lengths, as_lengths
from .packplan import PackPlan

#: Value of pack_lengths that tries the powers of two that suit the lengths (and the device).
AUTO = "auto"

#: Without a device profile a micro step costs as much as so many tokens, besides its tokens.
_FIXED_TOKENS = 512

#: Among choices whose epoch is at most this much slower than the best, the shortest rows win.
_TOLERANCE = 0.02

_PLACES = 1 << 20

#: Statistics of the plan that a row begins with.
_OF_PLAN = (
    *("samples", "dropped", "long_samples", "over_long_packs", "longest_pack", "packs", "gap"),
    *("efficiency", "samples_per_pack"),
)


def forecast(
    lengths: Any,
    pack_lengths: Sequence[int | str] | str = AUTO,
    world_size: int = 1,
    grad_accum: int = 1,
    *,
    samples_per_step: int | None = None,
    profile: DeviceProfile | Mapping[str, Any] | str | Path | None = None,
    seed: int = 0,
    **options: Any,
) -> list[dict[str, Any]]:
    """One row of figures for every pack length; exactly one row is `recommended`, with a `why`.

    Args:
        lengths: a Lengths, or tokens.
        pack_lengths: the lengths to try, or "auto", which may also stand in the list.
        world_size, grad_accum: ranks, and micro steps per optimizer step.
        samples_per_step: plan by steps of samples; accumulation then follows from the plan.
        profile: device profile (or its file): adds seconds, hours and memory.
        options: further options of `packtrain.plan`.

    Raises:
        InputError, PlanError: an argument cannot hold.
    """
    checked = as_lengths(lengths)
    device = _profile(profile)
    if not len(checked.usable()):
        raise InputError("there is no sample to forecast", hint="measure a source with usable samples")
    if not len(pack_lengths) or (isinstance(pack_lengths, str) and pack_lengths != AUTO):
        raise InputError(
            f"pack_lengths is {repr(pack_lengths) if len(pack_lengths) else 'empty'}",
            hint="a list of numbers such as [4096, 8192], or 'auto'",
        )
    tried: list[Any] = [pack_lengths] if isinstance(pack_lengths, str) else list(pack_lengths)
    if AUTO in tried:
        tried = sorted({*(one for one in tried if one != AUTO), *_lengths_to_try(checked, device)})
    whole("world_size", world_size, 1)
    whole("grad_accum", grad_accum, 1)
    if samples_per_step is not None:
        more = {"packs_multiple": world_size * grad_accum, "seed": seed, "samples_per_step": samples_per_step}
        options = {**options, **more}
    histogram = np.bincount(checked.usable())
    rows = []
    for cap in tried:
        made = plan(checked, cap, **options)
        aligned = made.align(world_size)
        accum = aligned.block // world_size if samples_per_step is not None else grad_accum
        row = _counts(made, aligned, accum, samples_per_step)
        row.update(_padding(checked, made, histogram))
        row.update(_epoch(aligned, accum, seed, device))
        rows.append(row)
    _recommend(rows, device)
    return rows


def _profile(profile: Any) -> DeviceProfile | None:
    if profile is None or isinstance(profile, DeviceProfile):
        return profile
    return DeviceProfile.of(profile) if isinstance(profile, Mapping) else DeviceProfile.load(profile)


def _lengths_to_try(lengths: Lengths, device: DeviceProfile | None) -> list[int]:
    most = max(8192, 1 << (lengths.max_tokens - 1).bit_length())
    fits = None if device is None else device.longest_row()
    tried = [1 << k for k in range(11, 21) if 1 << k <= most and (fits is None or 1 << k <= fits)]
    if not tried:
        raise InputError(f"rows of 2048 tokens do not fit the device (at most {fits})")
    return tried[-6:]


def _counts(made: PackPlan, aligned: AlignedPlan, accum: int, batch: int | None) -> dict[str, Any]:
    stats = made.stats()
    width = aligned.world_size * accum
    unpacked = batch or width
    return {
        "pack_length": made.spec.pack_length,
        **{name: stats[name] for name in _OF_PLAN},
        "world_size": aligned.world_size,
        "grad_accum": accum,
        "samples_per_step": None if batch is None else min(batch, stats["samples"]),
        "samples_of_last_step": 0 if batch is None else stats["samples"] % min(batch, stats["samples"] or 1),
        "micro_steps": aligned.steps,
        "optimizer_steps": -(-aligned.steps // accum),
        "optimizer_steps_unpacked": -(-stats["samples"] // unpacked),
        "partial_windows": int(aligned.steps % accum > 0),
        "repeated": len(aligned.repeated),
        "fillers": len(aligned) - len(made) if aligned.block > 1 else 0,
        "longest_row": max(made.spec.pack_length, int(np.asarray(made.pack_tokens).max(initial=0))),
    }


def _padding(lengths: Lengths, made: PackPlan, histogram: NDArray[Any]) -> dict[str, float]:
    """Shares of the slots of other batchings that packed rows do not compute."""
    usable = lengths.usable().astype(np.int64)
    real = int(usable.sum())
    rows = max(1, round(len(made.indices) / max(1, len(made))))
    ascending = np.repeat(np.arange(len(histogram)), histogram)

    def slots(values: NDArray[Any]) -> int:
        starts = np.arange(0, len(values), rows)
        sizes = np.diff(np.append(starts, len(values)))
        return int((np.maximum.reduceat(values, starts).astype(np.int64) * sizes).sum())

    capped = int(np.maximum(usable, made.spec.pack_length).sum())
    return {
        "batch_rows": rows,
        "saved_padded": 1 - real / capped,
        "saved_batched": 1 - real / slots(usable),
        "saved_bucketed": 1 - real / slots(ascending),
    }


def _times(held: NDArray[Any]) -> tuple[float, float, float]:
    """Sums over costs [steps, micro steps, ranks]: slowest, mean rank of a micro step; slowest of a step."""
    slowest, mean, step = held.max(axis=2), held.mean(axis=2), held.sum(axis=1).max(axis=1)
    return float(slowest.sum()), float(mean.sum()), float(step.sum())


def _epoch(aligned: AlignedPlan, accum: int, seed: int, device: DeviceProfile | None) -> dict[str, Any]:
    """Spread of the steps and predicted time, over the first steps of an epoch."""
    ranks = aligned.world_size
    cost = FlopsCost() if device is None else device.cost
    width = ranks * accum
    full = len(aligned) // width
    if full == 0:  # one step that is not full: as many micro steps as there are
        accum, width, full = aligned.steps, len(aligned), 1
    order = EpochOrder(aligned, seed=seed, grad_accum=accum, balance=Balance(grad_accum=accum, cost=cost))
    steps = min(full, max(1, _PLACES // width))
    places = np.arange(steps * width, dtype=np.int64)
    before, after = order.at(places, 0), order.of_steps(0, steps, 0)
    plain, even = (
        _times(order.costs_at(at, 0).reshape(-1, accum, ranks) / cost.l_star) for at in (before, after)
    )
    ids = aligned.pack_ids_at(before)
    tokens = np.where(ids < 0, 0, np.asarray(aligned.plan.pack_tokens)[ids]).reshape(steps, width).sum(axis=1)
    sizes = np.diff(np.asarray(aligned.plan.offsets))
    samples = np.where(ids < 0, 0, sizes[ids]).reshape(steps, width).sum(axis=1)
    most = even[0] / steps
    row: dict[str, Any] = {
        "tokens_per_step_mean": float(tokens.mean()),
        "tokens_per_step_sd": float(tokens.std()),
        "samples_per_step_mean": float(samples.mean()),
        "samples_per_step_sd": float(samples.std()),
        "max_over_mean": plain[0] / plain[1],
        "max_over_mean_balanced": even[0] / even[1],
        "max_over_mean_step": even[2] / even[1],
        "step_token_equivalents": most,
        "epoch_token_equivalents": (most + _FIXED_TOKENS * accum) * aligned.steps / accum,
        "measured_steps": steps,
    }
    if device is not None:
        seconds = device.seconds(most, accum)
        row["step_seconds"] = seconds
        row["epoch_hours"] = seconds * aligned.steps / accum / 3600
        row["peak_bytes"] = device.peak_bytes(aligned.plan)
        row["fits"] = device.fits(aligned.plan) is not False
    return row


def _recommend(rows: list[dict[str, Any]], device: DeviceProfile | None) -> None:
    able = [row for row in rows if row.get("fits", True)]
    for row in rows:
        why = f"a row of {row['longest_row']:,} tokens does not fit the device's memory"
        row.update(recommended=False, why="" if row.get("fits", True) else why)
    if not able:
        rows[0]["why"] += "; none fits: use more ranks, checkpointing or long_samples='drop'"
        rows[0]["recommended"] = True
        return
    key = "epoch_token_equivalents" if device is None else "epoch_hours"
    fastest = min(row[key] for row in able)
    chosen = min(
        (row for row in able if row[key] <= fastest * (1 + _TOLERANCE)), key=lambda row: row["pack_length"]
    )
    for row in able:
        slower = row[key] / fastest - 1
        row["why"] = f"predicted epoch {slower:.1%} slower than the fastest" if slower else "fastest epoch"
    chosen["recommended"] = True
    told = chosen["samples_per_step"] is not None
    samples = samples_words(chosen) if told else f"{chosen['samples_per_step_mean']:.0f}"
    by = "the device profile" if device else f"a fixed cost of {_FIXED_TOKENS} tokens a micro step"
    chosen["why"] = (
        f"shortest rows within {_TOLERANCE:.0%} of the fastest epoch (by {by}); "
        f"max/mean {chosen['max_over_mean_balanced']:.3f}, "
        f"{counted(chosen['optimizer_steps'], 'steps')} of {samples} samples"
    )


def samples_words(row: Mapping[str, Any]) -> str:
    """How many samples a step of a row has: as many as were asked for, or their mean."""
    asked, rest = row["samples_per_step"], row["samples_of_last_step"]
    if asked is None:
        return f"{row['samples_per_step_mean']:,.1f} (mean, sd {row['samples_per_step_sd']:,.1f})"
    return f"{asked:,}" + (f" (the last {rest:,})" if rest else "")
