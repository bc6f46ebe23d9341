"""What a pack costs, in integers: tokens, attention, or both as time; what a step costs on a measured device.

    flops = tokens + sum(length**2) / l_star + vision patches

fits measured step times: l_star is about 24,000 tokens for a model of 0.5 B and 36,000 for shapes of 7 B.
Costs are scaled by l_star, so that nothing is divided; only their ratios mean something.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import one_of
from ..errors import InputError, PlanError, counted, without_path
from ..extend import I64
from .raw_plan import RawPlan

#: A sample of this many tokens takes twice the time of its tokens alone.
L_STAR = 24_000

_COSTS = ("tokens", "attention", "flops")


@dataclass(frozen=True, slots=True)
class FlopsCost:
    """Calibrated predicted time, in units of one token.

    Attributes:
        l_star: length at which attention costs as much as everything else.
        patch: what a patch of the vision tower costs, in thousandths of a token.
    """

    l_star: int = L_STAR
    patch: int = 1000

    def __post_init__(self) -> None:
        if type(self.l_star) is not int or self.l_star < 1 or type(self.patch) is not int or self.patch < 0:
            raise PlanError(f"{self} is no cost", hint="l_star is an integer >= 1, patch an integer >= 0")

    def of(self, tokens: I64, squares: I64, patches: I64 | None) -> I64:
        """Cost x l_star of sums over packs (or of samples)."""
        cost = tokens * self.l_star + squares
        if patches is not None and self.patch:
            cost = cost + patches.astype(np.int64) * self.l_star * self.patch // 1000
        return cost

    def __str__(self) -> str:
        return "flops" if self == FlopsCost() else f"flops:{self.l_star}:{self.patch}"


def costs_of(plan: RawPlan, cost: str | FlopsCost | Any = "flops") -> tuple[I64, str]:
    """(int64[P] cost of every pack, its name for a checksum).

    Args:
        cost: `tokens`, `attention`, `flops`, a `FlopsCost`, or a number >= 0 for every pack.

    Raises:
        UnknownNameError, PlanError: no such cost, or the array does not fit the plan.
    """
    if isinstance(cost, str):
        if one_of("cost", cost, _COSTS) != "flops":
            return np.asarray(plan.pack_tokens if cost == "tokens" else plan.pack_sq), cost
        cost = FlopsCost()
    if isinstance(cost, FlopsCost):
        patches = plan.pack_costs.get("patches")
        return cost.of(np.asarray(plan.pack_tokens), np.asarray(plan.pack_sq), patches), str(cost)
    return _given(cost, len(plan))


def _given(cost: Any, packs: int) -> tuple[I64, str]:
    values = np.asarray(cost)
    if values.shape != (packs,) or values.dtype.kind not in "iuf":
        raise PlanError(
            f"cost has shape {values.shape} and type {values.dtype}, expected one number for each of "
            f"{counted(packs, 'packs')}",
            hint=f"or a name: {', '.join(_COSTS)}",
        )
    if packs and not (np.isfinite(values).all() and values.min() >= 0):
        raise PlanError("cost holds a negative number or one that is not finite")
    if values.dtype.kind == "f":
        largest = float(values.max(initial=0.0)) or 1.0
        values = np.rint(values / largest * (1 << 40))
    made = values.astype(np.int64)
    if packs and int(made.max()) > 1 << 55:
        raise PlanError(f"cost holds {int(made.max())}, limit is 2**55", hint="scale it down")
    digest = hashlib.sha256(made.astype("<i8").tobytes()).hexdigest()
    return made, f"array:{digest}"


# --------------------------------------------------------------------------------------------
# DeviceProfile: what a step costs on a device, measured once and kept as a JSON file
# --------------------------------------------------------------------------------------------
#     {"schema": "packtrain.device/1", "name": "H100, 0.5B", "seconds_per_token": 1.5e-5, "l_star": 24000,
#      "patch": 400, "fixed_seconds": 0.01, "step_seconds": 0.004, "memory_bytes": 8.0e10, "base_bytes":
#      9.0e9,
#      "bytes_per_token": 1.6e6, "bytes_per_patch": 2.0e5}
#
# Seconds of a micro step = fixed_seconds + seconds_per_token * (tokens + sum(length**2) / l_star + patches *
# patch / 1000); of an optimizer step step_seconds more. Peak memory = base_bytes (weights, gradients,
# optimizer) + bytes_per_token * tokens + bytes_per_patch * patches of a row. `packtrain doctor --calibrate`
# measures it.
SCHEMA = "packtrain.device/1"

_LEAST, _MOST = {"seconds_per_token": 1e-15, "l_star": 1}, 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Figures of one device and model; see the module docstring. Memory may be unknown (None)."""

    name: str = "device"
    seconds_per_token: float
    l_star: int = L_STAR
    patch: int = FlopsCost().patch
    fixed_seconds: float = 0.0
    step_seconds: float = 0.0
    memory_bytes: float | None = None
    base_bytes: float | None = None
    bytes_per_token: float | None = None
    bytes_per_patch: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or (value is None and field.default is None):
                continue
            least = _LEAST.get(field.name, 0)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not least <= value <= _MOST:
                raise InputError(
                    f"device profile: {field.name} is {value!r:.60}",
                    hint=f"expected a number from {least:g} to {_MOST:g}",
                )
        for name in ("l_star", "patch"):
            object.__setattr__(self, name, round(getattr(self, name)))

    @classmethod
    def load(cls, path: str | Path) -> DeviceProfile:
        """Read a profile.

        Raises:
            InputError: the file cannot be read or lacks a figure.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"device profile {path} cannot be read: {without_path(error)}") from None
        if not isinstance(values, Mapping) or values.get("schema") != SCHEMA:
            raise InputError(f"{path} is no device profile", hint=f'it needs "schema": "{SCHEMA}"')
        return cls.of({key: value for key, value in values.items() if key != "schema"})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> DeviceProfile:
        known = [field.name for field in fields(cls)]
        for key in values:
            one_of("key of a device profile", key, known)
        if "seconds_per_token" not in values:
            raise InputError("the device profile lacks seconds_per_token")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """What `load` reads; figures that are not known are left out."""
        return {
            "schema": SCHEMA,
            **{name: value for name, value in asdict(self).items() if value is not None},
        }

    @property
    def cost(self) -> FlopsCost:
        return FlopsCost(l_star=self.l_star, patch=self.patch)

    def seconds(self, token_equivalents: float, micro_steps: float, steps: float = 1) -> float:
        """Of optimizer steps that hold so much."""
        micro = self.seconds_per_token * token_equivalents + self.fixed_seconds * micro_steps
        return micro + self.step_seconds * steps

    def peak_bytes(self, plan: RawPlan) -> float | None:
        """Peak memory of the heaviest pack (of a full one at least); None when the profile does not say."""
        if self.base_bytes is None or self.bytes_per_token is None:
            return None
        held = self.bytes_per_token * np.asarray(plan.pack_tokens, dtype=np.float64)
        least = self.bytes_per_token * plan.spec.pack_length
        if self.bytes_per_patch and "patches" in plan.pack_costs:
            patches = self.bytes_per_patch * np.asarray(plan.pack_costs["patches"], dtype=np.float64)
            held, least = held + patches, least + float(patches.mean()) if len(patches) else least
        return self.base_bytes + max(float(held.max(initial=0.0)), least)

    def fits(self, plan: RawPlan) -> bool | None:
        """Does the heaviest pack fit? None when the profile does not say."""
        peak = self.peak_bytes(plan)
        return None if peak is None or self.memory_bytes is None else peak <= self.memory_bytes

    def longest_row(self) -> int | None:
        """Tokens of the longest row of text that fits, or None when the profile does not say."""
        if self.memory_bytes is None or self.base_bytes is None or not self.bytes_per_token:
            return None
        return max(0, int((self.memory_bytes - self.base_bytes) / self.bytes_per_token))
