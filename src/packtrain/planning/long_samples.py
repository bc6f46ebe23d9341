"""What becomes of each sample, long ones among them: packed, alone in a pack, or left out; as length classes.

Every sample gets a class key: 0 = left out (it goes to the ledger), 1..top = a class of equal cost, above
top = too long for a pack, a pack of its own. With capacities up to 2**22 the key is the cost itself;
above that classes are sparse and the key is 1 + the rank of the cost. When nothing is rounded or left out
the keys are the stored tokens themselves, not a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError, counted
from ..extend import I64
from ..packers._jit import DENSE_LIMIT, use_jit
from ._blocks import count_costs
from .ledger import Ledger
from .lengths import STATUS_NAMES, Lengths
from .spec import PlanSpec


@dataclass(frozen=True, slots=True)
class Classes:
    """Samples by class.

    Attributes:
        keys: int[n], see the module docstring.
        top: largest key of a class.
        sizes: int64[D], costs of the classes that occur, ascending.
        counts: int64[D], samples in each.
        sparse: whether a key is a rank instead of a cost.
        singles: samples that are too long, or break a limit alone, and get a pack of their own.
        single_slots: slots of their packs.
        ledger: samples left out.
    """

    keys: NDArray[Any]
    top: int
    sizes: I64
    counts: I64
    sparse: bool
    singles: int
    single_slots: int
    ledger: Ledger

    def key_of_size(self, sizes: I64) -> I64:
        """Class keys of costs that occur."""
        if not self.sparse:
            return sizes
        return np.searchsorted(self.sizes, sizes).astype(np.int64) + 1

    def members(self) -> I64:
        """Ids of the samples that are packed together, ascending."""
        return np.flatnonzero((self.keys > 0) & (self.keys <= self.top))

    def costs(self) -> NDArray[Any]:
        """Costs of `members()`, in their order."""
        keys = self.keys[(self.keys > 0) & (self.keys <= self.top)]
        return self.sizes[keys - 1] if self.sparse else keys


def classify(lengths: Lengths, spec: PlanSpec) -> Classes:
    """Round, apply the long-sample policies, and count.

    Raises:
        PlanError: a sample is long and the policy is `error`, or a limit names an unknown cost.
    """
    cap = spec.pack_length
    costs = _costs(lengths, spec.multiple_of)
    usable = None if not lengths.status.any() else lengths.status == 0
    dropped = _dropped(lengths, spec, costs, usable)
    alone = _alone(lengths, spec, costs, usable, dropped)
    largest = _rounded(lengths.max_tokens, spec.multiple_of)
    if usable is not None or dropped or len(alone):
        costs = costs.copy()
        if usable is not None:
            costs[~usable] = 0
        for ids in (*dropped.values(), alone):
            costs[ids] = 0
        largest = int(costs.max(initial=0))
    classes = _count(costs, largest, cap, _ledger(lengths, dropped))
    if len(alone) == 0:
        return classes
    classes.keys[alone] = classes.top + 1
    return replace(
        classes, singles=classes.singles + len(alone), single_slots=classes.single_slots + len(alone) * cap
    )


def _dropped(
    lengths: Lengths, spec: PlanSpec, costs: NDArray[Any], usable: NDArray[np.bool_] | None
) -> dict[str, I64]:
    """Ids that a policy drops, by ledger reason; each id once. Raises under the policy `error`."""
    out: dict[str, I64] = {}
    gone: NDArray[np.bool_] | None = None
    limit = spec.pack_length if spec.long_rule == ">" else spec.pack_length - 1
    checks = [("tokens", costs, limit, _rounded(lengths.max_tokens, spec.multiple_of))]
    for name, cap in spec.limits.items():
        values = _cost_of(lengths, name)
        checks.append((name, values, cap, int(values.max(initial=0))))
    # Errors first: no policy `drop` may hide a sample from a policy `error`.
    for policy in ("error", "drop"):
        for name, values, cap, largest in checks:
            if largest <= cap or spec.long_policy(name) != policy:
                continue
            over = values > cap
            if usable is not None:
                over &= usable
            if policy == "error" and over.any():
                raise _too_long(lengths, np.flatnonzero(over), spec, name)
            if gone is not None:
                over &= ~gone
            gone = over if gone is None else gone | over
            if over.any():
                out["over_long" if name == "tokens" else f"over_{name}"] = np.flatnonzero(over)
    return out


def _alone(
    lengths: Lengths,
    spec: PlanSpec,
    costs: NDArray[Any],
    usable: NDArray[np.bool_] | None,
    dropped: dict[str, I64],
) -> I64:
    """Ids that fit in tokens but break another limit alone, under the policy `single`."""
    breaks: NDArray[np.bool_] | None = None
    for name, cap in spec.limits.items():
        if spec.long_policy(name) == "single":
            over = _cost_of(lengths, name) > cap
            breaks = over if breaks is None else breaks | over
    if breaks is None or not breaks.any():
        return np.zeros(0, dtype=np.int64)
    breaks &= costs <= spec.pack_length
    if usable is not None:
        breaks &= usable
    for ids in dropped.values():
        breaks[ids] = False
    return np.flatnonzero(breaks)


def _cost_of(lengths: Lengths, name: str) -> NDArray[Any]:
    if name not in lengths.costs:
        known = ", ".join(lengths.costs) or "none"
        raise PlanError(
            f"limits names the cost {name!r}, the lengths hold: {known}",
            hint="measure it, or leave the limit out",
        )
    return lengths.costs[name]


def _count(costs: NDArray[Any], largest: int, cap: int, ledger: Ledger) -> Classes:
    sparse = cap > DENSE_LIMIT
    if not sparse and use_jit(len(costs)):
        counts, singles, single_slots = count_costs(costs, min(cap, largest))
        counts[0] = 0
        sizes = np.flatnonzero(counts)
        return Classes(costs, min(cap, largest), sizes, counts[sizes], False, singles, single_slots, ledger)
    values, number = np.unique(costs, return_counts=True)
    values = values.astype(np.int64)
    above = values > cap
    singles = int(number[above].sum())
    single_slots = sum(a * b for a, b in zip(values[above].tolist(), number[above].tolist(), strict=True))
    inside = (values > 0) & ~above
    sizes, counts = values[inside], number[inside].astype(np.int64)
    keys, top = costs, min(cap, largest)
    if sparse:
        keys, top = np.searchsorted(sizes, costs).astype(np.int64) + 1, len(sizes)
        keys[np.asarray(costs) == 0] = 0
    return Classes(keys, top, sizes, counts, sparse, singles, single_slots, ledger)


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _costs(lengths: Lengths, multiple: int) -> NDArray[Any]:
    """Tokens rounded up to a multiple, in the stored type or int64 where that would overflow."""
    tokens = lengths.tokens
    if multiple == 1:
        return tokens
    top = _rounded(lengths.max_tokens, multiple)
    if top >= 1 << 63:
        raise PlanError(f"a length of {lengths.max_tokens} rounded to {multiple} exceeds 2**63")
    wide = tokens.astype(np.int64)
    wide += multiple - 1
    wide //= multiple
    wide *= multiple
    return wide if top >= 1 << 31 else wide.astype(np.int32)


def _too_long(lengths: Lengths, ids: I64, spec: PlanSpec, name: str) -> PlanError:
    values, unit, cap, option = lengths.tokens, "tokens", spec.pack_length, "pack_length"
    if name != "tokens":
        values, unit, cap, option = lengths.costs[name], name, spec.limits[name], f"limit of {name}"
    shown = ", ".join(f"{i} ({int(values[i])} {unit})" for i in ids[:5].tolist())
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    rounded = f" after rounding to {spec.multiple_of}" if spec.multiple_of > 1 and name == "tokens" else ""
    sign = spec.long_rule if name == "tokens" else ">"
    return PlanError(
        f"{counted(len(ids), 'long samples')} ({sign} {option} {cap}{rounded}): {shown}{more}",
        hint=f"raise {option.replace('limit', 'the limit')}, or set long_samples to 'single' or 'drop'; "
        "a sample is never split",
    )


def _ledger(lengths: Lengths, dropped: dict[str, I64]) -> Ledger:
    """Samples left out: by status with the finest reason known, and those that a policy dropped."""
    bad = np.flatnonzero(lengths.status)
    if not len(bad) and not dropped:
        return Ledger(np.zeros(0), np.zeros(0), [])
    words = sorted({*lengths.reasons.values(), *STATUS_NAMES[1:], *dropped})
    code = {word: k for k, word in enumerate(words)}
    by_status = np.array([0] + [code[word] for word in STATUS_NAMES[1:]], dtype=np.int64)
    codes = by_status[lengths.status[bad]]
    if lengths.reasons:
        named = np.array(sorted(lengths.reasons), dtype=np.int64)
        codes[np.searchsorted(bad, named)] = [code[lengths.reasons[i]] for i in named.tolist()]
    ids = np.concatenate([bad, *dropped.values()])
    codes = np.concatenate([codes, *(np.full(len(gone), code[word]) for word, gone in dropped.items())])
    order = np.argsort(ids, kind="stable")
    ids, codes = ids[order], codes[order]
    used = np.flatnonzero(np.bincount(codes, minlength=len(words)))
    compact = np.zeros(len(words), dtype=np.int64)
    compact[used] = np.arange(len(used))
    return Ledger(ids, compact[codes], [words[k] for k in used.tolist()])
