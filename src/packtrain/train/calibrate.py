"""What steps of a run cost on this device: real packs of its plan, and parts of them, are trained and timed.

    made = calibrate(config, prepared.plan, prepared.source, prepared.template, prepared.lengths)
    made.profile, made.time_error, made.memory_error

Rows of a full, a half and a quarter pack, few and many pairs of tokens that attend, few and many patches: a
non-negative least-squares fit of relative errors gives `DeviceProfile`. Full packs that the fit has not seen
say how far it is off. The run's own settings train (adapters, recomputation, optimizer, compiled layers), on
one device; nothing of it is kept.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TrainerCallback

from ..errors import InputError, counted
from ..planning.costs import L_STAR, DeviceProfile
from ..planning.packplan import PackPlan
from ..planning.raw_plan import Certificate, PackerId, Sums
from ..world import World
from .config import RunConfig, load_config
from .runtime import accumulation_of
from .sft import train

F64 = NDArray[np.float64]

#: The rows are trained so often at most, again while a pass ended before half of the time; past all of it
#: only what the first pass warmed up on, a third of the rows, is trained again. The quickest of a row counts.
_PASSES, _SECONDS = 6, 40.0

#: Attention or patches that change the time of a row by less keep their default cost.
_SEEN = 0.05

#: Keys of TrainingArguments that would write, evaluate or go on from something.
_NOT_HERE = (
    *("resume_from_checkpoint", "load_best_model_at_end", "push_to_hub", "report_to", "eval_steps"),
    *("eval_on_start", "dataloader_num_workers", "metric_for_best_model", "early_stopping_patience"),
)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Attributes:
    profile: the fitted figures.
    rows: of each kind of row: tokens, squares, patches, seconds, peak_bytes (or None), what was predicted,
        and whether the fit has seen it (`fitted`); a row is the sum of the micro steps of a step.
    time_error, memory_error: largest |predicted / measured - 1| of the rows that the fit has not seen.
    """

    profile: DeviceProfile
    rows: list[dict[str, Any]]
    time_error: float | None
    memory_error: float | None


