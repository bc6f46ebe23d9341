"""PlanSpec: everything besides the lengths that a plan depends on.

A plan is a pure function of (lengths, spec). The spec is written into the plan folder; two plans of
equal lengths and equal specs are equal byte for byte. A value that has no effect is told, and left out.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .. import extend
from ..checks import one_of
from ..errors import ConfigError, InputError, PlanError, UnknownNameError

logger = logging.getLogger(__name__)

_MOST = (1 << 63) - 1

#: Fields that are integers, the limits of each, and what it means. None is one without it, where it may be.
_INTEGERS: tuple[tuple[str, int, int | None, str], ...] = (
    ("pack_length", 1, 1 << 31, "the cap of a pack in tokens"),
    ("multiple_of", 1, _MOST, "1 = no rounding"),
    ("packs_multiple", 1, _MOST, "1 = no rounding"),
    ("max_samples", 1, _MOST, "leave it out for no limit"),
    ("window", 1, _MOST, "leave it out for no limit"),
    ("samples_per_step", 1, _MOST, "leave it out for no limit"),
    ("packs_per_step", 1, _MOST, "leave it out for no limit"),
    ("seed", 0, None, "leave it out for no shuffle"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSpec:
    """Keyword arguments of `packtrain.plan`, checked.

    Attributes:
        pack_length: hard cap of a multi-sample pack, in tokens.
        packer: a file name in `packers/` or an entry point of `packtrain.packers`.
        long_samples: what becomes of a sample that does not fit: `single` (a pack of its own),
            `drop` (into the ledger) or `error`; or a mapping limit -> policy, where the limit is
            `tokens` or a name in `limits` (limits not named: `single`).
        long_rule: a sample is long when its cost is `>` or `>=` pack_length.
        limits: further hard caps per pack, cost name -> cap.
        max_samples: cap on the samples in a pack.
        multiple_of: every sample is later padded to a multiple of this; the cost is rounded up.
        seed: shuffles samples of equal cost among their places; None keeps the id order.
        window: samples that are planned together, for streams and very large n; None = all.
        samples_per_step: exactly this many samples in each optimizer step.
        packs_multiple: with samples_per_step, the packs of a step are a multiple of this.
        packs_per_step: with samples_per_step, exactly this many packs in each step; None = the largest need,
            rounded up to `packs_multiple`. The spec of a finished plan holds the number it has.
        last_step: with samples_per_step, what becomes of the samples that do not fill the last step: `keep`
            (a smaller step) or `drop` (into the ledger, `partial_step`).
        skip: sample ids to leave out, into the ledger (`skipped`).
        packer_options: knobs of the packer, by name (`OPTIONS` of its module).
    """

    pack_length: int
    packer: str = "auto"
    long_samples: str | dict[str, str] = "single"
    long_rule: str = ">"
    limits: dict[str, int] = field(default_factory=dict)
    max_samples: int | None = None
    multiple_of: int = 1
    seed: int | None = None
    window: int | None = None
    samples_per_step: int | None = None
    packs_multiple: int = 1
    packs_per_step: int | None = None
    last_step: str = "keep"
    skip: tuple[int, ...] = ()
    packer_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low, high, meaning in _INTEGERS:
            if getattr(self, name) is not None or name in ("pack_length", "multiple_of", "packs_multiple"):
                object.__setattr__(self, name, _integer(name, getattr(self, name), low, high, meaning))
        one_of("long_rule", self.long_rule, (">", ">="))
        one_of("last_step", self.last_step, ("keep", "drop"))
        object.__setattr__(self, "skip", _checked_skip(self.skip))
        object.__setattr__(self, "limits", _checked_limits(self.limits))
        self._check_long_samples()
        if not isinstance(self.packer, str):
            raise ConfigError(f"packer is {self.packer!r}, expected a name", hint="for example 'auto'")
        extend.lookup("packers", self.packer)
        self._check_effects()

    def _check_long_samples(self) -> None:
        policies = self.long_samples
        if isinstance(policies, Mapping):
            known = ["tokens", *self.limits]
            for name in policies:
                one_of("limit of long_samples", name, known)
            object.__setattr__(self, "long_samples", {name: policies[name] for name in sorted(policies)})
            values = list(policies.values())
        else:
            values = [policies]
        for value in values:
            one_of("long_samples policy", value, ("single", "drop", "error"))

    def _check_effects(self) -> None:
        if self.samples_per_step is None:
            for name, default in (("packs_multiple", 1), ("packs_per_step", None), ("last_step", "keep")):
                without_effect(self, name, default, "without samples_per_step")
        else:
            self._check_steps()
        module = extend.lookup("packers", self.packer)
        known = getattr(module, "OPTIONS", {})
        for name in self.packer_options:
            if name not in known:
                raise (
                    UnknownNameError(f"option of packer {self.packer}", str(name), known)
                    if known
                    else InputError(f"packer {self.packer!r} has no options", hint="leave packer_options out")
                )
        if self.packer_options:
            module.check_options(self.packer_options)
        if (self.limits or self.max_samples is not None) and not getattr(module, "LIMITS", False):
            able = [
                n for n in extend.names("packers") if getattr(extend.lookup("packers", n), "LIMITS", False)
            ]
            raise InputError(
                f"packer {self.packer!r} does not plan limits or max_samples",
                hint=f"packers that do: {', '.join(able)}",
            )

    def _check_steps(self) -> None:
        without_effect(self, "window", None, "with samples_per_step: each step is planned alone")
        why = "with samples_per_step: the samples of a step are spread evenly over its packs"
        without_effect(self, "packer", "auto", why)
        if self.packs_per_step is not None and self.packs_per_step % self.packs_multiple:
            raise PlanError(
                f"packs_per_step {self.packs_per_step} is not a multiple of {self.packs_multiple}",
                hint="leave packs_multiple at 1, or change one of them",
            )

    def long_policy(self, limit: str = "tokens") -> str:
        """Policy for a sample that alone breaks `limit`."""
        if isinstance(self.long_samples, str):
            return self.long_samples
        return self.long_samples.get(limit, "single")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives the same spec back."""
        values = {**asdict(self), "skip": list(self.skip)}
        if not self.packer_options:  # checksums of plans without them stay what they were
            del values["packer_options"]
        return values

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Refuse what is no field of a spec, with the nearest name."""
        known = [f.name for f in fields(cls)]
        for name in names:
            one_of("plan option", name, known)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlanSpec:
        """A spec of plain values; unknown keys are refused with the nearest name."""
        cls.check_names(values)
        if "pack_length" not in values:
            raise ConfigError("pack_length is missing", hint="the cap of a pack in tokens, e.g. 8192")
        return cls(**dict(values))


def without_effect(settings: Any, name: str, default: Any, why: str) -> None:
    """A value that changes nothing is told, and is not part of the settings (a frozen dataclass)."""
    if (value := getattr(settings, name)) != default:
        logger.warning("%s=%r has no effect %s", name, value, why)
        object.__setattr__(settings, name, default)


def _integer(name: str, value: Any, low: int, most: int | None, meaning: str) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise PlanError(f"{name} is {value!r}, expected an integer >= {low}", hint=meaning)
    if number < low or (most is not None and number > most):
        wanted = f"expected >= {low}" if number < low else f"limit is {most}"
        raise PlanError(f"{name} is {number}, {wanted}", hint=meaning)
    return number


def _checked_skip(skip: object) -> tuple[int, ...]:
    if not isinstance(skip, Iterable) or isinstance(skip, str | bytes | Mapping):
        raise PlanError(f"skip is {skip!r}, expected sample ids")
    return tuple(sorted({_integer("an id in skip", value, 0, _MOST, "ids are 0..n-1") for value in skip}))


def _checked_limits(limits: object) -> dict[str, int]:
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise PlanError(f"limits is {limits!r}, expected a mapping of cost name to cap")
    out: dict[str, int] = {}
    for name in sorted(limits, key=str):
        option = {"tokens": "pack_length", "samples": "max_samples"}.get(name)
        if option is not None or not isinstance(name, str):
            what = f"{name!r}" if option else f"the name {name!r}, expected a cost name"
            raise PlanError(f"limits holds {what}", hint=option and f"use {option}")
        meaning = "cap of the sum over a pack; leave it out for no limit"
        out[name] = _integer(f"limits[{name!r}]", limits[name], 0, 1 << 40, meaning)
    return out
