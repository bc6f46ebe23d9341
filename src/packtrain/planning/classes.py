"""Length classes: from lengths and spec to what a packer sees.

Every sample gets a class key: 0 = left out (it goes to the ledger), 1..top = a class of equal cost, above
top = too long for a pack, a pack of its own. With capacities up to 2**22 the key is the cost itself;
above that classes are sparse and the key is 1 + the rank of the cost. When nothing is rounded or left out
the keys are the stored tokens themselves, not a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..packers._jit import DENSE_LIMIT, use_jit
from .ledger import Ledger
from .lengths import STATUS_NAMES, Lengths
from .spec import PlanSpec

__all__ = ["Classes", "classify"]

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Classes:
    """Samples by class.

    Attributes:
        keys: int[n], see the module docstring.
        top: largest key of a class.
        sizes: int64[D], costs of the classes that occur, ascending.
        counts: int64[D], samples in each.
        sparse: whether a key is a rank instead of a cost.
        singles: samples that are too long and get a pack of their own.
        single_slots: sum of their costs.
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
    """Round, apply the long-sample policy, and count.

    Raises:
        PlanError: a sample is long and the policy is `error`.
    """
    cap = spec.pack_length
    costs = _costs(lengths, spec.multiple_of)
    usable = None if not lengths.status.any() else lengths.status == 0
    largest = _rounded(lengths.max_tokens, spec.multiple_of)
    policy = spec.long_policy()
    limit = cap if spec.long_rule == ">" else cap - 1
    long_ids = None
    if largest > limit and policy != "single":
        long = costs > limit
        if usable is not None:
            long &= usable
        long_ids = np.flatnonzero(long)
        if len(long_ids) and policy == "error":
            raise _too_long(lengths, long_ids, spec)
    if usable is not None or (long_ids is not None and len(long_ids)):
        costs = costs.copy()
        if usable is not None:
            costs[~usable] = 0
        if long_ids is not None:
            costs[long_ids] = 0
        largest = int(costs.max(initial=0))
    ledger = _ledger(lengths, long_ids)
    return _count(costs, largest, cap, ledger)


def _count(costs: NDArray[Any], largest: int, cap: int, ledger: Ledger) -> Classes:
    sparse = cap > DENSE_LIMIT
    if not sparse and use_jit(len(costs)):
        from ..packers._kernels import histogram

        counts, singles, single_slots = histogram(costs, min(cap, largest))
        counts[0] = 0
        sizes = np.flatnonzero(counts)
        return Classes(
            costs, min(cap, largest), sizes, counts[sizes], False, int(singles), int(single_slots), ledger
        )
    values, number = np.unique(costs, return_counts=True)
    values = values.astype(np.int64)
    above = values > cap
    singles = int(number[above].sum())
    single_slots = sum(a * b for a, b in zip(values[above].tolist(), number[above].tolist(), strict=True))
    inside = (values > 0) & ~above
    sizes, counts = values[inside], number[inside].astype(np.int64)
    if sparse:
        keys = np.searchsorted(sizes, costs).astype(np.int64) + 1
        keys[np.asarray(costs) == 0] = 0
        return Classes(keys, len(sizes), sizes, counts, True, singles, single_slots, ledger)
    return Classes(costs, min(cap, largest), sizes, counts, False, singles, single_slots, ledger)


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


def _too_long(lengths: Lengths, ids: I64, spec: PlanSpec) -> PlanError:
    shown = ", ".join(f"{i} ({int(lengths.tokens[i])} tokens)" for i in ids[:5].tolist())
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    rounded = f" after rounding to {spec.multiple_of}" if spec.multiple_of > 1 else ""
    sign = ">" if spec.long_rule == ">" else ">="
    return PlanError(
        f"{len(ids)} samples are long ({sign} pack_length {spec.pack_length}{rounded}): {shown}{more}",
        hint="raise pack_length, or set long_samples to 'single' or 'drop'; a sample is never split",
    )


def _ledger(lengths: Lengths, long_ids: I64 | None) -> Ledger:
    """Samples left out: by status with the finest reason known, and dropped long ones."""
    n_long = 0 if long_ids is None else len(long_ids)
    bad = np.flatnonzero(lengths.status)
    if not len(bad) and not n_long:
        return Ledger(np.zeros(0), np.zeros(0), [])
    words = sorted({*lengths.reasons.values(), *STATUS_NAMES[1:], "over_long"})
    code = {word: k for k, word in enumerate(words)}
    by_status = np.array([0] + [code[word] for word in STATUS_NAMES[1:]], dtype=np.int64)
    codes = by_status[lengths.status[bad]]
    if lengths.reasons:
        named = np.array(sorted(lengths.reasons), dtype=np.int64)
        codes[np.searchsorted(bad, named)] = [code[lengths.reasons[i]] for i in named.tolist()]
    ids = bad
    if n_long and long_ids is not None:
        ids = np.concatenate([bad, long_ids])
        codes = np.concatenate([codes, np.full(n_long, code["over_long"])])
        order = np.argsort(ids, kind="stable")
        ids, codes = ids[order], codes[order]
    used = np.flatnonzero(np.bincount(codes, minlength=len(words)))
    compact = np.zeros(len(words), dtype=np.int64)
    compact[used] = np.arange(len(used))
    return Ledger(ids, compact[codes], [words[k] for k in used.tolist()])