def calibrate(
    config: RunConfig,
    plan: PackPlan,
    source: Any,
    template: Any,
    lengths: Any,
    *,
    model: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Train some rows of the plan and fit what they cost; about a minute beside loading the model.

    Args:
        config: of the run; its output folder is not touched.
        plan, source, template, lengths: as `train` takes them.
        model: a loaded model; None: `config.model` is loaded.

    Raises:
        InputError: the plan has fewer than eight packs of a step.
        IsolationError, ConfigError, SampleError: as `train`.
    """
    micro = min(2, accumulation_of(config, plan, 1))
    chosen, fitted = _rows(plan, np.asarray(lengths.tokens), micro)
    rows = _plan_of(plan, lengths, [row for group in chosen for row in group])
    clock = _Clock(len(chosen))
    with tempfile.TemporaryDirectory() as folder, _quiet():
        train(
            _alone(config, folder, micro), rows, source, template,
            lengths=lengths, model=model, place=World(0, 1), progress=progress, callbacks=[clock],
        )  # fmt: skip
    sums = _sums_of(rows).reshape(len(chosen), micro, 3).sum(axis=1)
    seconds, peaks = np.array(clock.seconds()), np.array(clock.latest_peaks(), dtype=np.float64)
    return _fitted(config, sums, seconds, peaks, fitted, micro, clock.optimizer())


# ------------------------------------------------------------------------------------------ rows
def _rows(plan: PackPlan, tokens: Any, micro: int) -> tuple[list[list[Any]], NDArray[np.bool_]]:
    """Groups of `micro` rows alike (sample ids), and which of them are fitted."""
    if len(plan) < 8 * micro:
        raise InputError(
            f"the plan has {counted(len(plan), 'packs')}; {8 * micro} are needed to tell what they cost",
            hint="plan more samples, or a shorter pack_length",
        )
    sums = _sums_of(plan)
    left = list(range(len(plan)))

    def take(column: int, share: float) -> list[Any]:
        """Packs beside one another in the order of a sum; they are not taken again."""
        ordered = sorted(left, key=lambda pack: (sums[pack, column], pack))
        begin = round(share * (len(ordered) - micro))
        found = ordered[begin : begin + micro]
        for pack in found:
            left.remove(pack)
        return [plan[pack] for pack in found]

    groups = [take(1, 0.0), take(1, 1.0), take(1, 0.5)]
    if np.ptp(sums[:, 2]) and len(left) >= 7 * micro:
        groups += [take(2, 0.0), take(2, 1.0)]
    groups += [[_part(row, tokens, share) for row in take(1, 0.5)] for share in (0.5, 0.25)]
    if len(left) >= 3 * micro:
        groups.append([_part(row, tokens, 0.5) for row in take(1, 1.0)])
    seen = len(groups)
    drawn = np.random.default_rng(0)
    groups += [take(0, float(drawn.random())) for _ in range(min(6, len(left) // micro))]
    return groups, np.arange(len(groups)) < seen


def _part(row: Any, tokens: Any, share: float) -> Any:
    """Samples of a row, from its first on, that hold about this share of its tokens; at least one."""
    held = np.cumsum(tokens[row])
    return row[: max(1, int(np.searchsorted(held, share * held[-1], side="right")))]


def _plan_of(plan: PackPlan, lengths: Any, rows: Sequence[Any]) -> PackPlan:
    """A plan of just these rows, in this order."""
    tokens = np.asarray(lengths.tokens, dtype=np.int64)
    patches = lengths.costs.get("patches")
    held = {"patches": np.array([patches[row].sum() for row in rows])} if patches is not None else {}
    indices = np.concatenate(rows)
    rest = np.setdiff1d(np.asarray(plan.indices), indices)
    return PackPlan(
        offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        indices=indices.astype(plan.indices.dtype),
        spec=replace(plan.spec, samples_per_step=None, packs_multiple=1, packs_per_step=None),
        packer=PackerId(plan.packer.name, plan.packer.version, {"calibration": len(rows)}),
        ledger=plan.ledger.with_more(rest.astype(np.int64), "not_calibrated"),
        certificate=Certificate.of(len(rows), 1, "volume"),
        long_samples=0,
        slots=len(rows) * plan.spec.pack_length,
        sums=Sums(
            np.array([tokens[row].sum() for row in rows]),
            np.array([(tokens[row] ** 2).sum() for row in rows]),
            held,
        ),
        lengths_digest=plan.lengths_digest,
    )


def _sums_of(plan: PackPlan) -> F64:
    """[packs, 3]: tokens, sum of squared lengths, patches."""
    patches = plan.pack_costs.get("patches", np.zeros(len(plan)))
    return np.stack([plan.pack_tokens, plan.pack_sq, patches], axis=1).astype(np.float64)


def _alone(config: RunConfig, folder: str, micro: int) -> RunConfig:
    """The run on the chosen rows: in their order, again and again, writing nothing that stays."""
    values = config.to_dict()
    training, data = values["training"], values["data"]
    for key in _NOT_HERE:
        training.pop(key, None)
    training |= {
        "output_dir": folder, "effective_batch_size": micro, "num_train_epochs": _PASSES, "max_steps": -1,
        "resume": None, "log_sample_loss": False, "proof": False, "save_strategy": "no",
        "eval_strategy": "no", "logging_strategy": "no",
    }  # fmt: skip
    data |= dict.fromkeys(
        ("balance", "encode_cache", "replan", "samples_per_step", "val", "global_batch_size")
    )
    data |= {"shuffle": False, "drop_last": False}
    return load_config(values)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What training tells of its steps and its proof is not of the run that is calibrated."""
    held, told = logging.getLogger("packtrain.train"), logging.getLogger("packtrain.train").level
    held.setLevel(logging.ERROR)
    try:
        yield
    finally:
        held.setLevel(told)


# ------------------------------------------------------------------------------------------ time
class _Clock(TrainerCallback):  # type: ignore[misc]
    """Times forward and backward of every step, its optimizer, and peak memory."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.micro: list[float] = []
        self.after: list[float] = []
        self.peaks: list[float] = []
        self.begun = 0.0

    def seconds(self) -> list[float]:
        """Of every group, its quickest pass."""
        return [min(self.micro[k :: self.groups]) for k in range(self.groups)]

    def latest_peaks(self) -> list[float]:
        """Of every group, in its last pass: in the first one the optimizer's state is made."""
        return [self.peaks[k :: self.groups][-1] for k in range(self.groups)]

    def optimizer(self) -> float:
        return float(np.median(self.after[self.groups :]))

    def on_step_begin(self, *given: Any, **more: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.at = _now()
        self.begun = self.begun or self.at

    def on_pre_optimizer_step(self, *given: Any, **more: Any) -> None:
        now = _now()
        self.micro.append(now - self.at)
        self.at = now

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.after.append(_now() - self.at)
        self.peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else float("nan"))
        again, took = len(self.micro) - self.groups, self.at - self.begun
        whole = again > 0 and again % self.groups == 0
        if (whole and took > _SECONDS / 2) or (3 * again >= self.groups and took > _SECONDS):
            control.should_training_stop = True


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# ------------------------------------------------------------------------------------------- fit
def fit_seconds(sums: F64, seconds: F64, micro: int = 1) -> dict[str, float]:
    """`seconds_per_token`, `fixed_seconds`, `l_star` and `patch` (thousandths) of rows.

    Args:
        sums: [rows, 3]: tokens, sum of squared lengths, patches.
        seconds: [rows].
        micro: micro steps that a row is the sum of.
    """
    ones = np.full(len(sums), float(micro))
    token = sums[:, 0] + sums[:, 1] / L_STAR  # where attention cannot be told apart
    for columns in ((0, 1, 2), (0, 2), (0, 1), (0,)):
        base = sums[:, 0] if 1 in columns else token
        parts = [ones, base, *(sums[:, c] for c in columns if c)]
        found = _non_negative(np.stack(parts, axis=1), seconds)
        shares = [found[k + 2] * np.ptp(sums[:, c]) / seconds.mean() for k, c in enumerate(columns[1:])]
        if found[1] > 0 and all(share >= _SEEN for share in shares):
            break
    per = max(float(found[1]), 1e-12)
    of = dict(zip(columns[1:], found[2:], strict=True))
    told = {"seconds_per_token": per, "fixed_seconds": float(found[0]), "l_star": float(L_STAR)}
    if of.get(1):
        told["l_star"] = max(1.0, per / float(of[1]))
    if 2 in of:
        told["patch"] = 1000 * float(of[2]) / per
    return told


def _non_negative(columns: F64, wanted: F64) -> F64:
    """Least squares of relative errors, no factor below 0: columns that would be are left out one by one."""
    weighted = columns / wanted[:, None]
    kept = list(range(columns.shape[1]))
    scale = np.maximum(weighted.max(axis=0), 1e-300)
    while True:
        part = np.linalg.lstsq(weighted[:, kept] / scale[kept], np.ones(len(wanted)), rcond=None)[0]
        if part.min(initial=0.0) >= 0 or len(kept) == 1:
            break
        kept.pop(int(part.argmin()))
    found = np.zeros(columns.shape[1])
    found[kept] = np.maximum(part, 0.0) / scale[kept]
    return found


def _fitted(
    config: RunConfig,
    sums: F64,
    seconds: F64,
    peaks: F64,
    seen: NDArray[np.bool_],
    micro: int,
    optimizer: float,
) -> Calibration:
    time_of = fit_seconds(sums[seen], seconds[seen], micro)
    memory: dict[str, float] = {}
    rows = sums / micro  # of a micro step: rows of a group are alike
    if not np.isnan(peaks).any():
        with_patches = bool(np.ptp(rows[seen, 2]))
        parts = [np.ones(len(rows)), rows[:, 0], *([rows[:, 2]] if with_patches else [])]
        found = _non_negative(np.stack(parts, axis=1)[seen], peaks[seen])
        memory = {"base_bytes": float(found[0]), "bytes_per_token": float(found[1])}
        memory |= {"bytes_per_patch": float(found[2])} if with_patches else {}
        memory["memory_bytes"] = float(torch.cuda.get_device_properties(0).total_memory)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    name = f"{where}, {config.model.name_or_path or 'model'}"
    profile = DeviceProfile.of({"name": name, "step_seconds": optimizer, **time_of, **memory})
    factor = np.array([1.0, 1 / profile.l_star, profile.patch / 1000])
    predicted = np.array([profile.seconds(value, micro, 0) for value in (sums * factor).sum(axis=1)])
    per_row = [memory.get(key, np.nan) for key in ("base_bytes", "bytes_per_token")]
    room = per_row[0] + rows[:, 0] * per_row[1] + rows[:, 2] * memory.get("bytes_per_patch", 0.0)
    told = [
        {
            "tokens": int(t), "squares": int(s), "patches": int(p), "fitted": bool(fitted),
            "seconds": float(second), "predicted_seconds": float(guess),
            "peak_bytes": None if np.isnan(peak) else int(peak),
            "predicted_bytes": None if np.isnan(byte) else int(byte),
        }
        for (t, s, p), fitted, second, guess, peak, byte in zip(
            sums, seen, seconds, predicted, peaks, room, strict=True
        )
    ]  # fmt: skip
    errors: list[float | None] = []
    for guess, real in ((predicted, seconds), (room, peaks)):
        gaps = np.abs(guess[~seen] / real[~seen] - 1)
        errors.append(None if not len(gaps) or np.isnan(gaps).any() else float(gaps.max()))
    return Calibration(profile=profile, rows=told, time_error=errors[0], memory_error=errors[1])
