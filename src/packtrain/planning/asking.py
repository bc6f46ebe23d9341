"""Asking a packer: its answer, checked against partition and capacity, as canonical packs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import extend
from ..errors import LawError, counted
from ..extend import Bins, PackProblem, Patterns
from ..packers._jit import use_jit
from ..packers._multi import needs, types_of
from ._materialise import Csr, counts_by_key, from_bins, from_patterns, shuffle_bins
from .ledger import Ledger
from .lengths import Lengths
from .long_samples import Classes
from .raw_plan import PackerId
from .spec import PlanSpec

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """A checked and materialised answer of a packer."""

    csr: Csr
    packer: PackerId
    ledger: Ledger


def pack_classes(classes: Classes, lengths: Lengths, spec: PlanSpec) -> Packed:
    """Ask the packer, check its answer, materialise."""
    module = extend.lookup("packers", spec.packer)
    limited = bool(spec.limits) or spec.max_samples is not None
    members = classes.members() if limited or not getattr(module, "HISTOGRAM", False) else None
    problem = PackProblem(
        costs=np.zeros(0, dtype=np.int64) if members is None else classes.costs(),
        capacity=spec.pack_length,
        sizes=classes.sizes,
        counts=classes.counts,
        limits={
            name: (lengths.costs[name][members].astype(np.int64), cap) for name, cap in spec.limits.items()
        },
        max_samples=spec.max_samples,
        seed=spec.seed,
        options=spec.packer_options,
    )
    answer = module.pack(problem)
    notes = dict(answer.notes) if isinstance(answer, Patterns | Bins) else {}
    packer = PackerId(spec.packer, int(module.VERSION), notes)
    if isinstance(answer, Patterns):
        check_patterns(answer, classes, spec)
        csr = from_patterns(
            classes.keys, classes.top, answer, classes.key_of_size, classes.singles, spec.seed
        )
        return Packed(csr, packer, classes.ledger)
    bins = np.asarray(answer.bin_of if isinstance(answer, Bins) else answer, dtype=np.int64)
    if members is None or bins.shape != members.shape:
        raise LawError(
            f"packer {spec.packer!r} answered shape {bins.shape} for {counted(len(problem.costs), 'samples')}"
        )
    if len(bins) and (int(bins.min()) < -1 or int(bins.max()) >= 1 << 62):
        raise LawError(f"packer {spec.packer!r} answered a bin outside -1..2**62")
    if spec.seed is not None and not getattr(module, "SEEDED", False):
        bins = shuffle_bins(bins, types_of(needs(problem)[0]), spec.seed)
    csr = from_bins(_full_bins(bins, members, classes))
    _check_packs(csr, classes, lengths, spec)
    left_out = members[bins < 0]
    ledger = classes.ledger.with_more(left_out, "left_out") if len(left_out) else classes.ledger
    return Packed(csr, packer, ledger)


def _full_bins(bins: I64, members: I64, classes: Classes) -> I64:
    """Bins of all samples from the bins of the members; samples that stand alone get bins of their own."""
    out = np.full(len(classes.keys), -1, dtype=np.int64)
    out[members] = bins
    alone = np.flatnonzero(classes.keys > classes.top)
    out[alone] = np.arange(len(alone)) + (int(bins.max(initial=-1)) + 1)
    return out


def check_patterns(answer: Patterns, classes: Classes, spec: PlanSpec) -> None:
    """Law 1 and law 2 on patterns: every class is used up exactly and no pattern exceeds the cap."""
    if len(answer.repeat) == 0 and len(classes.sizes) == 0:
        return
    ok = len(answer.repeat) > 0 and bool((answer.repeat > 0).all()) and bool((answer.number > 0).all())
    if ok:
        totals = np.add.reduceat(answer.size * answer.number, answer.offsets[:-1])
        ok = int(totals.max()) <= spec.pack_length and bool((np.diff(answer.offsets) > 0).all())
    if ok and not classes.sparse:
        ok = int(answer.size.min()) > 0 and int(answer.size.max()) <= classes.top
        if ok:
            used = counts_by_key(answer.size, answer, classes.top, use_jit(len(classes.keys)))
            ok = bool((used[classes.sizes] == classes.counts).all()) and used.sum() == classes.counts.sum()
    elif ok:
        at = np.minimum(np.searchsorted(classes.sizes, answer.size), len(classes.sizes) - 1)
        ok = bool((classes.sizes[at] == answer.size).all())
        used = counts_by_key(at, answer, len(classes.sizes) - 1, use_jit(len(classes.keys)))
        ok = ok and bool((used == classes.counts).all())
    if not ok:
        raise LawError(f"packer {spec.packer!r} answered patterns that break partition or capacity")


def _check_packs(csr: Csr, classes: Classes, lengths: Lengths, spec: PlanSpec) -> None:
    """Law 2 on packs: a pack of two or more samples is within the cap and every limit."""
    shared = np.diff(csr.offsets) > 1
    if not shared.any():
        return
    keys = classes.keys[csr.indices]
    if classes.sparse:
        costs = np.append(classes.sizes, spec.pack_length + 1)[np.minimum(keys - 1, len(classes.sizes))]
    else:
        costs = keys.astype(np.int64)
    checks = [("tokens", costs, spec.pack_length)]
    checks += [
        (name, lengths.costs[name][csr.indices].astype(np.int64), cap) for name, cap in spec.limits.items()
    ]
    if spec.max_samples is not None:
        checks.append(("samples", np.ones(len(costs), dtype=np.int64), spec.max_samples))
    for name, values, cap in checks:
        held = np.where(shared, np.add.reduceat(values, csr.offsets[:-1]), 0)
        if int(held.max()) > cap:
            raise LawError(
                f"packer {spec.packer!r} put {int(held.max())} {name} into a pack, the limit is {cap}"
            )
