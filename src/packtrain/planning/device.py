"""DeviceProfile: what a step costs on a device, measured once and kept as a JSON file.

    {"schema": "packtrain.device/1", "name": "H100, 0.5B", "seconds_per_token": 1.5e-5, "l_star": 24000,
     "patch": 400, "fixed_seconds": 0.01, "step_seconds": 0.004, "memory_bytes": 8.0e10, "base_bytes": 9.0e9,
     "bytes_per_token": 1.6e6, "bytes_per_patch": 2.0e5}

Seconds of a micro step = fixed_seconds + seconds_per_token * (tokens + sum(length**2) / l_star + patches *
patch / 1000); of an optimizer step step_seconds more. Peak memory = base_bytes (weights, gradients,
optimizer) + bytes_per_token * tokens + bytes_per_patch * patches of a row. `packtrain doctor --calibrate`
measures it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, UnknownNameError
from .costs import L_STAR, FlopsCost
from .raw_plan import RawPlan

__all__ = ["SCHEMA", "DeviceProfile"]

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
            raise InputError(f"device profile {path} cannot be read: {error}") from None
        if not isinstance(values, Mapping) or values.get("schema") != SCHEMA:
            raise InputError(f"{path} is no device profile", hint=f'it needs "schema": "{SCHEMA}"')
        return cls.of({key: value for key, value in values.items() if key != "schema"})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> DeviceProfile:
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise UnknownNameError("key of a device profile", str(key), known)
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
