"""Difference of two plans: what in their spec or lengths differs, and which samples moved.

A sample moved when it is packed in both plans but not with the same companions. Packs are matched by
their smallest id, so no search is needed: O(samples) time, a few bytes a sample. Lengths are compared
value by value where both are given, else by digest alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..extend import I64
from .lengths import Lengths
from .packplan import PackPlan


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """What differs; every pair is (first plan, second plan).

    Attributes:
        equal: nothing differs: same packs, ledger, spec and lengths.
        spec: option -> pair of values, for options that differ.
        packer: pair, when name, version or choice differ.
        lengths_digest: pair, when they differ.
        lengths: what differs in the lengths, where both were given: `read` (pair), and the number of samples
            with other `tokens`, `status` or cost, by name.
        packs: pair of the number of packs.
        same_packs: packs with the same content in both.
        moved: int64[k] ids, ascending: packed in both, with other companions.
        entered: int64[k] ids that are packed only in the second plan.
        left: int64[k] ids that are packed only in the first plan.
        reasons: ids that are in both ledgers for different reasons.
        changed_lengths: int64[k] ids whose tokens, costs or status differ.
    """

    equal: bool
    spec: dict[str, tuple[Any, Any]]
    packer: tuple[str, str] | None
    lengths_digest: tuple[str, str] | None
    lengths: dict[str, Any] | None
    packs: tuple[int, int]
    same_packs: int
    moved: I64
    entered: I64
    left: I64
    reasons: I64
    changed_lengths: I64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def to_dict(self, ids: int = 10) -> dict[str, Any]:
        """Plain JSON values; of every list of ids its length and the first `ids` of them."""
        return {
            name: {"count": len(value), "first": value[:ids].tolist()}
            if isinstance(value, np.ndarray)
            else value
            for name, value in asdict(self).items()
        }


def diff_plans(first: PackPlan, second: PackPlan, lengths: tuple[Lengths, Lengths] | None = None) -> PlanDiff:
    """Compare two plans; with `lengths` of both also sample by sample."""
    same = _same_packs(first, second)
    in_first, in_second = _packed(first), _packed(second)
    kept = in_first[np.isin(in_first, in_second, assume_unique=True)]
    stay = np.sort(_ids_of(first, same), kind="stable")
    specs = first.spec.to_dict(), second.spec.to_dict()
    named = str(first.packer), str(second.packer)
    digests = first.lengths_digest, second.lengths_digest
    one, two = dict(first.ledger), dict(second.ledger)
    summary, changed = (None, np.zeros(0, dtype=np.int64)) if lengths is None else _lengths(*lengths)
    return PlanDiff(
        equal=first == second,
        spec={k: (specs[0][k], specs[1][k]) for k in specs[0] if specs[0][k] != specs[1][k]},
        packer=named if named[0] != named[1] else None,
        lengths_digest=digests if digests[0] != digests[1] else None,
        lengths=summary,
        packs=(len(first), len(second)),
        same_packs=len(same),
        moved=kept[~np.isin(kept, stay, assume_unique=True)],
        entered=in_second[~np.isin(in_second, in_first, assume_unique=True)],
        left=in_first[~np.isin(in_first, in_second, assume_unique=True)],
        reasons=np.array([i for i in one if i in two and one[i] != two[i]], dtype=np.int64),
        changed_lengths=changed,
    )


def _packed(plan: PackPlan) -> I64:
    return np.sort(np.asarray(plan.indices).astype(np.int64), kind="stable")


def _ids_of(plan: PackPlan, packs: I64) -> I64:
    """Ids in the named packs."""
    take = np.zeros(len(plan), dtype=bool)
    take[packs] = True
    ids: I64 = np.asarray(plan.indices)[np.repeat(take, np.diff(plan.offsets))].astype(np.int64)
    return ids


def _same_packs(first: PackPlan, second: PackPlan) -> I64:
    """Packs of `first` that `second` holds too."""
    if len(first) == 0 or len(second) == 0:
        return np.zeros(0, dtype=np.int64)
    starts = first.offsets[:-1], second.offsets[:-1]
    heads = tuple(
        np.asarray(p.indices)[s].astype(np.int64) for p, s in zip((first, second), starts, strict=True)
    )
    order = np.argsort(heads[1], kind="stable")  # steps of a stepwise plan ascend one by one
    place = np.minimum(np.searchsorted(heads[1][order], heads[0]), len(order) - 1)
    match = order[place]
    width = np.diff(first.offsets)
    a = np.flatnonzero((heads[1][match] == heads[0]) & (np.diff(second.offsets)[match] == width))
    if len(a) == 0:
        return a
    ends = np.cumsum(width[a])
    within = np.arange(int(ends[-1])) - np.repeat(ends - width[a], width[a])
    left = np.asarray(first.indices)[np.repeat(starts[0][a], width[a]) + within]
    right = np.asarray(second.indices)[np.repeat(starts[1][match[a]], width[a]) + within]
    differ = np.add.reduceat((left != right).astype(np.int64), ends - width[a])
    return a[differ == 0]  # type: ignore[no-any-return]


def _lengths(first: Lengths, second: Lengths) -> tuple[dict[str, Any], I64]:
    """What differs in the lengths, and the ids that differ among those that both have."""
    n = min(len(first), len(second))
    changed = np.zeros(n, dtype=bool)
    out: dict[str, Any] = {"read": (len(first), len(second))}
    pairs = {"tokens": (first.tokens, second.tokens), "status": (first.status, second.status)}
    for name in sorted({*first.costs, *second.costs}):
        if name in first.costs and name in second.costs:
            pairs[name] = first.costs[name], second.costs[name]
        else:
            out[name] = "only in the first" if name in first.costs else "only in the second"
    for name, (a, b) in pairs.items():
        differs = np.asarray(a[:n]) != np.asarray(b[:n])
        changed |= differs
        out[name] = int(differs.sum())
    ids: I64 = np.flatnonzero(changed)
    return out, ids
