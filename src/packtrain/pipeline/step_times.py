"""What the steps of a run took beside what its plan forecasts, and what `balance` did for them.

Costs are token equivalents (`planning.costs.FlopsCost`) of the rank that the others wait for. Without a
device profile one factor, the median of the run itself, turns them into seconds: what is compared is how
steps differ. With a profile the seconds are its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..checks import whole
from ..planning.costs import DeviceProfile, FlopsCost, costs_of
from ..planning.epoch_order import EpochOrder

F64 = NDArray[np.float64]

#: Places of the first steps that are looked at.
_PLACES = 1 << 20


def read_history(run: Path) -> list[dict[str, Any]]:
    """Rows of a run's `train_log.jsonl`; empty where there is none."""
    path = run / "train_log.jsonl"
    if not path.is_file():
        return []
    with files.reading(path, "a training log", None):
        lines = path.read_text(encoding="utf-8").splitlines()
        return [_checked(json.loads(line)) for line in lines if line.strip()]


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the numbers that figures are made of."""
    if "step" in row or "step_s" in row:
        whole("step", row["step"], 0, 1 << 53)
    if "step_s" in row:
        row = {**row, "step_s": float(row["step_s"]), "tokens_per_s": float(row["tokens_per_s"])}
    return dict(row)


def step_figures(
    order: EpochOrder, history: Sequence[Mapping[str, Any]], profile: DeviceProfile | None = None
) -> dict[str, Any]:
    """`balance` and `forecast` of a run, plain JSON.

    Args:
        order: as the run consumes its packs.
        history: rows of its training log.
        profile: what a step costs on its device.

    Returns:
        balance: world_size, grad_accum, mode (null: none), sync, steps, max_over_mean_before, max_over_mean,
        and lines [step, slowest / mean rank] `before` and `after`.
        forecast (where steps were logged): profile, seconds_per_token, step_s and measured_step_s (medians of
        the stretches), deviation (median of |forecast / measured - 1|), tokens_per_step,
        measured_tokens_per_step, and the line [step, seconds] `steps`.
    """
    cost = FlopsCost() if profile is None else profile.cost
    last = max((int(row["step"]) for row in history if "step" in row), default=order.steps)
    count = max(1, min(last, _PLACES // order.width))
    parts = [_epoch(order, epoch, count, cost) for epoch in range(-(-count // order.steps))]
    before, after, mean, tokens, micro = (np.concatenate(held)[:count] for held in zip(*parts, strict=True))
    balance = order.balance
    figures: dict[str, Any] = {
        "balance": {
            "world_size": order.aligned.world_size,
            "grad_accum": order.grad_accum,
            "mode": None if balance is None else balance.mode,
            "sync": _sync(order),
            "steps": count,
            "max_over_mean_before": float(before.sum() / mean.sum()),
            "max_over_mean": float(after.sum() / mean.sum()),
            "before": _line(before / mean),
            "after": _line(after / mean),
        }
    }
    rows = _rows(history, count)
    if rows:
        figures["forecast"] = _forecast(rows, after, tokens, micro, profile)
    return figures


def _sync(order: EpochOrder) -> str:
    """Where ranks wait for each other: `step`, or `micro`."""
    return "step" if order.balance is None else order.balance.sync


def _epoch(order: EpochOrder, epoch: int, count: int, cost: FlopsCost) -> tuple[F64, F64, F64, F64, F64]:
    """Of every step of an epoch: slowest rank before and after balance, mean rank, tokens, micro steps."""
    view = order.view(epoch)
    ranks, steps = view.world_size, min(count, order.steps)
    costs = np.asarray(costs_of(view.plan, cost)[0], dtype=np.float64) / cost.l_star
    lengths = np.asarray(view.plan.pack_tokens, dtype=np.float64)
    after = order.of_steps(0, steps, epoch)
    before = order.at(np.arange(len(after), dtype=np.int64), epoch)
    starts = np.arange(0, len(after) // ranks, order.grad_accum)

    def by_rank(values: F64, positions: NDArray[np.int64]) -> F64:
        packs = view.pack_ids_at(positions)
        return np.where(packs < 0, 0.0, values[packs]).reshape(-1, ranks)

    def slowest(positions: NDArray[np.int64]) -> F64:
        held = by_rank(costs, positions)
        if _sync(order) == "step":
            return np.asarray(np.add.reduceat(held, starts).max(axis=1))
        return np.asarray(np.add.reduceat(held.max(axis=1), starts))

    mean = np.add.reduceat(by_rank(costs, after).mean(axis=1), starts)
    tokens = np.add.reduceat(by_rank(lengths, after).sum(axis=1), starts)
    micro = np.diff(np.append(starts, len(after) // ranks)).astype(np.float64)
    return slowest(before), slowest(after), np.maximum(mean, 1e-9), tokens, micro


def _rows(history: Sequence[Mapping[str, Any]], count: int) -> list[tuple[int, int, float, float]]:
    """(first step, last step + 1, seconds, tokens) of every logged stretch of steps, counted from 0."""
    found, begun = [], 0
    for row in history:
        if "step_s" in row and begun < int(row["step"]) <= count:
            seconds = float(row["step_s"])
            found.append((begun, int(row["step"]), seconds, float(row["tokens_per_s"]) * seconds))
            begun = int(row["step"])
    return found


def _forecast(
    rows: Sequence[tuple[int, int, float, float]],
    costs: F64,
    tokens: F64,
    micro: F64,
    profile: DeviceProfile | None,
) -> dict[str, Any]:
    measured = np.array([seconds for _, _, seconds, _ in rows])
    weights = np.array([stop - start for start, stop, _, _ in rows], dtype=np.float64)

    def mean_of(values: F64) -> F64:
        return np.array([values[start:stop].mean() for start, stop, _, _ in rows])

    equivalents = mean_of(costs)
    if profile is None:
        factor = float(np.median(measured / equivalents))
        predicted = factor * equivalents
    else:
        factor = profile.seconds_per_token
        predicted = np.array(list(map(profile.seconds, equivalents, mean_of(micro))))
    return {
        "profile": None if profile is None else profile.name,
        "seconds_per_token": factor,
        "step_s": float(np.median(predicted)),
        "measured_step_s": float(np.median(measured)),
        "deviation": float(np.median(np.abs(predicted / measured - 1))),
        "tokens_per_step": float(np.average(mean_of(tokens), weights=weights)),
        "measured_tokens_per_step": float(np.average([held for *_, held in rows], weights=weights)),
        "steps": [[stop, float(seconds)] for (_, stop, _, _), seconds in zip(rows, predicted, strict=True)],
    }


def _line(values: F64, most: int = 600) -> list[list[float]]:
    """[step, value] from step 1 on; more than `most` are means of equal runs."""
    parts = np.array_split(np.arange(len(values)), min(len(values), most))
    return [[int(part[-1]) + 1, float(values[part].mean())] for part in parts]
