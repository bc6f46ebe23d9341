"""plan(): from lengths and a spec to a PackPlan.

Steps: round and classify, ask the packer, check its answer, materialise canonically, certify. Pure: equal
lengths and specs give equal bytes on any machine, with any input type or chunking.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from ..errors import InputError, PlanError, counted
from ..extend import Patterns
from ..moved import also_named
from ..packers._bounds import best_bound
from ._materialise import Packed, check_patterns, from_patterns, pack_classes
from .ledger import without_skipped
from .lengths import Lengths, as_lengths
from .long_samples import Classes, classify
from .packplan import PackPlan
from .raw_plan import Certificate, PackerId, Sums, sum_over_packs
from .spec import PlanSpec
from .stats import SOURCE, report_steps, source_mixing
from .stepwise import plan_steps
from .window import plan_windows

logger = logging.getLogger(__name__)


@also_named("plan")
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
        raise InputError("plan() takes a spec or options, not both", hint="dataclasses.replace(spec, …)")
    checked = as_lengths(lengths)
    used = without_skipped(checked, spec)
    classes = classify(used, spec)
    if spec.samples_per_step is not None:
        csr, spec, classes, least = plan_steps(used, classes, spec)
        bound = Certificate.of(len(csr.offsets) - 1, least, "steps")
        made = _finished(checked, classes, Packed(csr, PackerId("spread", 1), classes.ledger), spec, bound)
        report_steps(made)
        return made
    packed = (pack_classes if spec.window is None else _pack_windows)(classes, used, spec)
    return _finished(checked, classes, packed, spec)


def own_lengths(made: PackPlan, lengths: Any) -> Lengths:
    """`lengths`, which have to be those of the plan."""
    checked = as_lengths(lengths)
    if checked.digest != made.lengths_digest:
        raise PlanError("these are not the lengths that the plan was made from", hint="pass its own lengths")
    return checked


def replay(made: PackPlan, lengths: Any, seed: int | None = None) -> PackPlan:
    """Rebuild a plan from the patterns stored in it, without its packer's solver.

    `seed`, where given, takes the place of the plan's own.

    Raises:
        PlanError: the plan stores no patterns, or `lengths` are not those it was made from.
    """
    stored = made.packer.notes.get("patterns")
    if stored is None:
        raise PlanError(f"the plan of packer {made.packer} stores no patterns", hint="plan again instead")
    checked = own_lengths(made, lengths)
    spec = made.spec if seed is None else replace(made.spec, seed=seed)
    arrays = {name: np.array(values, dtype=np.int64) for name, values in stored.items()}
    answer = Patterns(**arrays, notes=made.packer.notes)
    classes = classify(without_skipped(checked, spec), spec)
    check_patterns(answer, classes, spec)
    csr = from_patterns(classes.keys, classes.top, answer, classes.key_of_size, classes.singles, spec.seed)
    return _finished(checked, classes, Packed(csr, made.packer, classes.ledger), spec)


def _finished(
    checked: Lengths, classes: Classes, packed: Packed, spec: PlanSpec, proven: Certificate | None = None
) -> PackPlan:
    packs = len(packed.csr.offsets) - 1
    made = PackPlan(
        offsets=packed.csr.offsets,
        indices=packed.csr.indices,
        spec=spec,
        packer=packed.packer,
        ledger=packed.ledger,
        certificate=proven or _certify(packs, classes, checked, spec, packed),
        long_samples=classes.singles,
        slots=(packs - classes.singles) * spec.pack_length + classes.single_slots,
        sums=lambda made: _sums(checked, made),
        lengths_digest=lambda: checked.digest,
    )
    logger.info(
        "planned %d of %s into %s of %d tokens (%s, bound %d); ledger: %s",
        len(made.indices),
        counted(len(checked), "samples"),
        counted(len(made), "packs"),
        spec.pack_length,
        packed.packer,
        made.certificate.bound,
        made.ledger.counts() or "empty",
    )
    return made


def _sums(lengths: Lengths, made: PackPlan) -> Sums:
    packs = made.offsets, made.indices
    costs = {name: sum_over_packs(array, *packs)[0] for name, array in lengths.costs.items()}
    mixing = source_mixing(*packs, lengths.costs[SOURCE]) if SOURCE in lengths.costs else {}
    return Sums(*sum_over_packs(lengths.tokens, *packs), costs, mixing)


def _pack_windows(classes: Classes, lengths: Lengths, spec: PlanSpec) -> Packed:
    csr, packer, left_out = plan_windows(lengths, spec)
    ledger = classes.ledger
    if left_out:
        ledger = ledger.with_more(np.array(sorted(left_out), dtype=np.int64), "left_out")
    return Packed(csr, packer, ledger)


def _certify(packs: int, classes: Classes, lengths: Lengths, spec: PlanSpec, packed: Packed) -> Certificate:
    """The best bound over tokens, limits and samples. Samples that a packer left out void it."""
    notes = packed.packer.notes if spec.window is None else {}
    if packed.ledger is not classes.ledger:
        return Certificate.of(packs, min(packs, classes.singles), "singles")
    best = best_bound(classes.sizes, classes.counts, spec.pack_length, packs - classes.singles)
    if int(notes.get("bound", 0)) > best[0]:
        best = int(notes["bound"]), str(notes["bound_name"])
    members = classes.members() if spec.limits else None
    for name, cap in spec.limits.items():
        values = lengths.costs[name][members]
        sizes, counts = np.unique(values[values > 0], return_counts=True)
        if cap and len(sizes):
            bound, _ = best_bound(sizes.astype(np.int64), counts.astype(np.int64), cap, packs, cheap=True)
            best = max(best, (bound, name), key=itemgetter(0))  # of equal bounds the first
    if spec.max_samples is not None:
        by_samples = -(-int(classes.counts.sum()) // spec.max_samples)
        best = max(best, (by_samples, "samples"), key=itemgetter(0))
    return Certificate.of(packs, best[0] + classes.singles, best[1])
