"""plan(): from lengths and a spec to a PackPlan.

Steps: round and classify, ask the packer, check its answer, materialise canonically, certify. Pure: equal
lengths and specs give equal bytes on any machine, with any input type or chunking.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import extend
from ..errors import LawError
from ..extend import PackProblem, Patterns
from ..packers._jit import use_jit
from ._materialise import Csr, from_bins, from_patterns
from .certificate import certify
from .classes import Classes, classify
from .ledger import Ledger
from .lengths import Lengths, as_lengths
from .packplan import PackerId, PackPlan, Sums
from .spec import PlanSpec

__all__ = ["plan"]

logger = logging.getLogger(__name__)
I64 = NDArray[np.int64]


def plan(
    lengths: Any, pack_length: int | None = None, *, spec: PlanSpec | None = None, **options: Any
) -> PackPlan:
    """Pack samples into as few packs as possible.

    Args:
        lengths: a `Lengths`, or tokens as an integer array, list or memory map.
        pack_length: hard cap of a multi-sample pack, in tokens.
        spec: a ready `PlanSpec`, instead of pack_length and options.
        options: further fields of `PlanSpec` (packer, long_samples, multiple_of, seed, …).

    Returns:
        The raw plan. Every sample is in exactly one pack, or once in `plan.ledger`.

    Raises:
        LengthError: `lengths` are not lengths.
        PlanError: an option cannot hold, or a long sample under long_samples="error".
        UnknownNameError: unknown packer, policy or option (names the nearest).

    >>> import packtrain as pt
    >>> [pack.tolist() for pack in pt.plan([30, 30, 20, 60, 50, 10, 40, 30], pack_length=80)]
    [[0, 4], [1], [2, 3], [5, 6, 7]]
    """
    if spec is None:
        given = {} if pack_length is None else {"pack_length": pack_length}
        spec = PlanSpec.from_dict({**given, **options})
    elif pack_length is not None or options:
        raise LawError("plan() takes a spec or options, not both")
    checked = as_lengths(lengths)
    classes = classify(checked, spec)
    csr, packer, ledger = _pack(classes, spec)
    regular = len(csr.offsets) - 1 - classes.singles
    made = PackPlan(
        offsets=csr.offsets,
        indices=csr.indices,
        spec=spec,
        packer=packer,
        ledger=ledger,
        certificate=certify(
            len(csr.offsets) - 1, classes.sizes, classes.counts, spec.pack_length, classes.singles
        ),
        long_samples=classes.singles,
        slots=regular * spec.pack_length + classes.single_slots,
        sums=lambda made: pack_sums(made, checked),
        lengths_digest=lambda: checked.digest,
    )
    logger.info(
        "planned %d of %d samples into %d packs of %d tokens (%s, bound %d); ledger: %s",
        len(made.indices), len(checked), len(made), spec.pack_length, packer, made.certificate.bound,
        ledger.counts() or "empty",
    )  # fmt: skip
    return made


def _pack(classes: Classes, spec: PlanSpec) -> tuple[Csr, PackerId, Ledger]:
    """Ask the packer, check its answer, materialise."""
    module = extend.lookup("packers", spec.packer)
    histogram_only = getattr(module, "HISTOGRAM", False)
    problem = PackProblem(
        costs=np.zeros(0, dtype=np.int64) if histogram_only else classes.costs(),
        capacity=spec.pack_length,
        sizes=classes.sizes,
        counts=classes.counts,
        seed=spec.seed,
    )
    answer = module.pack(problem)
    ledger = classes.ledger
    if isinstance(answer, Patterns):
        packer = PackerId(spec.packer, int(module.VERSION), dict(answer.notes))
        _check_patterns(answer, classes, spec)
        return (
            from_patterns(classes.keys, classes.top, answer, classes.key_of_size, classes.singles, spec.seed),
            packer,
            ledger,
        )
    packer = PackerId(spec.packer, int(module.VERSION))
    bin_of, left_out = _full_bins(np.asarray(answer, dtype=np.int64), classes, spec)
    if len(left_out):
        ledger = ledger.with_more(left_out, "left_out")
    csr = from_bins(bin_of)
    _check_packs(csr, classes, spec)
    return csr, packer, ledger


def _full_bins(answer: I64, classes: Classes, spec: PlanSpec) -> tuple[I64, I64]:
    """Bins of all samples from the bins of the members, and the ids that the packer left out."""
    members = classes.members()
    if answer.shape != members.shape:
        raise LawError(f"packer {spec.packer!r} answered shape {answer.shape} for {len(members)} samples")
    if len(answer) and (int(answer.min()) < -1 or int(answer.max()) >= 1 << 62):
        raise LawError(f"packer {spec.packer!r} answered a bin outside -1..2**62")
    bins = np.full(len(classes.keys), -1, dtype=np.int64)
    bins[members] = answer
    alone = np.flatnonzero(classes.keys > classes.top)
    bins[alone] = np.arange(len(alone)) + (int(answer.max(initial=-1)) + 1)
    return bins, members[answer < 0]


def _check_patterns(answer: Patterns, classes: Classes, spec: PlanSpec) -> None:
    """Law 1 and law 2 on patterns: every class is used up exactly and no pattern exceeds the cap."""
    if len(answer.repeat) == 0 and len(classes.sizes) == 0:
        return
    ok = len(answer.repeat) > 0 and bool((answer.repeat > 0).all()) and bool((answer.number > 0).all())
    if ok:
        totals = np.add.reduceat(answer.size * answer.number, answer.offsets[:-1])
        ok = int(totals.max()) <= spec.pack_length and bool((np.diff(answer.offsets) > 0).all())
    if ok:
        at = np.searchsorted(classes.sizes, answer.size)
        known = (at < len(classes.sizes)) & (
            classes.sizes[np.minimum(at, len(classes.sizes) - 1)] == answer.size
        )
        used = np.zeros(len(classes.sizes), dtype=np.int64)
        if bool(known.all()):
            np.add.at(used, at, answer.number * np.repeat(answer.repeat, np.diff(answer.offsets)))
        ok = bool((used == classes.counts).all())
    if not ok:
        raise LawError(f"packer {spec.packer!r} answered patterns that break partition or capacity")


def _check_packs(csr: Csr, classes: Classes, spec: PlanSpec) -> None:
    """Law 2 on packs: a pack of two or more samples is within the cap."""
    if len(csr.offsets) == 1:
        return
    keys = classes.keys[csr.indices]
    if classes.sparse:
        costs = np.append(classes.sizes, spec.pack_length + 1)[np.minimum(keys - 1, len(classes.sizes))]
    else:
        costs = keys.astype(np.int64)
    totals = np.add.reduceat(costs, csr.offsets[:-1])
    worst = int(np.argmax(np.where(np.diff(csr.offsets) > 1, totals, 0)))
    if np.diff(csr.offsets)[worst] > 1 and totals[worst] > spec.pack_length:
        raise LawError(
            f"packer {spec.packer!r} put {int(totals[worst])} tokens into a pack of {spec.pack_length}"
        )


def pack_sums(made: PackPlan, lengths: Lengths) -> Sums:
    """Sums over each pack, from the lengths that it was made of."""
    tokens, squares = _sums(lengths.tokens, made.offsets, made.indices, squares=True)
    costs = {
        name: _sums(array, made.offsets, made.indices, squares=False)[0]
        for name, array in lengths.costs.items()
    }
    return Sums(tokens, squares, costs)


def _sums(values: NDArray[Any], offsets: I64, indices: NDArray[Any], *, squares: bool) -> tuple[I64, I64]:
    if len(offsets) == 1:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if use_jit(len(values)):
        from ._sweep import sum_packs

        out: tuple[I64, I64] = sum_packs(values, offsets, indices)
        return out
    gathered = values[indices].astype(np.int64)
    total = np.add.reduceat(gathered, offsets[:-1])
    return total, np.add.reduceat(gathered * gathered, offsets[:-1]) if squares else total
