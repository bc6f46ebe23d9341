"""DeviceProfile: what a step costs on a device, measured once and kept as a JSON file.

    {"schema": "packtrain.device/1", "name": "H100, 0.5B", "seconds_per_token": 1.5e-5, "l_star": 24000,
     "fixed_seconds": 0.01, "memory_bytes": 8.0e10, "base_bytes": 9.0e9, "bytes_per_token": 1.6e6}

Seconds of a micro step = fixed_seconds + seconds_per_token * (tokens + sum(length**2) / l_star + patches).
Peak memory = base_bytes (weights, gradients, optimizer) + bytes_per_token * tokens of the longest row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import InputError, UnknownNameError
from .costs import L_STAR, FlopsCost

__all__ = ["SCHEMA", "DeviceProfile"]

SCHEMA = "packtrain.device/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Figures of one device and model; see the module docstring. Memory may be unknown (None)."""

    name: str = "device"
    seconds_per_token: float
    l_star: int = L_STAR
    fixed_seconds: float = 0.0
    memory_bytes: float | None = None
    base_bytes: float | None = None
    bytes_per_token: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            positive = field.name in ("seconds_per_token", "l_star")
            if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):
                raise InputError(
                    f"device profile: {field.name} is {value!r}", hint="expected a number > 0, or >= 0"
                )
        object.__setattr__(self, "l_star", round(self.l_star))

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

    @property
    def cost(self) -> FlopsCost:
        return FlopsCost(l_star=self.l_star)

    def seconds(self, token_equivalents: float, micro_steps: float) -> float:
        return self.seconds_per_token * token_equivalents + self.fixed_seconds * micro_steps

    def peak_bytes(self, row: int) -> float | None:
        """Peak memory with rows of up to `row` tokens, or None when the profile does not say."""
        if self.base_bytes is None or self.bytes_per_token is None:
            return None
        return self.base_bytes + self.bytes_per_token * row

    def longest_row(self) -> int | None:
        """Tokens of the longest row that fits, or None when the profile does not say."""
        if self.memory_bytes is None or self.base_bytes is None or not self.bytes_per_token:
            return None
        return max(0, int((self.memory_bytes - self.base_bytes) / self.bytes_per_token))
